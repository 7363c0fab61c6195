"""Transports move a Plan's bytes: one contract (`base.py`), several ways.

``local``: source and destination live in this process; the table-driven copy writes straight into the destination.
"""

from reshard.transports.base import BoundTransfer, Endpoint, Tensors, Transport
from reshard.transports.local import LocalTransport

__all__ = ["BoundTransfer", "Endpoint", "LocalTransport", "Tensors", "Transport"]
