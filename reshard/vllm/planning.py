"""vLLM's layouts of a whole engine from its config alone: one process, no GPU, no peers, no weights.

Each rank in turn gets vLLM's own parallel state, made by vLLM's own rank arithmetic over a process group that exists
in name only (torch's ``fake`` backend); the model classes, their shapes and their loaders see the real sizes and their
real rank.
"""

import contextlib
import json
import math
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from vllm.config import DeviceConfig, LoadConfig, ModelConfig, ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state

from reshard.boxes import union_volume
from reshard.errors import LayoutError, StateError
from reshard.layout import Layout, TensorSpec
from reshard.vllm.checkpoint import checkpoint_specs
from reshard.vllm.layout import EngineLayout, learn_layout


def learn_layouts(
    config: Mapping[str, Any] | str | Path,
    *,
    tp: int,
    pp: int = 1,
    dp: int = 1,
    ep: bool = False,
    ranks: Sequence[int] | None = None,
    checkpoint: Iterable[TensorSpec] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Layout:
    """The merged Layout of an engine's ranks; see ``learn_ranks`` for the arguments.

    Raises also LayoutError when all ranks together use only a part of a checkpoint tensor: vLLM's loaders take a slice
    of a tensor that is larger than they expect without a word.
    """
    learnt = learn_ranks(config, tp=tp, pp=pp, dp=dp, ep=ep, ranks=ranks, checkpoint=checkpoint, dtype=dtype)
    layout = Layout.merge(part.layout for part in learnt.values())
    if ranks is None and not layout.opaque_map():
        _check_whole(layout)
    return layout


def _check_whole(layout: Layout) -> None:
    """All elements of every tensor that is used must be."""
    whole: dict[bytes, bool] = {}
    for pattern in layout.patterns:
        whole[pattern.key] = union_volume(pattern.boxes_start, pattern.boxes_stop) == math.prod(pattern.shape)
    partly = [name for name, entry in layout.entries.items() if not whole[entry.pattern.key]]
    if partly:
        raise LayoutError(
            f"the engine uses only a part of {len(partly)} tensors, first {partly[:4]}: its model and the checkpoint "
            "differ in their sizes (number or size of heads, experts, vocabulary); give both the same config"
        )


def learn_ranks(
    config: Mapping[str, Any] | str | Path,
    *,
    tp: int,
    pp: int = 1,
    dp: int = 1,
    ep: bool = False,
    ranks: Sequence[int] | None = None,
    checkpoint: Iterable[TensorSpec] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[int, EngineLayout]:
    """What each rank of an engine would hold, by rank.

    ``config`` is a model's ``config.json``: its fields, its path, or the folder that it lies in. The engine has ``dp``
    replicas of ``pp`` stages of ``tp`` ranks, numbered with tp fastest, then pp; with ``ep`` experts are dealt out over
    ``dp * tp`` ranks. ``checkpoint`` are the tensors to load, by default those that the model's published checkpoint
    would have. Raises StateError in a process that has a process group already, such as one with a live engine.
    """
    specs = list(checkpoint_specs(config, dtype=dtype) if checkpoint is None else checkpoint)
    world_size = tp * pp * dp
    with _folder(config) as folder:
        found = {}
        for rank in range(world_size) if ranks is None else ranks:
            engine = engine_config(folder, tp=tp, pp=pp, dp=dp, ep=ep, rank=rank, dtype=dtype)
            with parallel_rank(engine, rank=rank):
                found[rank] = learn_layout(engine, specs, rank=rank)
        return found


def engine_config(
    folder: Path, *, tp: int, pp: int, dp: int, ep: bool, rank: int, dtype: torch.dtype, **model: Any
) -> VllmConfig:
    """The config that rank ``rank`` of the engine would have; ``model`` are further fields of ``ModelConfig``."""
    parallel = ParallelConfig(
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        data_parallel_size=dp,
        data_parallel_rank=rank // (tp * pp),
        enable_expert_parallel=ep,
        distributed_executor_backend="mp" if tp * pp * dp > 1 else "uni",
    )
    parallel.rank = rank % (tp * pp)
    return VllmConfig(
        model_config=ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype=dtype, **model),
        parallel_config=parallel,
        load_config=LoadConfig(load_format="dummy"),
        device_config=DeviceConfig(device="cpu"),
    )


@contextlib.contextmanager
def parallel_rank(config: VllmConfig, *, rank: int) -> Iterator[None]:
    """vLLM's parallel state of one rank of an engine, without its peers; gone afterwards."""
    if dist.is_initialized():
        raise StateError(
            "this process has a process group already: learn the layouts of planned engines in a process of their own"
        )
    parallel = config.parallel_config
    world_size = parallel.world_size_across_dp
    excepthook = sys.excepthook  # init_process_group wraps it once more each time
    dist.init_process_group(backend="fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with set_current_vllm_config(config), _without_peers():
            parallel_state._WORLD = _NamedGroup([list(range(world_size))], 0, "fake", group_name="world")
            parallel_state._NODE_COUNT = 1
            parallel_state.initialize_model_parallel(
                parallel.tensor_parallel_size, parallel.pipeline_parallel_size, backend="fake"
            )
        yield
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
        sys.excepthook = excepthook


@contextlib.contextmanager
def _without_peers() -> Iterator[None]:
    """While vLLM makes its groups, they need no peers."""
    with mock.patch.object(parallel_state, "init_model_parallel_group", _NamedGroup):
        yield


class _NamedGroup(parallel_state.GroupCoordinator):
    """A group of vLLM's that knows its ranks and has nobody to talk to."""

    def __init__(
        self, group_ranks: list[list[int]], local_rank: int, backend: str, *args: Any, group_name: str, **options: Any
    ) -> None:
        self.rank = dist.get_rank()
        self.ranks = next(ranks for ranks in group_ranks if self.rank in ranks)
        self.group_ranks = group_ranks
        self.unique_name = group_name
        self.world_size = len(self.ranks)
        self.rank_in_group = self.ranks.index(self.rank)
        self.local_rank = local_rank
        self.device_index = local_rank
        self.device = torch.device("cpu")
        self.cpu_group = self.device_group = dist.group.WORLD
        self.torch_distributed_backend = backend
        self.use_device_communicator = False
        self.device_communicator = None
        self.mq_broadcaster = None

    def destroy(self) -> None:
        """Nothing to release."""


@contextlib.contextmanager
def _folder(config: Mapping[str, Any] | str | Path) -> Iterator[Path]:
    """A folder with the config.json, as vLLM reads it."""
    if not isinstance(config, Mapping):
        path = Path(config)
        yield path if path.is_dir() else path.parent
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(dict(config)))
        yield Path(folder)
