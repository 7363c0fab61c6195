import itertools

import pytest

from reshard import DType, Mesh, Region, Tier, Topology
from reshard.errors import LayoutError


def points(region: Region) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(a, b) for a, b in zip(region.start, region.stop, strict=True))))


def all_regions(extent: int) -> list[Region]:
    spans = [(a, b) for a in range(extent + 1) for b in range(a, extent + 1)]
    return [Region("w", (a, c), (b, d)) for (a, b), (c, d) in itertools.product(spans, spans)]


def test_intersect_and_subtract_agree_with_sets_of_points():
    regions = all_regions(3)
    for first, second in itertools.product(regions[::2], regions[::3]):
        assert points(first.intersect(second)) == points(first) & points(second)
        left = first.subtract(second)
        assert set().union(*map(points, left)) == points(first) - points(second)
        assert sum(part.numel for part in left) == len(points(first) - points(second))
        assert first.contains(second) == (points(second) <= points(first))


def test_zero_dimensional_region_holds_one_element():
    scalar = Region.whole("s", ())
    assert scalar.numel == 1
    assert scalar.intersect(scalar) == scalar
    assert scalar.subtract(scalar) == ()
    assert scalar.contains(scalar)


def test_empty_region_is_ordinary():
    empty = Region("w", (2, 0), (2, 4))
    assert empty.is_empty
    assert Region.whole("w", (4, 4)).contains(empty)
    assert Region.whole("w", (4, 4)).subtract(empty) == (Region.whole("w", (4, 4)),)
    assert str(empty) == "w[2:2, 0:4]"


@pytest.mark.parametrize(("start", "stop"), [((0,), (1, 1)), ((-1,), (1,)), ((2,), (1,))])
def test_bad_region_is_refused(start, stop):
    with pytest.raises(LayoutError, match="region of 'w'"):
        Region("w", start, stop)


def test_regions_of_two_tensors_do_not_compare():
    with pytest.raises(LayoutError, match="different tensors"):
        Region.whole("a", (2,)).intersect(Region.whole("b", (2,)))


def test_mesh_orders_the_last_axis_fastest():
    mesh = Mesh.parse("pp=2, dp=2,tp=2")
    assert mesh.group(5, "tp") == (4, 5)
    assert mesh.group(5, "dp") == (5, 7)
    assert mesh.group(5, "pp") == (1, 5)
    assert mesh.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.groups("dp", "tp") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert mesh.coordinate(6) == {"pp": 1, "dp": 1, "tp": 0}
    assert mesh.rank(pp=1, dp=1) == 6
    assert mesh.slice(pp=1).ranks == (4, 5, 6, 7)
    assert all(mesh.rank(**mesh.coordinate(rank)) == rank for rank in mesh.ranks)


def test_mesh_keeps_permuted_ranks():
    mesh = Mesh({"dp": 2, "tp": 2}, ranks=[3, 1, 2, 0])
    assert mesh.groups("tp") == ((3, 1), (2, 0))
    assert mesh.index(2, "dp") == 1
    assert mesh.index(2, "pp") == 0
    assert mesh == Mesh({"dp": 2, "tp": 2}, ranks=[3, 1, 2, 0]) != Mesh({"dp": 2, "tp": 2})


@pytest.mark.parametrize(
    ("axes", "ranks", "message"),
    [
        ({"tp": 2}, range(5), r"left over are \[2, 3, 4\]"),
        ({"tp": 4}, range(3), "1 are missing"),
        ({"tp": 2}, [1, 1], r"ranks \[1\] appear more than once"),
        ({"tp": 0}, None, "expected at least 1"),
    ],
)
def test_mesh_that_does_not_fill_its_ranks_says_so(axes, ranks, message):
    with pytest.raises(LayoutError, match=message):
        Mesh(axes, ranks=ranks)


@pytest.mark.parametrize("text", ["tp", "tp=x", "=2", "tp=2,tp=2"])
def test_mesh_text_is_checked(text):
    with pytest.raises(LayoutError, match="expected distinct 'axis=size' parts"):
        Mesh.parse(text)


def test_mesh_names_unknown_rank_and_axis():
    mesh = Mesh({"tp": 2})
    with pytest.raises(LayoutError, match="rank 7 is not in mesh"):
        mesh.coordinate(7)
    with pytest.raises(LayoutError, match="no axis 'ep'"):
        mesh.groups("ep")


def test_topology_tiers():
    topology = Topology({0: 0, 1: 0, 2: 0, 3: 1}, gpus={0: 0, 1: 0, 2: 1, 3: 2})
    assert [topology.tier(0, other) for other in range(4)] == [Tier.RANK, Tier.GPU, Tier.NODE, Tier.CLUSTER]
    assert Topology.regular(range(16)).num_nodes == 2
    assert Topology.from_json(topology.to_json()).to_json() == topology.to_json()
    with pytest.raises(LayoutError, match=r"no place for ranks \[9\]"):
        topology.node(9)
    with pytest.raises(LayoutError, match="GPU 0 of rank 1 is on nodes 0 and 1"):
        Topology({0: 0, 1: 1}, gpus={0: 0, 1: 0})


def test_dtype_codes_are_fixed_and_names_parse():
    fixed = [DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16, DType.FLOAT8_E4M3FN]
    assert [dtype.code for dtype in fixed] == [0, 1, 2, 3]
    assert all(DType.from_code(dtype.code) is dtype is DType.parse(f"torch.{dtype.value}") for dtype in DType)
    with pytest.raises(LayoutError, match="unknown dtype 'float31': use one of float32"):
        DType.parse("float31")
