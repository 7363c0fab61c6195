"""Logging of the three packages, set by RESHARD_LOG_LEVEL."""

from __future__ import annotations

import logging
import os

LOG_LEVEL_VARIABLE = "RESHARD_LOG_LEVEL"
PACKAGES = ("reshard", "hybrid", "algos")
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def configure_logging(default: str = "WARNING") -> str:
    """Set the level of the packages' loggers from RESHARD_LOG_LEVEL, or `default`, and return it.

    Entry points and worker processes call it; importing a package never does. Where nothing has set up logging yet, a
    handler that writes time, level, process and logger to stderr is added. Safe to call twice.

    Raises:
        ValueError: the level isn't one of DEBUG, INFO, WARNING, ERROR, CRITICAL (in any case).
    """
    level = os.environ.get(LOG_LEVEL_VARIABLE, default).strip().upper() or default
    if level not in _LEVELS:
        raise ValueError(f"{LOG_LEVEL_VARIABLE} must be one of {', '.join(_LEVELS)}, got {level!r}")
    if not logging.getLogger().handlers:
        logging.basicConfig(format="%(asctime)s %(levelname)s [%(process)d] %(name)s: %(message)s")
    for package in PACKAGES:
        logging.getLogger(package).setLevel(level)
    return level
