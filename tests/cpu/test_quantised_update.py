"""Float8 parameters from full precision: from the trainer's own tensors where they are whole groups, else staged."""

import pytest
import torch

from reshard import Address, Holding, Layout, Region, Resharder, TensorSpec, make_plan
from reshard.dtype import DType
from reshard.oracle import quantize_reference
from reshard.strided_view import dense_strides
from reshard.torch_layout import torch_dtype
from reshard.vllm.quantised import STAGED, QuantRule, View
from reshard.vllm.quantised_update import Lender, QuantisedUpdate

COLUMNS = 384


def rule_of(name: str, shape: tuple[int, ...], mode: str, dtype: DType = DType.BFLOAT16) -> QuantRule:
    grid = (*shape[:-1], 1) if mode == "rows" else (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    return QuantRule(
        staged=STAGED + name,
        shape=shape,
        dtype=dtype,
        weight=View(storage=name, offset=0, strides=dense_strides(shape)),
        scale=View(storage=f"{name}_scale", offset=0, strides=dense_strides(grid)),
        mode=mode,
    )


def live_of(rule: QuantRule) -> dict[str, torch.Tensor]:
    return {
        rule.weight.storage: torch.zeros(rule.shape, dtype=torch.float8_e4m3fn),
        rule.scale.storage: torch.zeros(rule.scale_shape),
    }


def fused(rule: QuantRule, parts: dict[str, int]) -> Layout:
    """A rank whose fused parameter consists of ``parts``, rows by name, in full precision where the rule says."""
    holdings, row = [], 0
    for name, rows in parts.items():
        address = Address(rule.staged, row * COLUMNS * rule.dtype.itemsize, (COLUMNS, 1), rule.dtype)
        holdings.append(Holding(0, Region(name, (0, 0), (rows, COLUMNS)), address))
        row += rows
    specs = [TensorSpec(name, (rows, COLUMNS), rule.dtype) for name, rows in parts.items()]
    return Layout.from_holdings(specs, holdings, ranks=[0])


def values(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * torch.rand((*shape[:-1], 1), generator=generator)).to(dtype)


def check_two_updates(
    rule: QuantRule, destination: Layout, source: Layout, tensors: dict[str, torch.Tensor], whole, *, lent: bool
) -> QuantisedUpdate:
    """Two versions of the weights; ``whole()`` is the parameter in full precision as the trainer has it now."""
    live = live_of(rule)
    update = QuantisedUpdate(
        [rule],
        destination,
        rank=0,
        live=live,
        allocate=lambda name, shape, dtype: torch.full(shape, 7, dtype=dtype),
        lender=Lender(layout=source, rank=0, tensors=tensors) if lent else None,
    )
    resharder = Resharder(make_plan(source, update.layout), tensors, {**live, **update.tensors}, rank=0)
    for seed in (1, 2):
        for k, tensor in enumerate(tensors.values()):
            tensor.copy_(values(tuple(tensor.shape), 10 * seed + k, tensor.dtype))
        resharder.run()
        update.run()
        matrices = whole() if len(rule.shape) == 3 else [whole()]
        weights, scales = (live[v.storage].view(-1, *live[v.storage].shape[-2:]) for v in (rule.weight, rule.scale))
        for matrix, weight, scale in zip(matrices, weights, scales, strict=True):
            wanted = quantize_reference(matrix, mode=rule.mode, through_bf16=rule.dtype is DType.BFLOAT16)
            assert torch.equal(weight.view(torch.uint8), wanted[0].view(torch.uint8))
            assert torch.equal(scale, wanted[1])
        resharder.train()
    assert resharder.stats.local_bytes == update.staging_bytes, "what is lent does not move"
    return update


PARTS = {
    "whole groups": {"q": 512, "k": 128, "v": 128},
    "the last group ends early": {"q": 512, "k": 128, "v": 40},
    "groups hold two parts": {"q": 512, "k": 64, "v": 128},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lent", [True, False])
@pytest.mark.parametrize("mode", ["blocks", "rows", "blocks_ue8m0"])
@pytest.mark.parametrize("parts", PARTS)
def test_fused_rows(parts, mode, lent, dtype):
    rows = PARTS[parts]
    rule = rule_of("layer.qkv", (sum(rows.values()), COLUMNS), mode)
    tensors = {name: torch.zeros(size, COLUMNS, dtype=dtype) for name, size in rows.items()}
    source = Layout.from_tensors(tensors, rank=0)
    whole = lambda: torch.cat(list(tensors.values()))  # noqa: E731
    update = check_two_updates(rule, fused(rule, rows), source, tensors, whole, lent=lent)
    can_borrow = lent and (mode == "rows" or parts != "groups hold two parts")
    assert (update.staging_bytes == 0) is can_borrow
    assert update.num_launches == 1 and update.modes == {mode}


def test_a_trainer_that_shards_what_the_engine_has_whole_lends_nothing():
    rows = PARTS["whole groups"]
    rule = rule_of("layer.qkv", (sum(rows.values()), COLUMNS), "blocks")
    tensors = {f"{name}{half}": torch.zeros(size // 2, COLUMNS) for name, size in rows.items() for half in (0, 1)}
    holdings = [
        Holding(
            0,
            Region(name, (half * size // 2, 0), ((half + 1) * size // 2, COLUMNS)),
            Address(f"{name}{half}", 0, (COLUMNS, 1), DType.FLOAT32),
        )
        for name, size in rows.items()
        for half in (0, 1)
    ]
    specs = [TensorSpec(name, (size, COLUMNS), DType.FLOAT32) for name, size in rows.items()]
    source = Layout.from_holdings(specs, holdings, ranks=[0])
    whole = lambda: torch.cat(list(tensors.values()))  # noqa: E731
    update = check_two_updates(rule, fused(rule, rows), source, tensors, whole, lent=True)
    assert update.staging_bytes == 2 * sum(rows.values()) * COLUMNS


def test_a_dtype_that_would_be_rounded_otherwise_is_staged():
    """An engine in float16 rounds fp32 weights to float16 before it quantises; a quantising copy would not."""
    rows = PARTS["whole groups"]
    rule = rule_of("layer.qkv", (sum(rows.values()), COLUMNS), "blocks", DType.FLOAT16)
    tensors = {name: torch.zeros(size, COLUMNS) for name, size in rows.items()}
    whole = lambda: torch.cat(list(tensors.values())).to(torch_dtype(DType.FLOAT16))  # noqa: E731
    source = Layout.from_tensors(tensors, rank=0)
    update = check_two_updates(rule, fused(rule, rows), source, tensors, whole, lent=True)
    assert update.staging_bytes > 0


@pytest.mark.parametrize("is_stacked", [True, False])
@pytest.mark.parametrize("mode", ["blocks", "rows"])
def test_experts_of_a_trainer_that_stacks_them_and_of_one_that_does_not(mode, is_stacked):
    experts, rows, columns = 3, 256, 128
    rule = rule_of("mlp.w13", (experts, 2 * rows, columns), mode)
    names = [f"{kind}{e}" for e in range(experts) for kind in ("gate", "up")]
    specs = [TensorSpec(name, (rows, columns), DType.BFLOAT16) for name in names]
    step = rows * columns
    destination = Layout.from_holdings(
        specs,
        [
            Holding(
                0, Region.whole(name, (rows, columns)), Address(rule.staged, k * step * 2, (columns, 1), DType.BFLOAT16)
            )
            for k, name in enumerate(names)
        ],
        ranks=[0],
    )
    stack = torch.zeros(experts, 2 * rows, columns)
    tensors = {"stack": stack} if is_stacked else {name: torch.zeros(rows, columns) for name in names}
    source = Layout.from_holdings(
        [TensorSpec(name, (rows, columns), DType.FLOAT32) for name in names],
        [
            Holding(
                0,
                Region.whole(name, (rows, columns)),
                Address("stack", k * step * 4, (columns, 1), DType.FLOAT32)
                if is_stacked
                else Address(name, 0, (columns, 1), DType.FLOAT32),
            )
            for k, name in enumerate(names)
        ],
        ranks=[0],
    )
    whole = lambda: stack if is_stacked else torch.cat(list(tensors.values())).view(stack.shape)  # noqa: E731
    update = check_two_updates(rule, destination, source, tensors, whole, lent=True)
    assert update.staging_bytes == 0
