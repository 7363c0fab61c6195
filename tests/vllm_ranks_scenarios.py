"""Engines and trainers of several processes: ``python vllm_ranks_scenarios.py NAME FOLDER`` runs one on two ranks.

As in ``vllm_scenarios``, every update follows a real optimizer step, the engine's greedy tokens and their log-probs
must be the trainer's, and the caller compares the tokens with a fresh engine's.
"""

import json
import os
import signal
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel
from vllm_scenarios import expect, expect_trainer, sample, start_engine, train

LONG_S = 100.0


class Trainer:
    """This rank's FSDP2 shards, and on rank 0 what they make together."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tokens = folder, []
        self.whole = AutoModelForCausalLM.from_pretrained(folder)
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder)
        for layer in self.model.model.layers:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)

    def step(self, update: int) -> None:
        """One optimizer step; ``whole`` has its result."""
        train(self.model, self.optimizer, update)
        self.whole.load_state_dict({name: t.full_tensor() for name, t in self.model.state_dict().items()})

    def check(self, update: int, tokens, log_probs) -> None:
        """What an engine gave with the weights of ``update``; kept for the comparison with a fresh engine."""
        expect_trainer(self.whole, tokens, log_probs)
        assert tokens not in self.tokens, "the update changed no token: the test shows nothing"
        self.tokens.append(tokens)
        self.whole.save_pretrained(self.folder / f"update-{update}")
        (self.folder / "tokens.json").write_text(json.dumps(self.tokens))


def trainer_ranks(folder: Path) -> None:
    """Two trainer ranks; rank 0 has the engine, in a process of its own. Then a rank refuses, and one dies."""
    from reshard.vllm import LLMClient, WeightSync

    dist.init_process_group("gloo")
    rank, trainer = dist.get_rank(), Trainer(folder)
    llm = start_engine(folder, enable_prefix_caching=True) if rank == 0 else None
    try:
        client = LLMClient(llm) if llm is not None else None
        sync = WeightSync.connect(client, trainer.model, num_engine_ranks=1, group=dist.group.WORLD)
        assert sync.stats.transport == "peer" and len(sync.plan.source.ranks) == 2
        for update in (1, 2):
            trainer.step(update)
            sync.push()
            assert sync.version == update
            if llm is not None:
                trainer.check(update, *sample(llm))
            sync.begin_training()
        refused_and_gone(sync, trainer, rank, llm)
    finally:
        if llm is not None:  # this process waits for its children when it ends
            llm.llm_engine.engine_core.shutdown()


def refused_and_gone(sync, trainer: Trainer, rank: int, llm) -> None:
    """Rank 1 refuses a push and takes part in the next one; then it dies. Rank 0 is told who, the engine waits."""
    from reshard.errors import StateError, TransportError

    if rank == 1:
        expect(StateError, "version 2 is not newer than 2", lambda: sync.push(version=2))
    else:
        expect(TransportError, "waited 3 s for rank 1 to send its last bytes", lambda: sync.push(deadline_s=3.0))
    dist.barrier()
    if rank == 1:
        expect(TransportError, "rank 1", lambda: sync.push(deadline_s=LONG_S))  # as the others have given up on it
    sync.push(deadline_s=LONG_S)
    assert sync.version == 3
    if rank == 1:
        os._exit(0)
    assert sample(llm)[0] == trainer.tokens[-1], "the weights have not changed"
    expect(TransportError, "rank 1 is gone", lambda: sync.push(deadline_s=LONG_S))
    assert sync.version == 3
    sync.close()


def sleeping_ranks(folder: Path) -> None:
    """Tensor parallel over two trainer ranks, each engine rank on an arena: sleep at both levels, weights by tag."""
    from vllm_memory_scenarios import model_of, start

    from reshard.errors import StateError
    from reshard.vllm import LLMClient, WeightSync

    dist.init_process_group("gloo")
    rank, trainer = dist.get_rank(), Trainer(folder)
    parallel = {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}
    llm, memory, generate = start(folder, weight_transfer_config={"backend": "reshard"}, **parallel)
    sync = WeightSync.connect(LLMClient(llm), trainer.model)
    assert any(sync.plan.received_bytes(r) > 0 for r in sync.plan.scope), "no byte crosses between the ranks"
    before, large = generate(), 4096 * 256 * 4 // 2
    for update in (1, 2):
        llm.sleep(1)
        assert memory.state.name == "SUSPENDED level 1"
        trainer.step(update)
        llm.wake_up()
        assert generate() == (before[0], 0), "the old weights, and nothing of the old cache"
        llm.sleep(2)
        assert memory.arena.stats.created_bytes == 0, "weights and cache are handed over"
        expect(StateError, "the weights have no memory: the engine is SUSPENDED level 2", sync.push)
        llm.wake_up(["weights"])
        assert memory.state.name == "AWAITING_WEIGHTS"
        head = model_of(llm).get_submodule("lm_head").weight
        assert head.nbytes == large and bool((head.view(torch.uint8) == 0xA5).all()), "the weights were handed over"
        sync.push()
        assert memory.state.name == "WEIGHTS_READY" and sync.version == update
        llm.wake_up(["kv_cache"])
        before = generate()
        found = sample(llm)
        if rank == 0:
            trainer.check(update, *found)
        dist.barrier()
        sync.begin_training()
    sync.close()


def in_two_ranks(name: str, folder: Path) -> None:
    """Run a scenario on two forks of this process, with the environment that torchrun would give them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(probe.getsockname()[1]), WORLD_SIZE="2")
    mp.start_processes(_rank, args=(name, folder), nprocs=2, start_method="fork")


def _rank(rank: int, name: str, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the other rank failed: let go of the engine
    globals()[name](folder)


if __name__ == "__main__":
    in_two_ranks(sys.argv[1], Path(sys.argv[2]))
    Path(sys.argv[2], f"{sys.argv[1]}.done").touch()
