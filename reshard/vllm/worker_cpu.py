"""vLLM's CPU worker with weights and KV cache from an arena of host memory: the same states without a GPU."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from reshard.vllm.worker import ArenaSleep


class ArenaCPUWorker(ArenaSleep, CPUWorker):
    """vLLM's CPU worker on an arena of host memory."""
