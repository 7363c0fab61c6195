import subprocess
import sys

import pytest
import torch

from reshard import Address, DType, Layout, Region, make_plan
from reshard.errors import LayoutError
from reshard.layout_merge import layout_from_bytes, layout_to_bytes
from reshard.plan_oracle import byte_offsets, check_plan, elements
from reshard.torch_layout import shard_runs


def read_back(layout: Layout, tensors: dict[str, torch.Tensor], rank: int = 0) -> dict[str, torch.Tensor]:
    """Rebuild every tensor from its holdings' addresses alone."""
    found = {name: torch.full((spec.numel,), -1.0) for name, spec in layout.specs.items()}
    for holding in layout.holdings(rank):
        tensor = tensors[holding.address.storage]
        flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        at = torch.from_numpy(byte_offsets(holding.region, holding.address)) // tensor.element_size()
        name = holding.region.name
        found[name][elements(holding.region, layout.specs[name].shape)] = flat[at].float()
    return {name: flat.reshape(layout.specs[name].shape) for name, flat in found.items()}


def test_plain_tensors_views_and_scalars_are_found_by_their_addresses():
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {"view": base[1:, 2:], "transposed": base.t(), "scalar": torch.tensor(7.0), "buffer": torch.arange(5)}
    layout = Layout.from_tensors(tensors, rank=3)
    assert layout.ranks == (3,)
    assert {name: spec.dtype for name, spec in layout.specs.items()}["buffer"] is DType.INT64
    for name, found in read_back(layout, tensors, rank=3).items():
        assert torch.equal(found, tensors[name].float()), name


def test_tied_tensors_are_one_tensor_with_several_names():
    weight = torch.nn.Parameter(torch.zeros(4, 2))
    layout = Layout.from_tensors({"embed": weight, "head": weight, "other": torch.zeros(4, 2)}, rank=0)
    assert list(layout.specs) == ["embed", "other"]
    assert dict(layout.ties) == {"head": "embed"}
    assert layout.holders("head") == layout.holders("embed")
    assert layout.resolve("nobody") is None


def test_declared_ties_make_replicas_of_separate_storages():
    layout = Layout.from_tensors({"embed": torch.zeros(2), "head": torch.zeros(2)}, rank=0, ties={"head": "embed"})
    assert [holding.address.storage for holding in layout.holders("embed")] == ["embed", "head"]


def test_ties_on_meta_are_seen():
    with torch.device("meta"):
        weight, other = torch.empty(4), torch.empty(4)
    layout = Layout.from_tensors({"a": weight, "b": weight, "c": other}, rank=0)
    assert dict(layout.ties) == {"b": "a"}


@pytest.mark.parametrize(
    ("tensors", "ties", "message"),
    [
        ({"w": torch.zeros(0)}, None, "tensors without elements: w; a placeholder"),
        ({"a": torch.zeros(2), "b": torch.zeros(3)}, {"b": "a"}, "'b' is tied to 'a' but is"),
        ({"a": torch.zeros(2)}, {"b": "a"}, r"not passed: \['b'\]"),
        ({"a": torch.zeros(2), "b": torch.zeros(2)}, {"a": "b", "b": "a"}, "don't end at one tensor"),
    ],
)
def test_bad_tensors_are_named(tensors, ties, message):
    with pytest.raises(LayoutError, match=message):
        Layout.from_tensors(tensors, rank=0, ties=ties)


def test_strided_shard_uneven_runs_match_the_documented_example():
    """torch's own worked example for _StridedShard: nine rows, split factor 2, four ranks."""
    from torch.distributed.tensor.placement_types import _StridedShard

    held = []
    for index in range(4):
        place = [_StridedShard(0, split_factor=2)]
        (runs,) = shard_runs((9,), place, mesh_shape=(4,), coordinate=(index,), name="w")
        held.append([row for start, stop in runs for row in range(start, stop)])
    assert held == [[0, 1, 5], [2, 3, 6], [4, 7], [8]]


def test_partial_sums_are_refused():
    from torch.distributed.tensor import Partial

    with pytest.raises(LayoutError, match="'w' is a partial sum"):
        shard_runs((4,), [Partial()], mesh_shape=(2,), coordinate=(0,), name="w")


def test_merge_lists_disagreements_and_duplicate_ranks():
    part = [Layout.from_tensors({"w": torch.zeros(size)}, rank=rank) for rank, size in ((0, 6), (1, 4))]
    message = r"w: float32\[6\] on ranks \[0\]; float32\[4\] on ranks \[1\]; a DTensor made with from_local"
    with pytest.raises(LayoutError, match=message):
        Layout.merge(part)
    with pytest.raises(LayoutError, match=r"ranks \[0\] are described by two parts"):
        Layout.merge([part[0], part[0]])


def test_pipeline_stages_with_local_layer_numbers_are_seen_as_replicas_not_merged_silently():
    """Stages that both call their layer 0: the plan has a source per name, and a destination of two layers lacks
    one.
    """
    stages = [Layout.from_tensors({"layers.0.w": torch.zeros(4)}, rank=rank) for rank in range(2)]
    engine = Layout.from_tensors({f"layers.{layer}.w": torch.zeros(4) for layer in range(2)}, rank=2)
    with pytest.raises(ValueError, match=r"none of these tensors that the destination needs: layers\.1\.w"):
        make_plan(Layout.merge(stages), engine)


def test_layout_bytes_round_trip_and_detect_damage():
    layout = Layout.merge(
        [
            Layout.from_tensors({"w": torch.zeros(3, 4)[:, rank : rank + 2], "s": torch.tensor(1)}, rank=rank)
            for rank in range(2)
        ]
    )
    data = layout_to_bytes(layout)
    again = layout_from_bytes(data)
    assert again == layout
    assert [h for rank in range(2) for h in again.holdings(rank)] == [h for r in range(2) for h in layout.holdings(r)]
    with pytest.raises(LayoutError, match="stored layout is damaged"):
        layout_from_bytes(data[:20] + b"\0" + data[21:])
    with pytest.raises(LayoutError, match="not a stored layout"):
        layout_from_bytes(b"junk")


def test_fp32_trainer_to_bf16_engine_with_tied_embedding():
    weight = torch.zeros(6, 4)
    source = Layout.from_tensors({"embed": weight, "norm": torch.zeros(4)}, rank=0)
    live = torch.zeros(6, 4, dtype=torch.bfloat16)
    engine = {"embed": live, "head": live, "norm": torch.zeros(4, dtype=torch.bfloat16)}
    plan = make_plan(source, Layout.from_tensors(engine, rank=0))
    check_plan(plan)
    assert [copy.region.name for copy in plan.copies] == ["embed", "norm"]
    assert all(copy.is_local and copy.is_cast and not copy.is_alias for copy in plan.copies)
    assert plan.received_bytes(0) == 0
    assert plan.copies[0].dst == Address("embed", 0, (4, 1), DType.BFLOAT16)
    assert plan.copies[0].region == Region.whole("embed", (6, 4))


def test_importing_reshard_and_the_pure_modules_loads_no_torch():
    modules = (
        "dtype region mesh topology pattern layout layout_merge boxes copy_table certificate plan plan_names "
        "plan_digest plan_text plan_io plan_oracle plan_oracle_boxes plan_gather planner planner_class planner_floor "
        "planner_sides planner_table planner_hazards planner_overlaps groups spec spec_families parallel_cuts "
        "parallel_layout strided_view simulator scenario report cli"
    )
    imports = "; ".join(f"import reshard.{module}" for module in modules.split())
    code = f"import sys, reshard; {imports}; reshard.make_plan; assert 'torch' not in sys.modules, 'torch was loaded'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
