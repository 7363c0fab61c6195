import json
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from algos.checkpoint import (
    host_random_state,
    latest_checkpoint,
    load_checkpoint,
    restore_host_random_state,
    restore_torch_random_state,
    save_checkpoint,
    torch_random_state,
)
from algos.errors import CheckpointError


def write_model(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def save(root: Path, step: int, *, keep: int | None = None, value: float = 1.0) -> Path:
    return save_checkpoint(
        root / f"step_{step:06d}",
        step,
        state={"note": f"at {step}"},
        tensors={"moments": [torch.full((3,), value)]},
        write_model=write_model,
        max_to_keep=keep,
    )


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    folder = save(tmp_path, 12, value=0.1)
    found = load_checkpoint(folder)
    assert (found.step, found.state["note"], found.folder) == (12, "at 12", folder)
    assert torch.equal(found.tensors["moments"][0], torch.full((3,), 0.1))
    assert (found.model_folder / "config.json").is_file()
    assert names(tmp_path) == ["latest.json", "step_000012"]


def test_the_newest_is_the_one_written_last_and_only_so_many_are_kept(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "none") is None
    for step in (5, 10, 15):
        save(tmp_path, step, keep=2)
    assert names(tmp_path) == ["latest.json", "step_000010", "step_000015"]
    save(tmp_path, 6, keep=2)
    assert latest_checkpoint(tmp_path) == tmp_path / "step_000006"
    (tmp_path / "latest.json").unlink()
    assert latest_checkpoint(tmp_path) == tmp_path / "step_000015"


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, 3, value=1.0)
    folder = save(tmp_path, 3, value=2.0)
    assert load_checkpoint(folder).tensors["moments"][0][0] == 2.0
    assert names(tmp_path) == ["latest.json", "step_000003"]


def test_a_crash_while_writing_leaves_the_last_one_and_the_next_save_cleans_up(tmp_path: Path) -> None:
    save(tmp_path, 1)

    def fails(folder: Path) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(tmp_path / "step_000002", 2, state={}, tensors={}, write_model=fails)
    assert latest_checkpoint(tmp_path) == tmp_path / "step_000001"
    assert any(name.startswith(".step_000002") for name in names(tmp_path))
    save(tmp_path, 2)
    assert names(tmp_path) == ["latest.json", "step_000001", "step_000002"]


@pytest.mark.parametrize("part", ["state.json", "trainer.pt", "model/config.json"])
def test_a_missing_part_is_named(tmp_path: Path, part: str) -> None:
    folder = save(tmp_path, 1)
    (folder / part).unlink()
    with pytest.raises(CheckpointError, match=f"not a whole checkpoint, {part} is missing"):
        load_checkpoint(folder)


def test_damage_and_another_format_are_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    whole = (folder / "trainer.pt").read_bytes()
    (folder / "trainer.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="damaged"):
        load_checkpoint(folder)
    (folder / "trainer.pt").write_bytes(whole)
    (folder / "state.json").write_text(json.dumps({"format": 99, "step": 1}))
    with pytest.raises(CheckpointError, match="expected format 1, got 99"):
        load_checkpoint(folder)


class Shell:
    def __reduce__(self):
        return (print, ("code ran",))


def test_nothing_but_tensors_and_containers_is_unpickled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save(tmp_path, 1)
    (folder / "trainer.pt").write_bytes(pickle.dumps({"moments": Shell()}))
    with pytest.raises(CheckpointError, match="damaged"):
        load_checkpoint(folder)
    assert "code ran" not in capsys.readouterr().out


def draws() -> list[float]:
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        float(torch.rand(())),
    ]


def test_random_states_pass_through_json_and_torch_and_give_the_same_numbers(tmp_path: Path) -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    draws()
    folder = save_checkpoint(
        tmp_path / "step_000001",
        1,
        state={"random": host_random_state()},
        tensors={"random": torch_random_state()},
        write_model=write_model,
    )
    expected = draws()
    random.seed(9)
    np.random.seed(9)
    torch.manual_seed(9)
    found = load_checkpoint(folder)
    restore_host_random_state(found.state["random"])
    restore_torch_random_state(found.tensors["random"])
    assert draws() == expected
