"""The errors that reshard raises. Callers' mistakes are also ``ValueError``; lost devices and peers are also
``RuntimeError``.
"""


class ReshardError(Exception):
    """Base of every error that this package raises on purpose."""


class LayoutError(ReshardError, ValueError):
    """A Layout can't be described: indivisible sizes, conflicting, missing or overlapping holdings."""


class PlanError(ReshardError, ValueError):
    """No Plan leads from the source Layout to the destination Layout, or a stored Plan can't be read."""


class StateError(ReshardError, RuntimeError):
    """An operation was called in a state that does not allow it."""


class OutOfMemory(ReshardError, MemoryError):
    """A budget or a device had too little memory; what was asked for has not happened and nothing else changed."""


class DeviceError(ReshardError, RuntimeError):
    """A driver or system call failed; the message has the call and the driver's own name of the error."""


class TransportError(ReshardError, RuntimeError):
    """A transport could not move the bytes; training weights are intact."""


class PeerTimeout(TransportError, TimeoutError):
    """A peer did not arrive before the deadline; the message names rank, group and step."""


class VerifyError(TransportError):
    """Bytes that arrived differ from the bytes that were sent."""
