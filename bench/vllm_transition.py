"""train -> generate -> train with vLLM on one GPU, whole: memory changes hands, weights arrive, prefix cache is reset.

Two engines with the same model, CUDA graphs and KV budget take turns in one process, at most one of them awake:
ours (sleep-mode backend and weight transfer ``reshard``) and vLLM's own, driven in two ways: ``load_weights`` (sleep
level 2, wake weights, ``model.load_weights`` tensor by tensor, wake KV cache, as TRL does) and ``ipc`` (vLLM's
weight-transfer engine of that name). The trainer's weights are fp32 and change in every round; what each way
generates has to be the same, token by token, and ours is compared with the trainer's weights. "Weights aliased" has
a trainer whose bf16 weights are views of the engine's. Times are of crossing to generation and of crossing back, on
an idle device; generation and training are not in them. Between the engines' turns our arena gives its memory to the
device (they would not fit together), and one crossing that is not timed takes it back: in use that never happens.

    python -m bench.vllm_transition                      # 7B shapes on an H200
    python -m bench.vllm_transition --model 0.5b
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from bench.record import save, summary
from bench.vllm_engine import COMMON, GIB, SHAPES, Engine, Weights, random_weights, shapes_of


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
    """The fp32 weights live in a process of their own, as vLLM's ipc engine wants it, and are mapped here as well."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        context = mp.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=serve_handles, args=(other, shapes), daemon=True)
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


def serve_handles(pipe: Any, shapes: dict[str, tuple[int, ...]]) -> None:
    """Hold the weights and answer requests for their handles."""
    weights = random_weights(shapes)
    torch.cuda.synchronize()
    while pipe.recv() == "handles":
        pipe.send([reduce_tensor(tensor)[1] for tensor in weights.values()])


def views_of(engine: Engine, sync: Any) -> Weights:
    """The engine's live weights by checkpoint names: what a trainer that shares them would hold."""
    from reshard.verify import box_view

    live = dict(engine.model.named_parameters())
    found: Weights = {}
    for holding in sync.plan.destination.holdings(0):
        whole = holding.region.shape == sync.plan.destination.specs[holding.region.name].shape
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

    def leave_device(self) -> None:
        """Give the arena's free memory to the device, for another engine's turn."""
        self.pool.suspend()
        self.memory.arena.trim()

    def return_to_device(self) -> None:
        """Take it back."""
        self.pool.resume()


def rounds(mine: list[Way], theirs: list[Way], weights: Weights, training: Training, num: int) -> None:
    """All ways in turn on the same weights; the tokens have to agree. Two rounds are not counted."""
    for step in range(num + 2):
        train_step(weights, step)
        expected: list[list[int]] = []
        training.return_to_device()
        for way in mine:
            for is_counted in (False, step >= 2):
                training.step()
                expected = way.round(counted=is_counted)
        training.leave_device()
        for way in theirs:
            found = way.round(counted=step >= 2)
            assert found == expected, f"round {step}, {way.name}: {found} is not {expected}"
        torch.cuda.empty_cache()


def used_beside_arena(memory: Any) -> int:
    """Bytes of the device in use that are not the arena's."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return int(total - free - memory.arena.stats.created_bytes)


def run(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """All ways, measured and compared; what goes into the file."""
    from reshard.vllm.memory import engine_memory

    config = COMMON | SHAPES[args.model]
    (Path(folder) / "config.json").write_text(json.dumps(config))
    extra = {"sleep_mode_backend": "reshard", "reshard": {"mappings": args.mappings}}
    mine = Engine(folder, args.utilization, additional_config=extra, weight_transfer_config={"backend": "reshard"})
    memory = engine_memory()
    assert memory is not None
    kv_bytes = sum(region.num_bytes for region in memory.arena.regions("kv_cache"))
    mine.llm.sleep(2)  # there is no trainer yet: the device gets the memory, and the other engine can start
    theirs = Engine(folder, args.utilization, weight_transfer_config={"backend": "ipc"})
    theirs.llm.sleep(2)
    trainer = TrainerProcess(shapes_of(config))
    weights = trainer.weights
    training = Training(memory, kv_bytes * 6 // 10)
    mine.llm.wake_up(["weights"])
    used = used_beside_arena(memory)
    way, sync = ours(mine, weights, name="ours, fp32 trainer")
    other = [vllm_load_weights(theirs, weights), vllm_ipc(theirs, trainer)][: args.theirs]
    rounds([way], other, weights, training, 0)
    extra_bytes = used_beside_arena(memory) - used
    rounds([way], other, weights, training, args.rounds)
    training.return_to_device()
    way.enter()
    assert sync.verify() > 0
    way.leave()
    aliased, alias_way, num_aliased = aliased_rounds(mine, sync, training, args.rounds)
    trainer.close()
    for line in (*table([way, *other, alias_way], args), f"extra memory {extra_bytes / 2**20:.1f} MiB"):
        print(line, flush=True)
    print(f"KV blocks: ours {mine.num_blocks}, vLLM {theirs.num_blocks}; aliased {num_aliased / GIB:.2f} GiB")
    return {
        "model": args.model,
        "utilization": args.utilization,
        "mappings": args.mappings,
        "kv_bytes": kv_bytes,
        "trainer_bytes": training.num_bytes,
        "weight_bytes": sum(t.nbytes for t in aliased.values()),
        "num_blocks": {"ours": mine.num_blocks, "vllm": theirs.num_blocks},
        "extra_bytes": extra_bytes,
        "aliased_bytes": num_aliased,
        "seconds": {
            w.name: {part: {**summary(s), "samples": s} for part, s in w.seconds.items()}
            for w in (way, *other, alias_way)
        },
    }


def aliased_rounds(engine: Engine, sync: Any, training: Training, num: int) -> tuple[Weights, Way, int]:
    """The same with a trainer that holds the engine's own weights; they are the engine's after each step anyway."""
    aliased = views_of(engine, sync)
    sync.close()
    way, again = ours(engine, aliased, name="ours, weights aliased")
    for step in range(num + 2):
        training.step()
        train_step(aliased, step)
        first = way.round(counted=step >= 2)
        assert first == way.round(counted=False), "the same weights give other tokens"
    return aliased, way, int(again.stats.aliased_bytes)


def table(ways: list[Way], args: argparse.Namespace) -> Iterator[str]:
    """Medians in milliseconds, and how many times faster the first way is."""
    base = summary(ways[0].seconds["both"])["median"]
    yield f"{args.model}, medians of {args.rounds} rounds, ms"
    for way in ways:
        enter, leave, both = (summary(way.seconds[p])["median"] * 1e3 for p in way.seconds)
        yield f"  {way.name:30s} {enter:9.1f} + {leave:8.1f} = {both:9.1f}   x {both / 1e3 / base:6.1f}"


def main() -> None:
    """Parse the command line, run, write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(SHAPES), default="7b")
    parser.add_argument("--utilization", type=float, default=0.6, help="of the GPU, for each engine when awake")
    parser.add_argument("--mappings", choices=("keep", "drop"), default="keep")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--theirs", type=int, default=2, help="how many of vLLM's ways to run beside")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="reshard") as folder:
        result = run(args, folder)
    print("written:", save(f"vllm-transition-{args.model}-{args.mappings}", result, folder=args.out))


if __name__ == "__main__":
    main()
