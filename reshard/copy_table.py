"""CopyTable: the copies of a plan in columns, one row a copy."""

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reshard.dtype import ITEMSIZE_BY_CODE
from reshard.pattern import IntArray

ITEMSIZES = np.array(ITEMSIZE_BY_CODE, np.int64)
Int32Array = npt.NDArray[np.int32]
ByteArray = npt.NDArray[np.uint8]
COLUMN_TYPES: dict[str, str] = {
    "name_idx": "<i4",
    "ndim": "|u1",
    "src_rank": "<i4",
    "dst_rank": "<i4",
    "hop": "|u1",
    "alias": "|u1",
    "start": "<i8",
    "stop": "<i8",
    "src_storage": "<i4",
    "src_offset": "<i8",
    "src_strides": "<i8",
    "src_dtype": "|u1",
    "dst_storage": "<i4",
    "dst_offset": "<i8",
    "dst_strides": "<i8",
    "dst_dtype": "|u1",
    "wire_dtype": "|u1",
}
WIDE_COLUMNS = frozenset({"start", "stop", "src_strides", "dst_strides"})


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CopyTable:
    """Columns of ``num`` copies. Wide columns are [num, max ndim]; what is beyond a row's own ``ndim`` is 0.

    ``name_idx`` and the storages index ``names`` and ``storages``. Offsets are bytes, strides elements, dtypes codes.
    """

    names: tuple[str, ...]
    storages: tuple[str, ...]
    name_idx: Int32Array
    ndim: ByteArray
    src_rank: Int32Array
    dst_rank: Int32Array
    hop: ByteArray
    alias: ByteArray
    start: IntArray
    stop: IntArray
    src_storage: Int32Array
    src_offset: IntArray
    src_strides: IntArray
    src_dtype: ByteArray
    dst_storage: Int32Array
    dst_offset: IntArray
    dst_strides: IntArray
    dst_dtype: ByteArray
    wire_dtype: ByteArray

    def __post_init__(self) -> None:
        for column, array in self.columns().items():
            if len(array) != self.num or array.dtype != np.dtype(COLUMN_TYPES[column]):
                raise AssertionError(f"column {column}: {array.dtype}[{len(array)}], expected {self.num} rows")
            array.setflags(write=False)

    def columns(self) -> dict[str, npt.NDArray[np.generic]]:
        """Every column by name, in a fixed order."""
        return {
            "name_idx": self.name_idx,
            "ndim": self.ndim,
            "src_rank": self.src_rank,
            "dst_rank": self.dst_rank,
            "hop": self.hop,
            "alias": self.alias,
            "start": self.start,
            "stop": self.stop,
            "src_storage": self.src_storage,
            "src_offset": self.src_offset,
            "src_strides": self.src_strides,
            "src_dtype": self.src_dtype,
            "dst_storage": self.dst_storage,
            "dst_offset": self.dst_offset,
            "dst_strides": self.dst_strides,
            "dst_dtype": self.dst_dtype,
            "wire_dtype": self.wire_dtype,
        }

    @property
    def num(self) -> int:
        """Number of copies."""
        return len(self.name_idx)

    @property
    def numel(self) -> IntArray:
        """Elements per copy."""
        extents = self.stop - self.start
        inside = np.arange(extents.shape[1]) < self.ndim[:, None]
        found: IntArray = np.where(inside, extents, 1).prod(axis=1, dtype=np.int64)
        return found

    @property
    def written_bytes(self) -> IntArray:
        """Bytes written per copy; an alias writes none."""
        written: IntArray = self.numel * ITEMSIZES[self.dst_dtype] * (1 - self.alias.astype(np.int64))
        return written

    @property
    def moved_bytes(self) -> IntArray:
        """Bytes per copy that cross from rank to rank, of the wire type; 0 for local copies."""
        moved: IntArray = self.numel * ITEMSIZES[self.wire_dtype] * (self.src_rank != self.dst_rank)
        return moved

    def digest(self) -> str:
        """SHA-256 over every column and name, as hex."""
        whole = hashlib.sha256(repr((self.names, self.storages)).encode())
        for name, array in self.columns().items():
            whole.update(f"\n{name}{array.shape}".encode())
            whole.update(np.ascontiguousarray(array).tobytes())
        return whole.hexdigest()
