"""Element types by name, size and the small code that the compiled copy table shares."""

import enum

from reshard.errors import LayoutError


class DType(enum.Enum):
    """An element type. ``value`` is its name, as torch and safetensors users write it (``torch.`` left out)."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT8_E4M3FN = "float8_e4m3fn"
    FLOAT64 = "float64"
    INT64 = "int64"
    INT32 = "int32"
    INT16 = "int16"
    INT8 = "int8"
    UINT8 = "uint8"
    BOOL = "bool"
    FLOAT8_E5M2 = "float8_e5m2"
    FLOAT8_E8M0FNU = "float8_e8m0fnu"
    UINT16 = "uint16"
    UINT32 = "uint32"
    UINT64 = "uint64"
    COMPLEX64 = "complex64"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self]

    @property
    def code(self) -> int:
        """Number of this type in copy tables, plans and files; never renumbered, new types are appended."""
        return _CODE[self]

    @property
    def is_castable(self) -> bool:
        """Whether a plain rounding cast to and from the other castable types has a defined meaning (no scale
        needed).
        """
        return self in _CASTABLE

    @classmethod
    def parse(cls, text: str) -> "DType":
        """The type called ``text`` (``"bfloat16"`` or ``"torch.bfloat16"``); LayoutError lists the known names."""
        name = text.removeprefix("torch.")
        try:
            return cls(name)
        except ValueError:
            known = ", ".join(dtype.value for dtype in cls)
            raise LayoutError(f"unknown dtype {text!r}: use one of {known}") from None

    @classmethod
    def from_code(cls, code: int) -> "DType":
        """Inverse of ``code``."""
        if not 0 <= code < len(_BY_CODE):
            raise LayoutError(f"unknown dtype code {code}: this version knows 0 to {len(_BY_CODE) - 1}")
        return _BY_CODE[code]


_BY_CODE = tuple(DType)
_CODE = {dtype: code for code, dtype in enumerate(_BY_CODE)}
_ITEMSIZE = {
    DType.FLOAT32: 4,
    DType.BFLOAT16: 2,
    DType.FLOAT16: 2,
    DType.FLOAT8_E4M3FN: 1,
    DType.FLOAT64: 8,
    DType.INT64: 8,
    DType.INT32: 4,
    DType.INT16: 2,
    DType.INT8: 1,
    DType.UINT8: 1,
    DType.BOOL: 1,
    DType.FLOAT8_E5M2: 1,
    DType.FLOAT8_E8M0FNU: 1,
    DType.UINT16: 2,
    DType.UINT32: 4,
    DType.UINT64: 8,
    DType.COMPLEX64: 8,
}
_CASTABLE = frozenset({DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16})
ITEMSIZE_BY_CODE = tuple(_ITEMSIZE[dtype] for dtype in _BY_CODE)
