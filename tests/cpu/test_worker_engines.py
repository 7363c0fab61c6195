"""The torch engines in worker groups, cut over micro-data-parallel and data-parallel ranks, give what one gives."""

from collections.abc import Mapping, Sequence

import torch
from engine_cases import PROMPTS, STOPS, copy_weights, responses_of, tiny_config
from tensordict import TensorDict

from hybrid.controller import Dispatch, ResourceSpec, Worker, WorkerContext, WorkerGroup, open_pool, register
from hybrid.engines.rollout_torch import SamplingParams, TorchRolloutEngine
from hybrid.engines.train_torch import TorchTrainEngine
from reshard.mesh import Mesh

PARAMS = SamplingParams(n=2, max_new_tokens=6, stop_token_ids=STOPS, seed=3)
MANY_PROMPTS = [*PROMPTS, [40, 41], [50, 51, 52]]


class Generator(Worker):
    def __init__(self, context: WorkerContext, *, weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__(context)
        self.rollout = TorchRolloutEngine(tiny_config("llama"), dtype=torch.float32)
        self.train = TorchTrainEngine(tiny_config("llama"), optim=None)
        for engine in (self.rollout, self.train):
            copy_weights(engine.tensors(), dict(weights))

    @register(dispatch=Dispatch.MICRO_DP, split=("prompts",), uneven="pad")
    def generate(self, prompts: Sequence[Sequence[int]]) -> TensorDict:
        first_prompt = self.context.part(Dispatch.MICRO_DP) * len(prompts)
        return self.rollout.generate(prompts, PARAMS, first_row=first_prompt * PARAMS.n)

    @register(dispatch=Dispatch.THREE_D, uneven="pad")
    def log_probs(self, batch: TensorDict) -> TensorDict:
        return self.train.log_probs(batch, temperature=1.0)


def test_cut_generation_and_scoring_equal_one_engine() -> None:
    single = TorchRolloutEngine(tiny_config("llama"), dtype=torch.float32)
    expected = single.generate(MANY_PROMPTS, PARAMS)
    scorer = TorchTrainEngine(tiny_config("llama"), optim=None)
    copy_weights(scorer.tensors(), single.tensors())
    meshes = {
        "mesh": Mesh({"pp": 1, "dp": 2, "tp": 2}),
        "generation_mesh": Mesh({"pp": 1, "dp": 2, "micro_dp": 2, "tp": 1}),
    }
    with (
        open_pool(ResourceSpec(num_workers=4)) as pool,
        WorkerGroup(pool, Generator, {"weights": single.tensors()}, **meshes) as group,
    ):
        batch = group.call(Generator.generate, MANY_PROMPTS)
        scored = group.call(Generator.log_probs, batch)
    assert batch["group_id"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert responses_of(batch) == responses_of(expected)
    width = expected["response_ids"].shape[1]
    torch.testing.assert_close(batch["rollout_log_probs"][:, :width], expected["rollout_log_probs"], atol=1e-4, rtol=0)
    one = scorer.log_probs(expected, temperature=1.0)
    torch.testing.assert_close(scored["log_probs"][:, :width], one["log_probs"], atol=1e-4, rtol=0)
    torch.testing.assert_close(scored["log_probs"], batch["rollout_log_probs"], atol=1e-3, rtol=0)
