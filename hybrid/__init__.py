"""One controller, many workers: train engines, rollout engines and the calls between them."""

from hybrid.backends import BackendReport, check_backends
from hybrid.log import configure_logging
from hybrid.profiler import phase, record_phases, trace

__all__ = ["BackendReport", "check_backends", "configure_logging", "phase", "record_phases", "trace"]
