"""Two GPUs: a trainer's FSDP2 shards into a tensor parallel vLLM over the same two processes, with CUDA graphs.

``python -m torch.distributed.run --standalone --nproc-per-node 2 THIS updates|fresh collective|peer FOLDER``. As in
``vllm_gpu_scenarios``: two cycles of sleeping, an optimizer step and waking with new weights, by one transport;
``fresh`` is an engine with the same settings that loads the checkpoint of an update. Each rank writes what it saw.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel
from vllm_gpu_scenarios import OURS, config_of, observed, save, start, train

KIND = "dense"


def engine(folder: Path):
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}
    return start(folder, KIND, **OURS, **options)


def whole(model: PreTrainedModel, into: PreTrainedModel) -> None:
    """All shards together on rank 0, on the host."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        into.load_state_dict(state)


def updates(way: str, folder: Path) -> None:
    """Two updates by ``way``."""
    from reshard import PeerTransport
    from reshard.vllm import LLMClient, WeightSync
    from reshard.vllm.memory import engine_memory

    torch.manual_seed(3)
    gathered = AutoModelForCausalLM.from_config(config_of(KIND), dtype=torch.float32)
    if dist.get_rank() == 0:
        save(gathered, folder / "update-0", KIND)
    dist.barrier()
    model = AutoModelForCausalLM.from_config(config_of(KIND), dtype=torch.float32).cuda()
    model.load_state_dict(gathered.state_dict())
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    llm = engine(folder / "update-0")
    memory = engine_memory()
    assert memory is not None
    meeting = folder / "meet"
    meeting.mkdir(exist_ok=True)
    given = {} if way == "collective" else {"transport": PeerTransport(memory.arena, meeting)}
    sync = WeightSync.connect(LLMClient(llm), model, **given)
    found = {"transport": sync.stats.transport, "updates": [observed(llm)], "verified_bytes": 0}
    for update in (1, 2):
        llm.sleep(1)
        train(model, optimizer, update)
        whole(model, gathered)
        if dist.get_rank() == 0:
            save(gathered, folder / f"update-{update}", KIND)
        llm.wake_up(["weights"])
        stats = sync.push()
        llm.wake_up(["kv_cache"])
        found["updates"].append(observed(llm))
        found["verified_bytes"] += sync.verify()
        found |= {"launches": stats.num_launches, "staging_bytes": stats.staging_bytes}
        found |= {"received_bytes": stats.received_bytes, "floor_bytes": sync.plan.received_bytes(dist.get_rank())}
        sync.begin_training()
    (folder / f"updates-{dist.get_rank()}.json").write_text(json.dumps(found))
    sync.close()


def fresh(way: str, folder: Path) -> None:
    """An engine that loads the second update's checkpoint."""
    llm = engine(folder / "update-2")
    (folder / f"fresh-{dist.get_rank()}.json").write_text(json.dumps(observed(llm)))


if __name__ == "__main__":
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    {"updates": updates, "fresh": fresh}[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))
    dist.barrier()
