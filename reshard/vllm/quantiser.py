"""Quantising copies bound to where they run, as one table."""

from collections.abc import Sequence

import torch

from reshard import _C
from reshard.errors import DeviceError
from reshard.quant import QuantEntry, make_quant_table


class Quantiser:
    """Quantises ``entries`` whenever asked, in one table: at once on the host, on torch's current stream on a GPU.

    The tensors are borrowed and held. Addresses must stay.

    Raises:
        DeviceError: this build of reshard has no kernels for a GPU.
    """

    def __init__(self, entries: Sequence[QuantEntry], device: torch.device) -> None:
        self._entries, self._table = tuple(entries), make_quant_table(entries)
        self._device_table: _C.QuantDeviceTable | None = None
        if device.type == "cuda":
            if not has_quantiser(device):
                raise DeviceError(
                    "this build of reshard has no CUDA kernels, which quantising on a GPU needs: build it where nvcc is"
                )
            with torch.cuda.device(device):
                self._device_table = _C.QuantDeviceTable(self._table)

    @property
    def num_bytes(self) -> int:
        """Bytes that are read and written in one run."""
        return sum(entry.src.nbytes + entry.dst.nbytes + entry.scale.nbytes for entry in self._entries)

    @property
    def num_launches(self) -> int:
        """Kernel launches of one run; 1 on the host."""
        return 1 if self._device_table is None else self._device_table.num_launches

    def run(self) -> None:
        """Quantise all."""
        if self._device_table is None:
            _C.quantize_host(self._table)
        else:
            self._device_table.launch(torch.cuda.current_stream(self._entries[0].dst.device).cuda_stream)


def has_quantiser(device: torch.device) -> bool:
    """Whether quantising copies run on this device in this build."""
    return device.type == "cpu" or (device.type == "cuda" and _C.CUDA_KERNELS)
