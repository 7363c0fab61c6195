"""The process that drives a vLLM engine: the trainer's own, or a Ray actor."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from reshard.errors import StateError
from reshard.vllm.clients import EngineClient, LLMClient


@dataclass(frozen=True, slots=True)
class Answer:
    """One sample: its tokens, the log-prob of each, and whether a limit cut it off."""

    token_ids: list[int]
    log_probs: list[float]
    is_cut: bool


@dataclass(frozen=True, slots=True)
class Sizes:
    """Token ids that the model has, and its longest sequence, prompt and response."""

    vocabulary: int
    max_len: int


class Host(Protocol):
    """What the rollout engine asks of the process that drives vLLM."""

    @property
    def client(self) -> EngineClient:
        """The engine's control plane for weights."""

    def sizes(self) -> Sizes:
        """Of the engine's model."""

    def generate(self, prompts: Sequence[Sequence[int]], settings: Sequence[Mapping[str, Any]]) -> list[Answer]:
        """One sample for each prompt, by arguments of ``vllm.SamplingParams``; StateError if weights are not whole."""

    def sleep(self, level: int) -> None:
        """See ``vllm.LLM``."""

    def wake_up(self) -> None:
        """See ``vllm.LLM``."""

    def shutdown(self) -> None:
        """End the engine and its processes."""


class VllmHost(LLMClient):
    """vLLM driven by this process; also the class of the Ray actor, hence its control plane's methods."""

    def __init__(self, arguments: Mapping[str, Any], *, in_this_process: bool) -> None:
        """Start ``vllm.LLM(**arguments)`` with its engine's core in this process, or in one of its own.

        Raises:
            ModuleNotFoundError: vLLM is not installed.
            StateError: the environment says otherwise about where the core runs.
        """
        choose_process(in_this_process)
        from vllm import LLM

        self._llm = LLM(**arguments)
        super().__init__(self._llm)

    @property
    def client(self) -> EngineClient:
        """See ``Host``."""
        return self

    def sizes(self) -> Sizes:
        """See ``Host``."""
        config = self._llm.llm_engine.model_config
        return Sizes(int(config.get_vocab_size()), int(config.max_model_len))

    def generate(self, prompts: Sequence[Sequence[int]], settings: Sequence[Mapping[str, Any]]) -> list[Answer]:
        """See ``Host``."""
        from vllm import SamplingParams

        from reshard.vllm.engine import local_engine

        engine = local_engine()
        if engine is not None and not engine.is_whole:
            raise StateError("the engine's weights are not whole (an update failed): push again before generating")
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self._llm.generate(requests, [SamplingParams(**each) for each in settings], use_tqdm=False)
        return [_answer(output.outputs[0]) for output in outputs]

    def sleep(self, level: int) -> None:
        """See ``Host``."""
        self._llm.sleep(level=level)

    def wake_up(self) -> None:
        """See ``Host``."""
        self._llm.wake_up()

    def shutdown(self) -> None:
        """See ``Host``."""
        self._llm.llm_engine.engine_core.shutdown()


def choose_process(in_this_process: bool) -> None:
    """vLLM reads where its engine core runs from the environment, when an engine is made."""
    wanted = "0" if in_this_process else "1"
    found = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING")
    if found is not None and found != wanted:
        where = "in this process" if in_this_process else "in a process of its own"
        raise StateError(
            f"VLLM_ENABLE_V1_MULTIPROCESSING={found} is set, but this engine is to run {where}: unset it or set it to "
            f"{wanted}"
        )
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = wanted


def _answer(output: Any) -> Answer:
    ids = [int(token) for token in output.token_ids]
    scores = [float(step[token].logprob) for token, step in zip(ids, output.logprobs or [], strict=True)]
    return Answer(ids, scores, output.finish_reason == "length")
