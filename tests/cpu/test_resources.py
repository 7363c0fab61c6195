"""Resources: demands that fit, and errors in no time that name what lacks."""

import pytest

from hybrid.errors import ResourceError
from hybrid.resources import ResourceSpec, check_fit


def test_l1_a_bundle_too_large_for_any_node_names_the_lack() -> None:
    nodes = [{"GPU": 8.0, "CPU": 32.0}]
    with pytest.raises(ResourceError, match=r"needs {CPU: 60, GPU: 6} on one node.*lacks CPU \(asked 60, has 32\)"):
        check_fit([{"GPU": 6, "CPU": 60}], nodes)


def test_the_closest_node_is_the_one_that_is_described() -> None:
    nodes = [{"CPU": 4.0}, {"CPU": 30.0, "GPU": 4.0}]
    with pytest.raises(ResourceError, match=r"none of 2 node\(s\).*lacks CPU \(asked 32, has 30\)"):
        check_fit([{"CPU": 32, "GPU": 2}], nodes)
    with pytest.raises(ResourceError, match=r"lacks GPU \(asked 1, has 0\)"):
        check_fit([{"CPU": 1, "GPU": 1}], [{"CPU": 4.0}])


def test_bundles_that_fit_alone_but_not_together_say_how_many_fit() -> None:
    with pytest.raises(
        ResourceError, match=r"3 bundles of {CPU: 2}.*and 2 fit the 2 node\(s\): CPU asked 6, there is 6"
    ):
        check_fit([{"CPU": 2}] * 3, [{"CPU": 3.0}, {"CPU": 3.0}])
    with pytest.raises(ResourceError, match="GPU asked 4, there is 2"):
        check_fit([{"GPU": 1}] * 4, [{"GPU": 2.0, "CPU": 8.0}])


def test_large_bundles_are_placed_first() -> None:
    assert check_fit([{"CPU": 1}, {"CPU": 3}, {"CPU": 2}], [{"CPU": 3.0}, {"CPU": 3.0}]) == (1, 0, 1)


def test_no_node_at_all() -> None:
    with pytest.raises(ResourceError, match="there is no node at all"):
        check_fit([{"CPU": 1}], [])


def test_a_spec_makes_its_bundles() -> None:
    spec = ResourceSpec(num_workers=4, cpus_per_worker=2, gpus_per_worker=1, one_node=True)
    assert spec.bundles == ({"CPU": 8.0, "GPU": 4.0},)
    assert ResourceSpec(num_workers=3).bundles == ({"CPU": 1.0},) * 3


def test_impossible_specs_are_refused() -> None:
    with pytest.raises(ValueError, match="num_workers >= 1 and max_groups >= 1, got 0"):
        ResourceSpec(num_workers=0)
    with pytest.raises(ValueError, match="cpus_per_worker > 0"):
        ResourceSpec(num_workers=1, cpus_per_worker=0)
    with pytest.raises(ValueError, match="2 GPUs each can't share them with other groups: use max_groups=1"):
        ResourceSpec(num_workers=1, gpus_per_worker=2)
