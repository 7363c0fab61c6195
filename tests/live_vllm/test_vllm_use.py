"""vLLM as users meet it: refusals, its own trainer interface, the rollout engine, a whole GRPO loop."""

import pytest
from byte_tokenizer import byte_tokenizer
from vllm_runs import LOOP_SCENARIOS, SCENARIOS, run
from vllm_scenarios import make_model


@pytest.mark.parametrize(
    ("name", "script"), [("refusals", SCENARIOS), ("trainer_interface", SCENARIOS), ("rollout_engine", LOOP_SCENARIOS)]
)
def test_wrong_input_is_refused_and_what_is_asked_for_comes(tmp_path, scenarios, name, script):
    make_model(tmp_path)
    run(scenarios, name, tmp_path, script=script)
    assert (tmp_path / f"{name}.done").exists()


def test_grpo_runs_on_vllm(tmp_path, scenarios):
    tokenizer = byte_tokenizer()
    make_model(tmp_path / "model", "llama_tied", vocabulary=len(tokenizer))
    tokenizer.save_pretrained(tmp_path / "model")
    run(scenarios, "grpo", tmp_path, script=LOOP_SCENARIOS)
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 4
