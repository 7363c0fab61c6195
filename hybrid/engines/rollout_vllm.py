"""The `vllm` rollout engine: samples with vLLM, whose live weights a transition writes in place.

Colocated, the engine's worker lives in the trainer's process (one engine rank a trainer rank; tensor parallel over
ranks by vLLM's `external_launcher`), and on a GPU its memory comes from an arena, so that between rollouts the trainer
computes in what the KV cache leaves (`training_memory`). Separate, it has processes of its own on this host.

Random numbers: sample i of a call with seed s has a seed of its own made from (s, i), so no two samples share a stream
and a call repeats; vLLM draws them, so the texts differ from the `torch` engine's.

Log-probabilities are of the distribution that was drawn from: softmax(logits / temperature), cut by top-k and top-p
where these are set, as vLLM computed it.
"""

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from tensordict import TensorDict

from hybrid.batch import make_batch
from hybrid.engines.sampling import SamplingParams, check_prompts
from reshard.errors import StateError

if TYPE_CHECKING:
    from reshard.vllm import WeightSync

Placement = Literal["colocated", "separate"]
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """How the engine is started.

    Attributes:
        placement: see the module's note.
        tensor_parallel_size: ranks of one engine.
        gpu_memory_utilization: share of the GPU's memory that vLLM plans with.
        max_model_len: longest sequence, prompt and response; the model's own limit where None.
        enforce_eager: no CUDA graphs.
        seeded: give each sample a seed of its own; without, vLLM's engine-wide stream draws all, a little faster.
        extra: further arguments of `vllm.LLM`, as they are.
    """

    placement: Placement = "colocated"
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.5
    max_model_len: int | None = None
    enforce_eager: bool = False
    seeded: bool = True
    extra: Mapping[str, Any] | None = None


class VllmRolloutEngine:
    """Generates responses with vLLM.

    Attributes:
        version: number of the weights that the engine has, 0 before the first push; each batch records it.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: str | torch.device = "cuda",
        pad_token_id: int = 0,
        options: VllmOptions | None = None,
    ) -> None:
        """Start vLLM on the folder `model`; its weights are random until the first push.

        Raises:
            ModuleNotFoundError: vLLM is not installed.
            StateError: vLLM was imported in this process with its engine in a process of its own, and `options` ask
                for a colocated one.
        """
        self.options = options or VllmOptions()
        self.device = torch.device(device)
        self.version = 0
        self._pad_token_id = pad_token_id
        self._warned_about_support = False
        self._sync: WeightSync | None = None
        self._colocated = self.options.placement == "colocated"
        self._sleeps = self._colocated and self.device.type == "cuda"
        _choose_placement(self._colocated)
        from vllm import LLM

        self._llm = LLM(**self._arguments(Path(model), dtype))
        self._vocab_size = int(self._llm.llm_engine.model_config.get_vocab_size())
        self._max_len = int(self._llm.llm_engine.model_config.max_model_len)

    def connect(self, weights: torch.nn.Module | Mapping[str, torch.Tensor]) -> "WeightSync":
        """Agree with the trainer's live `weights` (by checkpoint names) on what moves; returns what pushes them.

        Raises:
            LayoutError, PlanError: the two sides do not hold the same model.
        """
        from reshard.vllm import LLMClient, WeightSync

        num_ranks = None if self._colocated else self.options.tensor_parallel_size
        self._sync = WeightSync.connect(LLMClient(self._llm), weights, num_engine_ranks=num_ranks)
        return self._sync

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, first_row: int = 0) -> TensorDict:
        """Sample `params.n` responses to each prompt; blocks until all are there.

        Args:
            prompts: token ids, none empty.
            params: how to sample.
            first_row: number of this call's first sample within the whole step, where several engines share one step; a
                multiple of `params.n`.

        Returns:
            A batch (docs/batch.md) of len(prompts) * n rows on the host, the samples of a prompt adjacent.

        Raises:
            StateError: the engine never got weights, or its last update failed.
            ValueError: a prompt is empty, too long for the engine, or has an id outside the vocabulary.
            FloatingPointError: log-probs are not finite.
        """
        self._check(prompts, params, first_row)
        rows = [list(prompt) for prompt in prompts for _ in range(params.n)]
        wanted = [self._request(row, params, first_row + i) for i, row in enumerate(rows)]
        outputs = self._llm.generate([{"prompt_token_ids": row} for row in rows], wanted, use_tqdm=False)
        answers = [output.outputs[0] for output in outputs]
        log_probs = [
            [step[token].logprob for token, step in zip(a.token_ids, a.logprobs or [], strict=True)] for a in answers
        ]
        if not all(np.isfinite(row).all() for row in log_probs):
            raise FloatingPointError(
                f"The model's log-probs are not finite with weights version {self.version}; "
                "check the last update's gradient norm and that every tensor was written."
            )
        return make_batch(
            prompts=rows,
            responses=[list(a.token_ids) for a in answers],
            log_probs=log_probs,
            group_ids=[(first_row + i) // params.n for i in range(len(rows))],
            truncated=[a.finish_reason == "length" for a in answers],
            version=self.version,
            pad_token_id=self._pad_token_id,
        )

    @contextlib.contextmanager
    def training_memory(self) -> Iterator[None]:
        """Inside, the trainer allocates from what the KV cache leaves, and the engine sleeps; after, it is awake again.

        Does nothing where the engine has processes of its own or runs on a CPU.
        """
        if not self._sleeps:
            yield
            return
        from reshard.vllm.memory import engine_memory

        memory = engine_memory()
        assert memory is not None
        pool = memory.trainer_pool()
        self._llm.sleep(level=1)
        try:
            with pool.use():
                yield
        finally:
            self._llm.wake_up()

    def close(self) -> None:
        """Let the engine go: its connection, its processes, its memory."""
        if self._sync is not None:
            self._sync.close()
            self._sync = None
        self._llm.llm_engine.engine_core.shutdown()

    def _arguments(self, model: Path, dtype: torch.dtype) -> dict[str, Any]:
        options = self.options
        arguments: dict[str, Any] = {
            "model": str(model),
            "dtype": str(dtype).removeprefix("torch."),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "weight_transfer_config": {"backend": "reshard"},
            "logprobs_mode": "processed_logprobs",
            "tensor_parallel_size": options.tensor_parallel_size,
            "gpu_memory_utilization": options.gpu_memory_utilization,
            "enforce_eager": options.enforce_eager or self.device.type == "cpu",
            "enable_prefix_caching": True,
            "seed": 0,
        }
        if options.max_model_len is not None:
            arguments["max_model_len"] = options.max_model_len
        if self._colocated and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            arguments["distributed_executor_backend"] = "external_launcher"
        if self._sleeps:
            arguments["enable_sleep_mode"] = True
            arguments["additional_config"] = {"sleep_mode_backend": "reshard"}
        return arguments | dict(options.extra or {})

    def _check(self, prompts: Sequence[Sequence[int]], params: SamplingParams, first_row: int) -> None:
        if self._sync is None or self.version == 0:
            raise StateError("the vLLM engine has no weights yet: connect() it to a trainer and push before generating")
        if first_row % params.n:
            raise ValueError(f"Expected first_row to be a multiple of n = {params.n}, but got {first_row}.")
        check_prompts(prompts, vocab_size=self._vocab_size, max_positions=self._max_len)
        if params.cuts_support and not self._warned_about_support:
            self._warned_about_support = True
            _logger.warning(
                "top_p < 1 or top_k > 0: vLLM's log-probs are of the distribution that was cut, a trainer's of the "
                "whole one, so they differ by the mass left out (docs/batch.md)."
            )

    def _request(self, prompt: Sequence[int], params: SamplingParams, row: int) -> Any:
        from vllm import SamplingParams as VllmSamplingParams

        return VllmSamplingParams(
            temperature=0.0 if params.greedy else params.temperature,
            top_p=1.0 if params.greedy else params.top_p,
            top_k=0 if params.greedy else params.top_k,
            max_tokens=min(params.max_new_tokens, self._max_len - len(prompt)),
            stop_token_ids=list(params.stop_token_ids),
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            seed=_sample_seed(params.seed, row) if self.options.seeded and not params.greedy else None,
        )


def _sample_seed(seed: int, row: int) -> int:
    """A seed of 63 bits from a call's seed and a sample's number."""
    return int(np.random.SeedSequence([seed, row]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _choose_placement(colocated: bool) -> None:
    """vLLM reads where its engine core runs from the environment, when an engine is made."""
    wanted = "0" if colocated else "1"
    found = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING")
    if found is not None and found != wanted:
        where = "in this process" if colocated else "in a process of its own"
        raise StateError(
            f"VLLM_ENABLE_V1_MULTIPROCESSING={found} is set, but this engine is to run {where}: unset it or set it to "
            f"{wanted}"
        )
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = wanted
