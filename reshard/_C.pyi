"""The boundary between Python and csrc/: what ``reshard._C`` holds. Nothing here imports torch or initialises a device.

Addresses are absolute, as integers; whoever owns the memory keeps it alive until the call, or the stream's work, is done.
"""

CUDA_KERNELS: bool
"""Whether this build has the CUDA kernels (built where nvcc was found)."""

def driver_available() -> bool:
    """Return whether libcuda.so.1 loads and has every function that reshard needs. Initialises nothing."""

def counter_load(address: int) -> int:
    """Value of the 4-byte counter at `address` (shared memory, multiple of 4); acquires what its writer wrote before storing it."""

def counter_store(address: int, value: int) -> None:
    """Store into a counter, releasing this thread's earlier writes, and wake whoever waits for it in any process."""

def counters_wait(addresses: list[int], target: int, seconds: float) -> int:
    """Wait until every counter is at least `target`; -1 then, else the position of the first that was not when `seconds` had passed. Releases the GIL."""
