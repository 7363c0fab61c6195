"""Everything that can be wrong with a run's input, looked at before the model is loaded."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoTokenizer

from algos.checkpoint import latest_checkpoint
from algos.config import Config, DataConfig
from algos.config_check import resolve
from algos.config_load import Loaded
from algos.data import DataSpec, PromptDataset, PromptLoader, load_rows
from algos.data.dataset import Truncation
from algos.errors import InputError
from algos.metrics import RunPaths, read_rows
from algos.rewards import Reward, load_reward


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What a run needs besides its engines, checked.

    ``stop_token_ids`` are all ids that end a response by the model's own files; ``pad_token_id`` fills unused places
    and means nothing. ``resume_from`` is the checkpoint to continue, if any.
    """

    config: Config
    paths: RunPaths
    device: torch.device
    model_folder: Path
    tokenizer: Any
    stop_token_ids: tuple[int, ...]
    pad_token_id: int
    reward: Reward
    loader: PromptLoader
    validation: PromptLoader | None
    num_steps: int
    resume_from: Path | None


def prepare(config: Config) -> Prepared:
    """Check the input of a run, cheapest things first; raise InputError at the first that is wrong."""
    config = resolve(config)
    device = _device(config.trainer.device)
    paths = RunPaths(_writable_folder(config.trainer.output_dir))
    resume_from = _resume_from(config, paths)
    model_folder = find_model(config.model.path)
    tokenizer = _load_tokenizer(model_folder)
    loader = _train_loader(config.data, model_folder, tokenizer)
    steps = config.trainer.total_training_steps or config.trainer.total_epochs * loader.num_batches_per_epoch
    stop_token_ids = find_stop_tokens(model_folder, tokenizer)
    pad = tokenizer.pad_token_id
    return Prepared(
        config=config,
        paths=paths,
        device=device,
        model_folder=model_folder,
        tokenizer=tokenizer,
        stop_token_ids=stop_token_ids,
        pad_token_id=pad if pad is not None else (stop_token_ids or (0,))[0],
        loader=loader,
        validation=_val_loader(config.data, model_folder, tokenizer) if config.trainer.test_freq > 0 else None,
        num_steps=steps,
        resume_from=resume_from,
        reward=load_reward(config.reward.function),
    )


@contextmanager
def prepared_run(loaded: Loaded) -> Iterator[Prepared]:
    """``prepare``, and at the end close what it opened: the reward's worker processes."""
    prepared = prepare(loaded.config)
    try:
        yield prepared
    finally:
        prepared.reward.close()


def find_model(path: str) -> Path:
    """Return the folder of a model: ``path`` itself, or the local cache's copy of the hub's model ``path``."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        folder = _cached_model(path)
    if not (folder / "config.json").is_file():
        raise InputError(f"model.path={path}: no config.json in this folder; expected a Hugging Face model's folder")
    if not any(folder.glob("*.safetensors")):
        raise InputError(f"model.path={path}: no *.safetensors in this folder; save the model with save_pretrained")
    return folder


def find_stop_tokens(model_folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """All ids that end a response: those of generation_config.json and config.json and the tokenizer's own."""
    found = [tokenizer.eos_token_id]
    for name in ("generation_config.json", "config.json"):
        if (model_folder / name).is_file():
            ids = json.loads((model_folder / name).read_text()).get("eos_token_id")
            found.extend(ids if isinstance(ids, list) else [ids])
    return tuple(sorted({int(token_id) for token_id in found if token_id is not None}))


def _cached_model(path: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        raise InputError(
            f"model.path={path}: no such folder, and no such model in the local Hugging Face cache; "
            "download it first (hf download NAME) or give a folder"
        ) from None


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("trainer.device=cuda: torch sees no GPU here; set trainer.device=cpu or auto")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _writable_folder(path: str) -> Path:
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"trainer.output_dir={path}: can't write there ({reason}); choose another folder") from None
    return folder


def _resume_from(config: Config, paths: RunPaths) -> Path | None:
    mode = config.trainer.resume
    if mode == "auto":
        return latest_checkpoint(paths.checkpoints)
    if mode == "never":
        rows = read_rows(paths.metrics)
        if rows or latest_checkpoint(paths.checkpoints):
            raise InputError(
                f"trainer.output_dir={paths.root} holds a run of {len(rows)} steps already; continue it with "
                "trainer.resume=auto, or choose another folder"
            )
        return None
    return Path(mode).expanduser()


def _load_tokenizer(model_folder: Path) -> Any:
    try:
        return AutoTokenizer.from_pretrained(str(model_folder), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"model.path={model_folder}: its tokenizer can't be loaded ({reason})") from None


def _dataset(data: DataConfig, files: tuple[str, ...], max_samples: int, tokenizer: Any) -> PromptDataset:
    spec = DataSpec(
        files=files,
        prompt_key=data.prompt_key,
        answer_key=data.answer_key,
        data_source_key=data.reward_fn_key,
        extra_info_key=data.extra_info_key,
        prompt_template=data.prompt_template or None,
        prompt_suffix=data.prompt_suffix,
        system_prompt=data.system_prompt or None,
        max_rows=None if max_samples < 0 else max_samples,
    )
    return PromptDataset(
        load_rows(spec),
        tokenizer,
        max_prompt_length=data.max_prompt_length,
        truncation=cast(Truncation, data.truncation),
        filter_overlong=data.filter_overlong_prompts,
    )


def _check_positions(dataset: PromptDataset, model_folder: Path) -> None:
    keys = json.loads((model_folder / "config.json").read_text())
    limit = keys.get("max_position_embeddings") or keys.get("text_config", {}).get("max_position_embeddings")
    longest = max(len(dataset[idx].ids) for idx in range(len(dataset)))
    if limit and longest >= limit:
        raise InputError(
            f"the longest prompt has {longest} tokens, which leaves no room for a response in the model's {limit} "
            f"positions; set data.max_prompt_length below {limit} and data.filter_overlong_prompts=true"
        )


def _train_loader(data: DataConfig, model_folder: Path, tokenizer: Any) -> PromptLoader:
    dataset = _dataset(data, data.train_files, data.train_max_samples, tokenizer)
    _check_positions(dataset, model_folder)
    return PromptLoader(dataset, data.train_batch_size, shuffle=data.shuffle, seed=data.seed or 0)


def _val_loader(data: DataConfig, model_folder: Path, tokenizer: Any) -> PromptLoader:
    dataset = _dataset(data, data.val_files, data.val_max_samples, tokenizer)
    _check_positions(dataset, model_folder)
    return PromptLoader(dataset, data.val_batch_size or data.train_batch_size, shuffle=False, drop_last=False)
