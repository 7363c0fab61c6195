"""The quantising copy on a GPU beside the memory's floor and the engine's formula in torch, at 7B shapes.

Matrices of a 7B model into float8_e4m3fn with 128 x 128 block scales and row scales, in one launch. Checked against the
oracle first. ``python -m bench.quant_kernel --help``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.copy_kernel import device_seconds, floor_seconds, report
from bench.copy_shapes import MODELS, fused_shapes
from bench.record import save, summary
from reshard import _C
from reshard.oracle import quantize_reference
from reshard.quant import MODES, QuantEntry, QuantMode, make_quant_table, scale_shape


def main() -> None:
    """Parse the command line, run all modes from both source types, write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=tuple(MODELS), default="7B")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path, help="folder of the result file, default build/bench")
    args = parser.parse_args()
    results = [
        run(args.model, source, mode, args.rounds) for source in (torch.float32, torch.bfloat16) for mode in MODES
    ]
    print("written:", save("quant-kernel-cuda", {"results": results}, folder=args.output))


def make_entries(model: str, source: torch.dtype, mode: QuantMode) -> list[QuantEntry]:
    """Every matrix of the layers (embeddings and norms stay as they are), with labelled values."""
    entries = []
    for shape, _ in fused_shapes(MODELS[model]):
        if shape[0] in (1, MODELS[model].vocab):
            continue
        src = torch.empty(shape, dtype=source, device="cuda")
        src.view(-1).copy_(torch.arange(src.numel(), device="cuda").remainder_(65_521).sub_(32_760))
        dst = torch.zeros(shape, dtype=torch.float8_e4m3fn, device="cuda")
        scale = torch.zeros(scale_shape(*shape, mode), device="cuda")
        entries.append(QuantEntry(src=src, dst=dst, scale=scale, mode=mode))
    return entries


def check(entries: list[QuantEntry]) -> None:
    """Compare every value and scale with the oracle, bit for bit."""
    for idx, entry in enumerate(entries):
        expected, scale = quantize_reference(entry.src, mode=entry.mode, through_bf16=entry.through_bf16)
        assert torch.equal(entry.scale, scale), f"scales of matrix {idx} differ"
        assert torch.equal(entry.dst.view(torch.uint8), expected.view(torch.uint8)), f"matrix {idx} differs"


def run(model: str, source: torch.dtype, mode: QuantMode, rounds: int) -> dict[str, Any]:
    """Check, then time one mode from one source type."""
    entries = make_entries(model, source, mode)
    table = _C.QuantDeviceTable(make_quant_table(entries))
    num_bytes = sum(e.src.nbytes + e.dst.nbytes + e.scale.nbytes for e in entries)
    print(f"{model} {source} -> float8_e4m3fn, {mode}: {len(entries)} matrices, {num_bytes / 1e9:.2f} GB")

    def launch() -> None:
        table.launch(torch.cuda.current_stream().cuda_stream)

    launch()
    torch.cuda.synchronize()
    check(entries)
    ways: dict[str, Callable[[], object]] = {"reshard quantising kernel": launch}
    ways["the formula in torch, matrix by matrix"] = lambda: [quantize_reference(e.src, mode=mode) for e in entries]
    seconds = device_seconds(ways, rounds) | floor_seconds(torch.bfloat16, num_bytes, rounds)
    floor = summary(seconds["plain copy of as many bytes"])["median"]
    rows = report(seconds, num_bytes, floor)
    return {"model": model, "source": str(source), "mode": mode, "bytes": num_bytes, "ways": rows}


if __name__ == "__main__":
    main()
