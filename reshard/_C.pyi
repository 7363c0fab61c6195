"""The boundary between Python and csrc/: what ``reshard._C`` holds. Nothing here imports torch or initialises a device.

Addresses are absolute, as integers; whoever owns the memory keeps it alive until the call, or the stream's work, is
done. Malformed arguments raise ValueError. A ``table`` is a contiguous 1-d array of ``reshard.table.COPY_RECORD``.
"""

from reshard.quant import QuantTable
from reshard.table import CopyTable, Integers

CUDA_KERNELS: bool
"""Whether this build has the CUDA kernels (built where nvcc was found)."""

def driver_available() -> bool:
    """Return whether libcuda.so.1 loads and has every function that reshard needs. Initialises nothing."""

# Copy tables (csrc/copy_bindings.cpp)

def check_records(table: CopyTable) -> None:
    """Raise ValueError for the first record with bad extents, strides, types or addresses, a self-overlap, or followers
    that don't read what it reads.
    """

def find_overlap(table: CopyTable) -> tuple[int, int, bool] | None:
    """Find two boxes that share a byte, as ``(first record, second record, with_source)``; None when there are none.

    ``with_source`` False: both destinations hold the byte (the same record twice: its own destination names it twice).
    True: the first one's source and the second one's destination. Exact for strides that come from tensors.
    """

def build_table(
    src: Integers,
    dst: Integers,
    first_dims: Integers,
    extents: Integers,
    src_strides: Integers,
    dst_strides: Integers,
    src_dtypes: Integers,
    dst_dtypes: Integers,
    itemsizes: Integers,
    *,
    max_targets: int,
) -> tuple[bytearray, bytearray]:
    """Build the records of ``make_table``, which checks the columns first; contiguous int64 arrays.

    Args:
        src, dst: absolute addresses, one a copy.
        first_dims: where each copy's dimensions begin in the flat columns, and their number at the end.
        extents, src_strides, dst_strides: flat columns; strides in elements.
        src_dtypes, dst_dtypes: codes, one a copy.
        itemsizes: bytes, by code.
        max_targets: destinations of a fan at most.

    Returns:
        The bytes of the records, and of the int64 number of the copy that each record belongs to.
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

def _run_tiles_on_host(
    table: CopyTable, *, tile_vectors: int = 1024, wide_casts: bool = True, max_vectors: int = 1073741824
) -> None:
    """Run ``table`` on host memory by the device's own cutting and index arithmetic, slowly. For tests."""

def _checksum_tiles_on_host(table: CopyTable, *, of_destination: bool, max_vectors: int = 1073741824) -> list[int]:
    """Return the checksums of ``table`` on host memory as the device computes them. For tests."""

class DeviceTable:
    """A copy table on a CUDA device: planned and uploaded once, launched any number of times. Where CUDA_KERNELS only.

    Sources and destinations are memory that the device can address: its own, a peer's that is mapped, or pinned host
    memory. A cast needs elements aligned to their own size. Dropping the last reference frees the device memory;
    wait for queued launches first.
    """

    def __init__(
        self,
        table: CopyTable,
        *,
        device: int = -1,
        tile_vectors: int = 1024,
        wide_casts: bool = True,
        vectors_in_flight: int = 4,
        blocks_per_sm: int = 0,
        copy_engine_min_bytes: int = 0,
    ) -> None:
        """Check, plan and upload ``table``. Blocks; not inside a graph capture.

        Args:
            table: what to copy; addresses are kept, memory is borrowed.
            device: CUDA ordinal; -1 is the device of the calling thread's current context.
            tile_vectors: vectors (mostly 16 bytes) that a thread block takes at a time.
            wide_casts: eight elements a thread and step for float32 to a 16-bit type, instead of four.
            vectors_in_flight: loads that each thread issues before its first store, 1, 2 or 4.
            blocks_per_sm: thread blocks per multiprocessor that take tiles in turn, 0 for one block a tile.
            copy_engine_min_bytes: plain contiguous copies of so many bytes or more are cudaMemcpyBatchAsync calls, on
                the copy engines, instead of part of the kernel; 0 for none.

        Raises:
            ValueError: a malformed record or option.
            RuntimeError: no driver, or a CUDA call failed; the message has CUDA's error.
        """

    def launch(self, stream: int) -> None:
        """Queue one run on ``stream`` (a raw cudaStream_t of this device). Neither blocks nor allocates; capturable."""

    def launch_checksum(self, stream: int, sums: int, *, of_destination: bool) -> None:
        """Queue the 64-bit checksums of all records, as ``checksum_host`` defines them; capturable.

        Args:
            stream: raw cudaStream_t of this device.
            sums: address of ``num_records`` 8-byte words that the device can write; they are overwritten.
            of_destination: of the destinations as they are, or of what a run would write there.
        """

    @property
    def device(self) -> int:
        """CUDA ordinal of the device that runs the table."""

    @property
    def num_records(self) -> int:
        """Records in the table."""

    @property
    def num_tiles(self) -> int:
        """Tiles that they were cut into."""

    @property
    def num_launches(self) -> int:
        """Kernel launches and batched copy calls of one run: at most 3."""

    @property
    def device_bytes(self) -> int:
        """Device memory that the table holds."""

# Quantising copies (csrc/quant_bindings.cpp); a ``table`` is an array of ``reshard.quant.QUANT_RECORD``.

def quantize_host(table: QuantTable, num_threads: int = 0) -> None:
    """Run every record on host memory and return when all is written. Releases the GIL; 0 threads for all cores."""

class QuantDeviceTable:
    """A quantising table on a CUDA device: uploaded once, launched any number of times. Where CUDA_KERNELS only."""

    def __init__(self, table: QuantTable, *, device: int = -1) -> None:
        """Check and upload ``table``. Blocks; not inside a graph capture.

        Args:
            table: addresses are kept, memory is borrowed.
            device: CUDA ordinal; -1 is the device of the calling thread's current context.

        Raises:
            ValueError: a malformed record.
            RuntimeError: no driver, or a CUDA call failed; the message has CUDA's error.
        """

    def launch(self, stream: int) -> None:
        """Queue one run on ``stream`` (a raw cudaStream_t of this device). Neither blocks nor allocates; capturable."""

    @property
    def device(self) -> int:
        """CUDA ordinal of the device that runs the table."""

    @property
    def num_launches(self) -> int:
        """Kernel launches of one run: mostly 1, at most 4, 0 for an empty table."""

    @property
    def device_bytes(self) -> int:
        """Device memory that the table holds."""

# Arena (csrc/arena_bindings.cpp). Everything here releases the GIL and is safe from any thread. OutOfMemory,
# StateError and
# DeviceError are those of reshard.errors; a DeviceError has the call and the driver's own name of the error in its
# message.

class MemoryDriver:
    """Address space, physical chunks and mappings of one device, or of the host."""

    @property
    def device(self) -> int:
        """CUDA ordinal, or -1 for the host."""
    @property
    def granularity_bytes(self) -> int:
        """Sizes of chunks are multiples of it."""

class FaultInjector(MemoryDriver):
    """A driver whose calls fail on demand, for tests of what the arena promises."""

    def __init__(self, inner: MemoryDriver) -> None: ...
    def arm(self, call: str, *, countdown: int = 1, kind: str = "device", num_times: int = 1) -> None:
        """Let call number ``countdown`` from now of that name (see csrc/arena_driver.h) fail, and those after it.

        Args:
            call: reserve, unreserve, create, destroy, map, allow, unmap, export_descriptor, import_descriptor, fill or
                synchronize.
            countdown: 1 is the next one.
            kind: ``memory`` (OutOfMemory) or ``device`` (DeviceError).
            num_times: how many calls in a row fail.
        """

def host_driver() -> MemoryDriver:
    """Memory files and mmap."""

def cuda_driver(device: int) -> MemoryDriver:
    """The driver API's virtual memory management, in the device's primary context. DeviceError where there is none."""

class RegionInfo:
    """What is known of a region at one moment."""

    id: int
    name: str
    group: str
    address: int
    num_bytes: int
    num_chunks: int
    generation: int
    num_views: int
    num_pins: int
    @property
    def state(self) -> str:
        """RESERVED, BACKED or RELEASED."""

class ArenaCounters:
    """See reshard.arena.ArenaStats; ``num_allows`` counts the calls that open a run of mapped chunks."""

    created_bytes: int
    free_bytes: int
    backed_bytes: int
    reserved_bytes: int
    peak_created_bytes: int
    num_chunks: int
    num_regions: int
    num_creates: int
    num_destroys: int
    num_maps: int
    num_unmaps: int
    num_allows: int

class TransitionReport:
    """See reshard.arena.HandoverReport."""

    released_bytes: int
    backed_bytes: int
    num_creates: int
    num_destroys: int
    num_maps: int
    num_unmaps: int
    elapsed_us: float
    synchronize_us: float
    create_us: float
    map_us: float
    allow_us: float
    unmap_us: float

class ArenaCore:
    """The books of an arena and its one change of state; see reshard.arena.Arena for the contract of each method."""

    def __init__(
        self,
        driver: MemoryDriver,
        *,
        chunk_classes: list[int],
        budget_bytes: int | None,
        keep_mappings: bool,
        poison: bool,
    ) -> None: ...
    @property
    def driver(self) -> MemoryDriver:
        """The driver it was made with."""
    def reserve(self, name: str, num_bytes: int, group: str) -> int:
        """Return the id of a new RESERVED region."""
    def free(self, regions: list[int]) -> None:
        """Free all or, with StateError, none."""
    def transition(self, release: list[int], back: list[int]) -> TransitionReport:
        """Release and back regions in one step."""
    def trim(self, keep_free_bytes: int) -> int:
        """Destroy free chunks; return the bytes given back."""
    def close(self) -> None:
        """Free all regions and destroy all chunks."""
    def export_region(self, region: int) -> list[tuple[int, int]]:
        """Return (file descriptor, bytes) of each chunk in address order and pin the region; the caller closes them."""
    def unpin(self, region: int) -> None:
        """Undo one export_region."""
    def set_group_budget(self, group: str, num_bytes: int) -> None:
        """Limit a group's BACKED bytes."""
    def info(self, region: int) -> RegionInfo:
        """StateError for a region that was freed."""
    def regions(self, group: str | None) -> list[int]:
        """Ids in the order of making."""
    def region_at(self, address: int) -> int | None:
        """The region that holds it."""
    def chunk_sizes(self) -> list[tuple[int, int]]:
        """Pairs of (bytes, how many), largest first."""
    def counters(self) -> ArenaCounters:
        """The account now."""
    def check(self) -> str:
        """What is inconsistent in the books; empty when nothing is."""
    def dlpack(self, region: int, versioned: bool) -> object:
        """A capsule of the region as a uint8 vector; counts as a view until its consumer drops it."""

class ImportedCore:
    """Chunks of another arena, mapped at addresses of this process."""

    def __init__(self, driver: MemoryDriver, descriptors: list[int], chunk_bytes: list[int]) -> None: ...
    @property
    def address(self) -> int:
        """First byte."""
    @property
    def num_bytes(self) -> int:
        """Sum of the chunks."""
    @property
    def is_open(self) -> bool:
        """False once closed."""
    @property
    def num_views(self) -> int:
        """DLPack views alive."""
    def close(self) -> None:
        """Unmap; StateError where views are alive."""
    def dlpack(self, versioned: bool) -> object:
        """As ArenaCore.dlpack."""

class TorchSlotInfo:
    """What PyTorch has asked of one slot."""

    num_allocs: int
    num_frees: int
    last_error: str

NUM_TORCH_SLOTS: int
"""How many pairs of symbols ``reshard_arena_alloc_<slot>``, ``reshard_arena_free_<slot>`` this module exports."""

def claim_torch_slot(arena: ArenaCore, group: str) -> int:
    """Bind the next free slot to an arena and group; StateError when all are taken."""

def retire_torch_slot(slot: int) -> None:
    """Say that no pool allocates by the slot any more: free memory goes back to the device, now and after each segment
    that PyTorch still frees; after the last the slot can be claimed again.
    """

def torch_slot_info(slot: int) -> TorchSlotInfo:
    """Counts of a slot and why its last failing call failed."""

# Memory of other allocators (csrc/ipc.cpp); the errors are those of the arena.

def ipc_export(address: int) -> tuple[bytes, int, int]:
    """Return the CUDA IPC handle, the first byte and the size of the device allocation that ``address`` lies in.

    StateError for host memory and for device memory that has no such handle; see ``reshard.arena.ipc``.
    """

def ipc_num_open() -> int:
    """Return how many allocations of other processes this process has open."""

class IpcMapping:
    """Another process's allocation, opened by its handle: once per process and device, whatever the number of these."""

    def __init__(self, handle: bytes, *, num_bytes: int, device: int) -> None: ...
    @property
    def address(self) -> int:
        """First byte, in this process."""
    @property
    def num_bytes(self) -> int:
        """As it was given."""
    @property
    def is_open(self) -> bool:
        """False once closed."""
    def close(self) -> None:
        """Drop it; waits for the device and unmaps where it is the last. StateError where views are alive."""
    def dlpack(self, versioned: bool) -> object:
        """As ArenaCore.dlpack."""

def counter_load(address: int) -> int:
    """Value of the 4-byte counter at `address` (shared memory, multiple of 4); acquires what its writer wrote
    before.
    """

def counter_store(address: int, value: int) -> None:
    """Store into a counter, releasing this thread's earlier writes, and wake whoever waits for it in any process."""

def counters_wait(addresses: list[int], target: int, seconds: float) -> int:
    """Wait until every counter is at least `target`; -1 then, else the position of the first that was not in time.

    `seconds` is the limit for all of them together. Releases the GIL.
    """
