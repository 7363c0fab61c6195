"""train -> generate -> train with vLLM on one GPU, whole: memory changes hands, weights arrive, prefix cache is reset.

Two phases, each with an engine of the same model, CUDA graphs and KV budget in a process of its own, on the same
weights step by step. In the first the engine is ours (sleep-mode backend and weight transfer ``reshard``), in the
second it is vLLM's own, driven in two ways in turn: ``load_weights`` (sleep level 2, wake weights, ``load_weights``
tensor by tensor, wake KV cache, as TRL does) and ``ipc`` (vLLM's weight-transfer engine of that name). The trainer's
weights change in every round; what each way generates has to be the same in both phases, token by token, and ours is
compared with the trainer's weights. "Weights aliased" has a trainer whose bf16 weights are views of the engine's. Times
are of crossing to generation and of crossing back, on an idle device; generation and training are not in them.

    python -m bench.vllm_transition                      # 7B shapes on an H200, fp32 trainer
    python -m bench.vllm_transition --model 0.5b
    python -m bench.vllm_transition --model 30b-a3b --trainer bfloat16 --utilization 0.5
"""

from __future__ import annotations

import argparse
import json
import operator
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from bench.record import save, summary
from bench.vllm_engine import (
    GIB,
    SHAPES,
    Engine,
    Outcome,
    Weights,
    model_config,
    outcome_of,
    random_weights,
    shapes_of,
)


class Way:
    """One way across: ``to_generation`` and ``to_training``, both timed."""

    def __init__(self, name: str, engine: Engine, enter: Callable[[], None], leave: Callable[[], None]) -> None:
        self.name, self.engine = name, engine
        self.enter, self.leave = enter, leave
        self.seconds: dict[str, list[float]] = {"to generation": [], "to training": [], "both": []}

    def round(self, *, counted: bool) -> list[list[int]]:
        """Cross, generate, cross back; the tokens generated."""
        entered = timed(self.enter)
        tokens = self.engine.tokens()
        left = timed(self.leave)
        if counted:
            for part, seconds in (("to generation", entered), ("to training", left), ("both", entered + left)):
                self.seconds[part].append(seconds)
        return tokens


def timed(step: Callable[[], None]) -> float:
    """Seconds until the device has done ``step``."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def ours(engine: Engine, weights: Weights, *, name: str) -> tuple[Way, Any]:
    """Hand over, push, reset; the sync is returned for its checks."""
    from reshard.vllm import LLMClient, WeightSync

    sync = WeightSync.connect(LLMClient(engine.llm), weights)

    def enter() -> None:
        engine.llm.wake_up(["weights"])
        sync.push()
        engine.llm.wake_up(["kv_cache"])

    def leave() -> None:
        engine.llm.sleep(1)
        sync.begin_training()

    return Way(name, engine, enter, leave), sync


def vllm_load_weights(engine: Engine, weights: Weights) -> Way:
    """As TRL drives a colocated engine."""

    def enter() -> None:
        torch.cuda.empty_cache()
        engine.llm.wake_up(["weights"])
        for name, tensor in weights.items():
            engine.model.load_weights([(name, tensor)])
        engine.llm.reset_prefix_cache()
        engine.llm.wake_up(["kv_cache"])

    return Way("vLLM sleep(2), load_weights", engine, enter, lambda: engine.llm.sleep(2))


def vllm_ipc(engine: Engine, trainer: TrainerProcess) -> Way:
    """vLLM's own weight-transfer engine for one device: handles come from the trainer's process."""
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    weights = trainer.weights

    def enter() -> None:
        torch.cuda.empty_cache()
        engine.llm.wake_up(["weights"])
        engine.llm.start_weight_update()
        info = {
            "names": list(weights),
            "dtype_names": [str(t.dtype).split(".")[-1] for t in weights.values()],
            "shapes": [list(t.shape) for t in weights.values()],
            "ipc_handles": [{uuid: handle} for handle in trainer.handles()],
        }
        engine.llm.update_weights({"update_info": info})
        engine.llm.finish_weight_update()
        engine.llm.reset_prefix_cache()
        engine.llm.wake_up(["kv_cache"])

    return Way("vLLM sleep(2), ipc", engine, enter, lambda: engine.llm.sleep(2))


class TrainerProcess:
    """The weights live in a process of their own, as vLLM's ipc engine wants it, and are mapped here as well."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> None:
        context = mp.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=serve_handles, args=(other, shapes, dtype), daemon=True)
        self._process.start()
        self.weights: Weights = {
            name: rebuild_cuda_tensor(*handle) for name, handle in zip(shapes, self.handles(), strict=True)
        }

    def handles(self) -> list[tuple[Any, ...]]:
        """IPC handles of all weights, made anew."""
        self._pipe.send("handles")
        return list(self._pipe.recv())

    def close(self) -> None:
        """End the process."""
        self.weights.clear()
        self._pipe.send("end")
        self._process.join(timeout=30)


def serve_handles(pipe: Any, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> None:
    """Hold the weights and answer requests for their handles."""
    weights = random_weights(shapes, dtype)
    torch.cuda.synchronize()
    while pipe.recv() == "handles":
        pipe.send([reduce_tensor(tensor)[1] for tensor in weights.values()])


def views_of(engine: Engine, plan: Any) -> Weights:
    """The engine's live weights by checkpoint names: what a trainer that shares them would hold."""
    from reshard.verify import box_view

    live = dict(engine.model.named_parameters())
    found: Weights = {}
    for holding in plan.destination.holdings(0):
        whole = holding.region.shape == plan.destination.specs[holding.region.name].shape
        if whole and holding.address.storage in live:
            storage = torch.empty(0, dtype=torch.uint8, device="cuda")
            storage.set_(live[holding.address.storage].untyped_storage())
            found[holding.region.name] = box_view(storage, holding.address, holding.region.shape)
    return found


def train_step(weights: Weights, step: int) -> None:
    """Change every weight a little, in place, as an optimizer would."""
    generator = torch.Generator("cuda").manual_seed(step)
    for tensor in weights.values():
        tensor.add_(torch.randn(tensor.shape, device="cuda", generator=generator, dtype=tensor.dtype), alpha=0.01)


class Training:
    """A training step's activations, in memory that the engine gave up."""

    def __init__(self, memory: Any, num_bytes: int) -> None:
        self.memory, self.num_bytes = memory, num_bytes
        self.pool = memory.trainer_pool()

    def step(self) -> None:
        """Take gigabytes from the pool and write them."""
        with self.pool.use():
            blocks = [torch.empty(GIB, dtype=torch.uint8, device="cuda") for _ in range(self.num_bytes // GIB)]
            for block in blocks:
                block.fill_(255)


def rounds(ways: list[Way], weights: Weights, training: Training | None, num: int) -> list[list[list[int]]]:
    """All ways in turn on the same weights, ``num`` times after two that are not counted; the tokens of each step."""
    found = []
    for step in range(num + 2):
        train_step(weights, step)
        tokens = []
        for way in ways:
            if training is not None:
                training.step()
            tokens.append(way.round(counted=step >= 2))
        assert all(other == tokens[0] for other in tokens), f"step {step}: the ways' tokens differ: {tokens}"
        found.append(tokens[0])
    return found


def used_beside_arena(memory: Any) -> int:
    """Bytes of the device in use that are not the arena's."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return int(total - free - memory.arena.stats.created_bytes)


def our_phase(args: argparse.Namespace, folder: str) -> Outcome:
    """Our engine with a trainer of its own memory, then with one that shares the engine's."""
    from reshard.vllm.memory import engine_memory

    extra = {"sleep_mode_backend": "reshard", "reshard": {"mappings": args.mappings}}
    engine = Engine(folder, args.utilization, additional_config=extra, weight_transfer_config={"backend": "reshard"})
    memory = engine_memory()
    assert memory is not None
    kv_bytes = sum(region.num_bytes for region in memory.arena.regions("kv_cache"))
    trainer = TrainerProcess(shapes_of(model_config(args.model)), getattr(torch, args.trainer))
    training = Training(memory, kv_bytes * 6 // 10)
    used = used_beside_arena(memory)
    way, sync = ours(engine, trainer.weights, name=f"ours, {args.trainer} trainer")
    engine.llm.sleep(1)
    tokens = rounds([way], trainer.weights, training, args.rounds)
    extra_bytes = used_beside_arena(memory) - used
    way.enter()
    verified_bytes = sync.verify()
    way.leave()
    assert verified_bytes > 0
    plan, stats = sync.plan, sync.stats
    sync.close()
    trainer.close()
    aliased = views_of(engine, plan)
    alias_way, num_aliased = aliased_rounds(engine, aliased, training, args.rounds)
    return {
        "tokens": tokens,
        "num_blocks": engine.num_blocks,
        "kv_bytes": kv_bytes,
        "training_bytes": training.num_bytes,
        "weight_bytes": sum(t.nbytes for t in aliased.values()),
        "extra_bytes": extra_bytes,
        "staging_bytes": stats.staging_bytes,
        "num_launches": stats.num_launches,
        "verified_bytes": verified_bytes,
        "aliased_bytes": num_aliased,
        "seconds": {w.name: w.seconds for w in (way, alias_way)},
    }


def their_phase(args: argparse.Namespace, folder: str) -> Outcome:
    """vLLM's own engine, both ways in turn."""
    engine = Engine(folder, args.utilization, weight_transfer_config={"backend": "ipc"})
    trainer = TrainerProcess(shapes_of(model_config(args.model)), getattr(torch, args.trainer))
    ways = [vllm_load_weights(engine, trainer.weights), vllm_ipc(engine, trainer)][: args.theirs]
    engine.llm.sleep(2)
    tokens = rounds(ways, trainer.weights, None, args.rounds)
    trainer.close()
    return {"tokens": tokens, "num_blocks": engine.num_blocks, "seconds": {w.name: w.seconds for w in ways}}


def run(args: argparse.Namespace, folder: str) -> None:
    """Both phases, compared; the file is written after each, so that a long second one can't lose the first."""
    (Path(folder) / "config.json").write_text(json.dumps(model_config(args.model)))
    mine = outcome_of(our_phase, args, folder)
    write(mine, None, args)
    if args.theirs:
        theirs = outcome_of(their_phase, args, folder)
        write(mine, theirs, args)
        differing = [i for i, (a, b) in enumerate(zip(mine["tokens"], theirs["tokens"], strict=True)) if a != b]
        assert not differing, f"steps {differing}: our engine's tokens are not vLLM's"


def write(mine: Outcome, theirs: Outcome | None, args: argparse.Namespace) -> None:
    """Print the table and write the file."""
    seconds = mine["seconds"] | ({} if theirs is None else theirs["seconds"])
    for line in table(seconds, args):
        print(line, flush=True)
    blocks = {"ours": mine["num_blocks"], "vllm": None if theirs is None else theirs["num_blocks"]}
    print(f"extra memory {mine['extra_bytes'] / 2**20:.1f} MiB; KV blocks {blocks}; {mine['num_launches']} launches")
    result = {
        **{name: value for name, value in mine.items() if name not in ("tokens", "seconds", "num_blocks")},
        "num_equal_rounds": None if theirs is None else sum(map(operator.eq, mine["tokens"], theirs["tokens"])),
        "model": args.model,
        "trainer": args.trainer,
        "utilization": args.utilization,
        "mappings": args.mappings,
        "num_blocks": blocks,
        "seconds": {
            name: {part: {**summary(s), "samples": s} for part, s in parts.items()} for name, parts in seconds.items()
        },
    }
    name = f"vllm-transition-{args.model}-{args.trainer}-{args.mappings}"
    print("written:", save(name, result, folder=args.out), flush=True)


def aliased_rounds(engine: Engine, aliased: Weights, training: Training, num: int) -> tuple[Way, int]:
    """The same with a trainer that holds the engine's own weights; they are the engine's after each step anyway."""
    way, again = ours(engine, aliased, name="ours, weights aliased")
    for step in range(num + 2):
        training.step()
        train_step(aliased, step)
        first = way.round(counted=step >= 2)
        assert first == way.round(counted=False), "the same weights give other tokens"
    return way, int(again.stats.aliased_bytes)


def table(seconds: dict[str, dict[str, list[float]]], args: argparse.Namespace) -> Iterator[str]:
    """Medians in milliseconds, and how many times faster the first way is."""
    base = summary(next(iter(seconds.values()))["both"])["median"]
    yield f"{args.model}, medians of {args.rounds} rounds, ms"
    for name, parts in seconds.items():
        enter, leave, both = (summary(samples)["median"] * 1e3 for samples in parts.values())
        yield f"  {name:30s} {enter:9.1f} + {leave:8.1f} = {both:9.1f}   x {both / 1e3 / base:6.1f}"


def main() -> None:
    """Parse the command line, run, write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(SHAPES), default="7b")
    parser.add_argument("--trainer", choices=("float32", "bfloat16"), default="float32", help="dtype of its weights")
    parser.add_argument("--utilization", type=float, default=0.6, help="of the GPU, for each engine when awake")
    parser.add_argument("--mappings", choices=("keep", "drop"), default="keep")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--theirs", type=int, default=2, help="how many of vLLM's ways to run beside")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="reshard") as folder:
        run(args, folder)


if __name__ == "__main__":
    main()
