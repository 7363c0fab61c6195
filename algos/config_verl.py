"""Names that a verl user's script has and that are shorter, or joined, here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PREFIX = "actor_rollout_ref."
RENAMED = {
    "trainer.default_local_dir": "trainer.output_dir",
    "trainer.max_actor_ckpt_to_keep": "trainer.max_ckpt_to_keep",
}
RESUME_MODES = {"auto": "auto", "disable": "never"}
REWARD_SECTIONS = ("custom_reward_function", "reward.custom_reward_function")


def shorten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the keys of ``flat`` (dotted name to value) to this project's; unknown names pass through.

    ``trainer.resume_mode`` and ``trainer.resume_from_path`` become ``trainer.resume``; ``custom_reward_function.path``
    and ``.name`` become ``reward.function``.
    """
    renamed = {RENAMED.get(short, short): value for short, value in _without_prefix(flat)}
    mode, path = renamed.pop("trainer.resume_mode", None), renamed.pop("trainer.resume_from_path", None)
    if path:
        renamed["trainer.resume"] = path
    elif mode in RESUME_MODES:
        renamed["trainer.resume"] = RESUME_MODES[mode]
    elif mode is not None:
        renamed["trainer.resume"] = ""
    for section in REWARD_SECTIONS:
        file, name = renamed.pop(f"{section}.path", None), renamed.pop(f"{section}.name", "compute_score")
        if file:
            renamed["reward.function"] = f"{file}:{name}"
    return renamed


def _without_prefix(flat: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(name.removeprefix(PREFIX), value) for name, value in flat.items()]
