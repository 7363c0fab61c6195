"""The `vllm` rollout engine: samples with vLLM, whose live weights a transition writes in place.

Colocated, the engine's worker lives in the trainer's process (one engine rank a trainer rank; tensor parallel over
ranks by vLLM's `external_launcher`), and on a GPU its memory comes from an arena, so that between rollouts the trainer
computes in what the KV cache leaves (`training_memory`). Separate, it has processes of its own on this host, which this
process starts. With `ray`, a Ray actor on this host drives it (`hybrid.engines.vllm_ray`), and this process needs no
vLLM.

Random numbers: sample i of a call with seed s has a seed of its own made from (s, i), so no two samples share a stream
and a call repeats; vLLM draws them, so the texts differ from the `torch` engine's.

Log-probabilities are of the distribution that was drawn from: softmax(logits / temperature), cut by top-k and top-p
where these are set, as vLLM computed it.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from tensordict import TensorDict

from hybrid.backends import require
from hybrid.batch import make_batch
from hybrid.engines.sampling import SamplingParams, check_prompts
from hybrid.engines.vllm_host import Host, VllmHost
from reshard.errors import StateError

if TYPE_CHECKING:
    from reshard.vllm import WeightSync

Placement = Literal["colocated", "separate", "ray"]
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
        actor: with placement `ray`, further options of the actor, as Ray takes them (`num_gpus`, `name`, ...).
    """

    placement: Placement = "colocated"
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.5
    max_model_len: int | None = None
    enforce_eager: bool = False
    seeded: bool = True
    extra: Mapping[str, Any] | None = None
    actor: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Refuse options that say two things."""
        if self.placement not in get_args(Placement):
            raise ValueError(f"placement: expected one of {list(get_args(Placement))}, got {self.placement!r}")
        if self.actor is not None and self.placement != "ray":
            raise ValueError(
                f"actor options need placement 'ray', got {self.placement!r}: leave them out, or choose it"
            )


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
            BackendUnavailable: with placement `ray`, Ray is not installed, or vLLM does not start there.
            ResourceError, WorkerTimeout: with placement `ray`, the cluster lacks what the actor takes, or is slow.
        """
        self.options = options or VllmOptions()
        self.device = torch.device(device)
        self.version = 0
        self._pad_token_id = pad_token_id
        self._warned_about_support = False
        self._sync: WeightSync | None = None
        self._colocated = self.options.placement == "colocated"
        self._sleeps = self._colocated and self.device.type == "cuda"
        self._host = self._start(self._arguments(Path(model), dtype))
        self._sizes = self._host.sizes()

    def connect(self, weights: torch.nn.Module | Mapping[str, torch.Tensor]) -> "WeightSync":
        """Agree with the trainer's live `weights` (by checkpoint names) on what moves; returns what pushes them.

        Raises:
            LayoutError, PlanError: the two sides do not hold the same model.
        """
        from reshard.vllm import WeightSync

        num_ranks = None if self._colocated else self.options.tensor_parallel_size
        self._sync = WeightSync.connect(self._host.client, weights, num_engine_ranks=num_ranks)
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
            TransportError: the Ray actor that drives it is gone.
            ValueError: a prompt is empty, too long for the engine, or has an id outside the vocabulary.
            FloatingPointError: log-probs are not finite.
        """
        self._check(prompts, params, first_row)
        rows = [list(prompt) for prompt in prompts for _ in range(params.n)]
        wanted = [self._request(row, params, first_row + i) for i, row in enumerate(rows)]
        answers = self._host.generate(rows, wanted)
        log_probs = [answer.log_probs for answer in answers]
        if not all(np.isfinite(row).all() for row in log_probs):
            raise FloatingPointError(
                f"The model's log-probs are not finite with weights version {self.version}; "
                "check the last update's gradient norm and that every tensor was written."
            )
        return make_batch(
            prompts=rows,
            responses=[answer.token_ids for answer in answers],
            log_probs=log_probs,
            group_ids=[(first_row + i) // params.n for i in range(len(rows))],
            truncated=[answer.is_cut for answer in answers],
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
        self._host.sleep(1)
        try:
            with pool.use():
                yield
        finally:
            self._host.wake_up()

    def close(self) -> None:
        """Let the engine go: its connection, its processes, its memory."""
        if self._sync is not None:
            self._sync.close()
            self._sync = None
        self._host.shutdown()

    def _start(self, arguments: dict[str, Any]) -> Host:
        if self.options.placement != "ray":
            return VllmHost(arguments, in_this_process=self._colocated)
        require("ray")
        from hybrid.engines.vllm_ray import RayVllmHost

        num_ranks = self.options.tensor_parallel_size
        if num_ranks > 1:
            arguments = {"distributed_executor_backend": "mp"} | arguments
        actor = dict(self.options.actor or {})
        return RayVllmHost(
            arguments,
            name=str(actor.get("name", "vllm-rollout")),
            num_cpus=1.0,
            num_gpus=float(num_ranks) if self.device.type == "cuda" else 0.0,
            options=actor,
        )

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
        check_prompts(prompts, vocab_size=self._sizes.vocabulary, max_positions=self._sizes.max_len)
        if params.cuts_support and not self._warned_about_support:
            self._warned_about_support = True
            _logger.warning(
                "top_p < 1 or top_k > 0: vLLM's log-probs are of the distribution that was cut, a trainer's of the "
                "whole one, so they differ by the mass left out (docs/batch.md)."
            )

    def _request(self, prompt: Sequence[int], params: SamplingParams, row: int) -> dict[str, Any]:
        """Arguments of vLLM's `SamplingParams`."""
        return {
            "temperature": 0.0 if params.greedy else params.temperature,
            "top_p": 1.0 if params.greedy else params.top_p,
            "top_k": 0 if params.greedy else params.top_k,
            "max_tokens": min(params.max_new_tokens, self._sizes.max_len - len(prompt)),
            "stop_token_ids": list(params.stop_token_ids),
            "ignore_eos": True,
            "logprobs": 0,
            "detokenize": False,
            "seed": _sample_seed(params.seed, row) if self.options.seeded and not params.greedy else None,
        }


def _sample_seed(seed: int, row: int) -> int:
    """A seed of 63 bits from a call's seed and a sample's number."""
    return int(np.random.SeedSequence([seed, row]).generate_state(1, np.uint64)[0] >> np.uint64(1))
