"""Log-probs over a cut vocabulary on two gloo processes: values, and gradients on ranks that don't own the target."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hybrid.logprobs import token_log_probs
from hybrid.parallel_logprobs import parallel_token_log_probs

WORLD = 2


def columns(rank: int, padded: int) -> slice:
    return slice(rank * padded // WORLD, (rank + 1) * padded // WORLD)


def compare(rank: int, vocab_size: int, padded: int, dtype: torch.dtype, temperature: float) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = 3 * torch.randn(2, 4, padded, generator=generator, dtype=torch.float64)
    logits[0, 0, 1] = -torch.inf
    logits = logits.to(dtype)
    targets = torch.randint(2, vocab_size, (2, 4), generator=generator)
    mine = columns(rank, padded)
    local = logits[..., mine].clone().requires_grad_()
    whole = logits[..., :vocab_size].clone().requires_grad_()
    ours = parallel_token_log_probs(
        local, targets, vocab_start=mine.start, vocab_size=vocab_size, group=dist.group.WORLD, temperature=temperature
    )
    theirs = token_log_probs(whole, targets, temperature=temperature)
    weights = torch.linspace(-1, 2, 8, dtype=ours.log_probs.dtype).reshape(2, 4)
    for result, leaf in ((ours, local), (theirs, whole)):
        (weights * result.log_probs + weights.flip(0) * result.entropy).sum().backward()
        assert torch.isfinite(leaf.grad).all()
    torch.testing.assert_close(ours, theirs)
    expected = torch.nn.functional.pad(whole.grad, (0, padded - vocab_size))[..., mine]
    torch.testing.assert_close(local.grad, expected)


def h12(rank: int) -> None:
    """V=6 over two ranks, target 4: rank 0 doesn't own it and gets minus its softmax all the same."""
    whole = torch.tensor([[0.3, -1.0, 0.5, 2.0, 0.1, -0.4]])
    local = whole[:, 3 * rank : 3 * rank + 3].clone().requires_grad_()
    result = parallel_token_log_probs(
        local, torch.tensor([4]), vocab_start=3 * rank, vocab_size=6, group=dist.group.WORLD
    )
    result.log_probs.sum().backward()
    expected = torch.nn.functional.one_hot(torch.tensor([4]), 6) - torch.softmax(whole, dim=-1)
    torch.testing.assert_close(local.grad, expected[:, 3 * rank : 3 * rank + 3])


def worker(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    h12(rank)
    for vocab_size, padded in ((6, 6), (9, 12), (5, 12)):  # the last leaves rank 1 nothing but padding
        compare(rank, vocab_size, padded, torch.float64, 1.0)
        compare(rank, vocab_size, padded, torch.float32, 0.7)
    with pytest.raises(ValueError, match="one distribution per target"):
        parallel_token_log_probs(
            torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64), vocab_start=0, vocab_size=6, group=dist.group.WORLD
        )
    dist.destroy_process_group()
    Path(store).with_name(f"finished-{rank}").touch()


def test_h12_and_a14_parallel_log_probs_equal_those_of_the_whole_vocabulary(tmp_path: Path) -> None:
    mp.spawn(worker, args=(str(tmp_path / "store"),), nprocs=WORLD)
    assert len(list(tmp_path.glob("finished-*"))) == WORLD
