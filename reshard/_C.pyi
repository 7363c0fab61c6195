"""The boundary between Python and csrc/: what ``reshard._C`` holds. Nothing here imports torch or initialises a device.

Addresses are absolute, as integers; whoever owns the memory keeps it alive until the call, or the stream's work, is
done. Malformed arguments raise ValueError. A ``table`` is a contiguous 1-d array of ``reshard.table.COPY_RECORD``.
"""

from reshard.table import CopyTable

CUDA_KERNELS: bool
"""Whether this build has the CUDA kernels (built where nvcc was found)."""

def driver_available() -> bool:
    """Return whether libcuda.so.1 loads and has every function that reshard needs. Initialises nothing."""

# Copy tables (csrc/copy_bindings.cpp)

def check_records(table: CopyTable) -> None:
    """Raise ValueError for the first record with bad extents, strides, types or addresses, or one that overlaps itself."""

def find_overlap(table: CopyTable) -> tuple[int, int, bool] | None:
    """Find two boxes that share a byte, as ``(first record, second record, with_source)``; None when there are none.

    ``with_source`` False: both destinations hold the byte (the same record twice: its own destination names it twice).
    True: the first one's source and the second one's destination. Exact for strides that come from tensors.
    """

def copy_host(table: CopyTable, num_threads: int = 0) -> None:
    """Run every record on host memory and return when all is written. Releases the GIL.

    Args:
        table: records in any order of execution; the caller has checked bounds and overlaps (``make_table`` does).
        num_threads: 0 for all cores that this process may use; small tables use fewer. 1 starts no thread.
    """

def checksum_host(table: CopyTable, *, of_destination: bool, num_threads: int = 0) -> list[int]:
    """Return a 64-bit checksum per record: of the destination, or of what a copy would write there. Releases the GIL.

    Both are equal after a copy; equal for the same elements in the same row-major order, whatever their strides.
    """
