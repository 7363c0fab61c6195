"""One rank of engines for models of full size, learnt on the meta device; arithmetic must agree with each.

How long it took is printed (``pytest -rP``) and recorded as a property of the test, not asserted.
"""

import time

import pytest
from vllm_cases import full_config

from reshard import DType, Layout, Mesh, ModelSpec, Rules
from reshard.vllm.checkpoint import checkpoint_specs
from reshard.vllm.planning import learn_ranks


@pytest.mark.parametrize(
    ("name", "rank", "sizes", "num_unread"),
    [
        ("llama3-70b", 5, {"tp": 8}, 0),
        ("qwen3-235b-a22b", 6, {"tp": 8, "ep": True}, 94 * 112 * 3),
        ("deepseek-v3", 9, {"tp": 8, "dp": 4, "ep": True}, 58 * 248 * 3),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_models_of_full_size_are_learnt_as_arithmetic_says(name, rank, sizes, num_unread, record_property):
    config = full_config(name)
    checkpoint = checkpoint_specs(config)
    begin = time.perf_counter()
    learnt = learn_ranks(config, ranks=[rank], checkpoint=checkpoint, **sizes)[rank]
    seconds = round(time.perf_counter() - begin, 1)
    record_property("seconds", seconds)
    print(f"{name}: {len(checkpoint)} tensors, rank {rank} of {sizes} learnt in {seconds} s")
    assert (len(learnt.unread), learnt.unwritten, dict(learnt.opaque)) == (num_unread, (), {})
    ep = sizes.get("ep", False)
    dp = sizes.get("dp", 1)
    analytic = Layout.from_parallel(
        ModelSpec.from_config(config, dtype=DType.BFLOAT16),
        Mesh({"dp": dp, "tp": sizes["tp"]}),
        rules=Rules(style="vllm", whole_shared_experts=dp > 1),
        expert_mesh=Mesh({"ep": dp * sizes["tp"]}) if ep else None,
    )
    assert set(learnt.layout.holdings(rank)) == set(analytic.holdings(rank))
