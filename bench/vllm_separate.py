"""Weights into a vLLM that has a GPU and processes of its own: by `peer`, by `collective`, and by vLLM's `nccl` engine.

The trainer is this process, on the first GPU, with whole weights in fp32 or bf16; the engine has the second. Two phases
with an engine each, ours and vLLM's own, on the same weights step by step: their greedy tokens have to be the same.
Timed is a whole update, from the trainer's call until the engine may generate: opening it, the bytes, loading, closing
it, the prefix cache. The floor is a plain copy of the engine's bytes from GPU to GPU in the same run.

    python -m bench.vllm_separate --model 8b
    python -m bench.vllm_separate --device cpu --model tiny      # a try without GPUs, ours only
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.record import save, summary
from bench.vllm_engine import SHAPES, Outcome, Weights, model_config, outcome_of, random_weights, shapes_of

Way = Callable[[], None]
PROMPTS = [{"prompt_token_ids": [(13 * i + 5 * k) % 300 + 3 for k in range(16 + 40 * i)]} for i in range(4)]


def start_engine(args: argparse.Namespace, folder: str, backend: str) -> Any:
    """An engine in a process of its own that sees the second GPU as its first."""
    from vllm import LLM

    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    if args.device == "cuda":
        torch.zeros(1, device="cuda")  # this process has read the variable by now
        os.environ["CUDA_VISIBLE_DEVICES"] = "1,0"
    try:
        return LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=1024,
            kv_cache_memory_bytes=(1 << 30) if args.device == "cuda" else 64 << 20,
            enforce_eager=args.device == "cpu",
            weight_transfer_config={"backend": backend},
            seed=0,
        )
    finally:
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
        elif args.device == "cuda":
            del os.environ["CUDA_VISIBLE_DEVICES"]


def tokens_of(llm: Any) -> list[list[int]]:
    """Greedy tokens of a few prompts."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=16, detokenize=False, ignore_eos=True)
    return [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, params, use_tqdm=False)]


def nccl_way(llm: Any, weights: Weights) -> Way:
    """vLLM's own engine: packed broadcasts that its loader takes."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"master_address": "127.0.0.1", "master_port": port, "world_size": 2}
    joining = threading.Thread(
        target=llm.init_weight_transfer_engine, args=({"init_info": {**place, "rank_offset": 1}},)
    )
    joining.start()
    group = NCCLWeightTransferEngine.trainer_init(place)
    joining.join()
    half = {name: torch.empty_like(tensor, dtype=torch.bfloat16) for name, tensor in weights.items()}
    info = {
        "names": list(weights),
        "dtype_names": ["bfloat16"] * len(weights),
        "shapes": [list(tensor.shape) for tensor in weights.values()],
        "packed": True,
    }

    def update() -> None:
        torch._foreach_copy_(list(half.values()), list(weights.values()))  # it sends what the engine's dtype is
        llm.start_weight_update()
        receiving = threading.Thread(target=llm.update_weights, args=({"update_info": info},))
        receiving.start()
        NCCLWeightTransferEngine.trainer_send_weights(iter(half.items()), {"group": group, "packed": True})
        receiving.join()
        llm.llm_engine.collective_rpc("finish_weight_update")
        llm.reset_prefix_cache()

    return update


def phase(name: str, args: argparse.Namespace, folder: str) -> Outcome:
    """One engine and its ways, in a process of their own."""
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    llm = start_engine(args, folder, "reshard" if name == "ours" else "nccl")
    weights = random_weights(shapes_of(model_config(args.model)), getattr(torch, args.trainer), device=device)
    outcome: dict[str, Any] = {"seconds": {}, "tokens": {}, "num_launches": {}, "staging_bytes": {}}
    names = ["ours, peer", "ours, collective"] if name == "ours" else ["vLLM's nccl"]
    for way in names:
        update, sync = make_way(way, llm, weights)
        start = random_weights(shapes_of(model_config(args.model)), getattr(torch, args.trainer), device=device)
        torch._foreach_copy_(list(weights.values()), list(start.values()))
        del start
        outcome["seconds"][way], outcome["tokens"][way] = rounds(llm, weights, update, args.rounds, device)
        if sync is not None:
            outcome["num_launches"][way] = sync.stats.num_launches
            outcome["staging_bytes"][way] = sync.stats.staging_bytes
            sync.close()
    if name == "ours" and args.device == "cuda":
        outcome["seconds"]["plain copy of the engine's bytes"] = plain_copies(weights, args.rounds)
    llm.llm_engine.engine_core.shutdown()  # a child of multiprocessing ends without running what would do it
    return outcome


def make_way(name: str, llm: Any, weights: Weights) -> tuple[Way, Any]:
    """What makes an update, and the session that it belongs to, if it is ours."""
    if not name.startswith("ours"):
        return nccl_way(llm, weights), None
    from reshard.vllm import LLMClient, WeightSync

    transport: Any = name.removeprefix("ours, ")
    sync = WeightSync.connect(LLMClient(llm), weights, num_engine_ranks=1, transport=transport)

    def push() -> None:
        sync.push()
        sync.begin_training()

    return push, sync


def rounds(
    llm: Any, weights: Weights, update: Way, num: int, device: torch.device
) -> tuple[list[float], list[list[list[int]]]]:
    """Seconds of each update but the first two, and the tokens after every one; the weights change in between."""
    seconds, tokens = [], []
    for step in range(num + 2):
        generator = torch.Generator(device).manual_seed(step)
        for tensor in weights.values():
            noise = torch.randn(tensor.shape, device=device, generator=generator, dtype=tensor.dtype)
            tensor.add_(noise, alpha=0.01)
        synchronize(device)
        begin = time.perf_counter()
        update()
        synchronize(device)
        if step >= 2:
            seconds.append(time.perf_counter() - begin)
        tokens.append(tokens_of(llm))
    return seconds, tokens


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def plain_copies(weights: Weights, num: int) -> list[float]:
    """Seconds to copy the weights in bf16 from the first GPU to the second."""
    num_bytes = sum(tensor.numel() * 2 for tensor in weights.values())
    src = torch.zeros(min(num_bytes, 4 << 30), dtype=torch.uint8, device="cuda:0")
    dst = torch.zeros_like(src, device="cuda:1")
    seconds = []
    for _ in range(num + 1):
        synchronize(src.device)
        begin = time.perf_counter()
        dst.copy_(src)
        synchronize(src.device)
        synchronize(dst.device)
        seconds.append((time.perf_counter() - begin) * num_bytes / src.nbytes)
    return seconds[1:]


def report(outcomes: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Print medians and write the file."""
    seconds = {way: samples for outcome in outcomes for way, samples in outcome["seconds"].items()}
    tokens = [found for outcome in outcomes for found in outcome["tokens"].values()]
    num_equal = [sum(map(operator.eq, tokens[0], other)) for other in tokens[1:]]
    base = summary(next(iter(seconds.values())))["median"]
    for way, samples in seconds.items():
        median = summary(samples)["median"]
        print(f"  {way:36s} {median * 1e3:9.1f} ms  x {median / base:6.2f}", flush=True)
    print(f"  rounds with the tokens of the first way: {num_equal} of {len(tokens[0])}", flush=True)
    result = {
        "model": args.model,
        "trainer": args.trainer,
        "device": args.device,
        "num_rounds": len(tokens[0]),
        "num_equal_rounds": num_equal,
        "num_launches": outcomes[0]["num_launches"],
        "staging_bytes": outcomes[0]["staging_bytes"],
        "seconds": {way: {**summary(samples), "samples": samples} for way, samples in seconds.items()},
    }
    print("written:", save(f"vllm-separate-{args.model}-{args.trainer}", result, folder=args.out), flush=True)
    assert all(num == len(tokens[0]) for num in num_equal), "the ways gave other tokens"


def main() -> None:
    """Parse the command line and run the phases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(SHAPES), default="8b")
    parser.add_argument("--trainer", choices=("float32", "bfloat16"), default="float32", help="dtype of its weights")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.device == "cuda" and torch.cuda.device_count() < 2:
        parser.error(
            f"this needs two GPUs, one for the trainer and one for the engine; found {torch.cuda.device_count()}"
        )
    with tempfile.TemporaryDirectory(prefix="reshard") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model_config(args.model)))
        outcomes = [outcome_of(phase, "ours", args, folder)]
        report(outcomes, args)
        if args.device == "cuda":
            outcomes.append(outcome_of(phase, "theirs", args, folder))
            report(outcomes, args)


if __name__ == "__main__":
    main()
