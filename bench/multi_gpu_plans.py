"""The transitions that the benchmark on several GPUs runs, for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from reshard import DType, Layout, Mesh, ModelSpec, Plan, Rules, make_groups, make_plan
from reshard.groups import Kind

TINY = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 512,
    "tie_word_embeddings": True,
}


def scenarios(model: str, num_ranks: int, dtypes: Sequence[DType]) -> Iterator[tuple[str, Plan]]:
    """Named Plans, several of which may be equal: by training's dtype and shards, generation's shards, and grouping."""
    for dtype in dtypes:
        for train, gen_tp in shards(num_ranks):
            for kind in ("zero_redundancy", "vanilla", "full_gather"):
                tp = "whole" if kind == "full_gather" else f"tp={gen_tp}"
                name = f"{model}, {dtype.value} {train} -> bfloat16 {num_ranks // gen_tp} x {tp}, {kind}"
                yield name, make(model, train, gen_tp, dtype=dtype, kind=kind)


def shards(num_ranks: int) -> list[tuple[str, int]]:
    """Training meshes and tensor parallel sizes of generation."""
    found = [(f"tp={num_ranks}", 1), (f"fsdp={num_ranks}", 1), (f"fsdp={num_ranks}", num_ranks)]
    if num_ranks >= 4:
        half = num_ranks // 2
        found += [(f"tp={num_ranks}", half), (f"fsdp={num_ranks}", half), (f"fsdp=2,tp={half}", half)]
    return found


def make(model: str, train: str, gen_tp: int, *, dtype: DType, kind: Kind) -> Plan:
    """From training shards to vLLM's layout in bf16. A full gather makes every rank's weights whole."""
    mesh = Mesh.parse(train)
    rules = Rules(fsdp="fsdp") if "fsdp" in mesh.axes else None
    source = Layout.from_parallel(spec(model, dtype), mesh, rules=rules)
    engine = spec(model, DType.BFLOAT16)
    if kind == "full_gather":
        return make_plan(source, Layout.from_parallel(engine, Mesh({"dp": mesh.size}), rules=Rules(style="vllm")))
    fsdp, tp = mesh.axis_size("fsdp"), mesh.axis_size("tp")
    in_shard_order = [_rank(mesh, f, t) for t in range(tp) for f in range(fsdp)]
    flat = Mesh({"pp": 1, "dp": 1, "tp": mesh.size}, ranks=in_shard_order)
    groups = make_groups(flat, tp=gen_tp, kind=kind)
    return make_plan(source, Layout.from_parallel(engine, groups.generate, rules=Rules(style="vllm")))


def spec(model: str, dtype: DType) -> ModelSpec:
    """A bundled model, a path, or `tiny`."""
    return (
        ModelSpec.from_config(TINY, name="tiny", dtype=dtype) if model == "tiny" else ModelSpec.load(model, dtype=dtype)
    )


def _rank(mesh: Mesh, fsdp: int, tp: int) -> int:
    return mesh.rank(**{axis: index for axis, index in (("fsdp", fsdp), ("tp", tp)) if axis in mesh.axes})
