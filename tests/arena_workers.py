"""What the other process does in the GPU tests of sharing: a module that a spawned process can import."""

import os
import signal

import torch

from reshard.arena import Arena, Channel, ImportedRegion, receive_region

PATIENCE_S = 120.0


def write_in_place(path: str) -> None:
    torch.cuda.set_device(0)
    with Channel.connect(path, timeout_s=PATIENCE_S) as channel, Arena.cuda(0) as arena:
        region: ImportedRegion = receive_region(channel, arena=arena, timeout_s=PATIENCE_S)
        words = region.tensor(torch.int32)
        assert torch.equal(words, torch.arange(words.numel(), device="cuda", dtype=torch.int32))
        words.mul_(-3)
        torch.cuda.synchronize()
        del words
        region.close()
        channel.send("written", {}, timeout_s=PATIENCE_S)


def map_and_die(path: str) -> None:
    torch.cuda.set_device(0)
    channel, arena = Channel.connect(path, timeout_s=PATIENCE_S), Arena.cuda(0)
    region = receive_region(channel, arena=arena, timeout_s=PATIENCE_S)
    region.tensor().fill_(1)
    torch.cuda.synchronize()
    os.kill(os.getpid(), signal.SIGKILL)
