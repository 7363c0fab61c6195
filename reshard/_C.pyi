"""The boundary between Python and csrc/: what ``reshard._C`` holds. Nothing here imports torch or initialises a device.

Addresses are absolute, as integers; whoever owns the memory keeps it alive until the call, or the stream's work, is done.
"""

CUDA_KERNELS: bool
"""Whether this build has the CUDA kernels (built where nvcc was found)."""

def driver_available() -> bool:
    """Return whether libcuda.so.1 loads and has every function that reshard needs. Initialises nothing."""
