"""The Triton kernels of ``reshard.triton_copy``: one copies boxes element by element, one copies contiguous rows.

``records`` is the copy table as 64-bit integers, 16 a record, NUM_TARGETS records side by side for every fan; ``tiles``
has three integers a tile: the fan's index, a row, a first element. Words are bits: casts are integer arithmetic, the
same on a device and under the interpreter.
"""

# Triton gives its kernels' parameters their types at compile time.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import triton
import triton.language as tl

# Words of a record, as 64-bit integers.
_SRC, _DST, _EXTENTS, _SRC_STRIDES, _DST_STRIDES, _RECORD = (
    tl.constexpr(0),
    tl.constexpr(1),
    tl.constexpr(2),
    tl.constexpr(6),
    tl.constexpr(10),
    tl.constexpr(16),
)


@triton.jit
def _bf16_from_f32(bits):
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FFF, rounded)


@triton.jit
def _f16_from_f32(bits):
    sign = (bits >> 16) & 0x8000
    magnitude = bits & 0x7FFFFFFF
    normal = (magnitude + 0xFFF + ((magnitude >> 13) & 1) - 0x38000000) >> 13
    # Below 2^-14: round the 24-bit significand, shifted to a multiple of 2^-24, to nearest even.
    exponent = magnitude >> 23
    shift = tl.minimum(tl.maximum(126 - exponent, 1), 31)
    significand = tl.where(exponent > 0, (magnitude & 0x7FFFFF) | 0x800000, 0)
    kept = significand >> shift
    rest = significand - (kept << shift)
    half = 1 << (shift - 1)
    subnormal = kept + tl.where((rest > half) | ((rest == half) & ((kept & 1) == 1)), 1, 0)
    finite = tl.where(magnitude < 0x38800000, subnormal, normal)
    value = sign | tl.where(magnitude >= 0x477FF000, 0x7C00, finite)
    return tl.where(magnitude > 0x7F800000, 0x7FFF, value)


@triton.jit
def _f32_from_f16(half):
    sign = (half & 0x8000) << 16
    magnitude = half & 0x7FFF
    normal = (magnitude << 13) + 0x38000000
    subnormal = (magnitude.to(tl.float32) * 5.9604644775390625e-08).to(tl.int32, bitcast=True)
    finite = tl.where(magnitude >= 0x400, normal, subnormal)
    value = sign | tl.where(magnitude == 0x7C00, 0x7F800000, finite)
    return tl.where(magnitude > 0x7C00, 0x7FFFFFFF, value)


@triton.jit
def _convert(bits, SRC_CODE: tl.constexpr, DST_CODE: tl.constexpr):
    """Bits of one type to bits of another; 0 is float32, 1 bfloat16, 2 float16; 32-bit integers on both sides."""
    if SRC_CODE == 0:
        wide = bits
    elif SRC_CODE == 1:
        wide = (bits & 0xFFFF) << 16
    else:
        wide = _f32_from_f16(bits & 0xFFFF)
    if DST_CODE == 0:
        return wide
    elif DST_CODE == 1:
        return _bf16_from_f32(wide)
    else:
        return _f16_from_f32(wide)


@triton.jit
def cast_words(bits, SRC_CODE: tl.constexpr, DST_CODE: tl.constexpr, DST_WORD: tl.constexpr):
    """Words as loaded to words as stored."""
    if SRC_CODE == DST_CODE:
        return bits
    else:
        return _convert(bits.to(tl.int32), SRC_CODE, DST_CODE).to(DST_WORD)


@triton.jit
def row_offset(row, record, STRIDES: tl.constexpr):
    """Bytes from a record's first row to row number ``row``, by one side's strides."""
    extent1 = tl.load(record + _EXTENTS + 1)
    extent2 = tl.load(record + _EXTENTS + 2)
    plane = row // extent2
    index0 = plane // extent1
    index1 = plane - index0 * extent1
    index2 = row - plane * extent2
    offset = index0 * tl.load(record + STRIDES) + index1 * tl.load(record + STRIDES + 1)
    return offset + index2 * tl.load(record + STRIDES + 2)


@triton.jit
def _row_of_target(record, row, DST_WORD: tl.constexpr):
    """Pointer to the first element of a record's destination row."""
    return (tl.load(record + _DST) + row_offset(row, record, _DST_STRIDES)).to(tl.pointer_type(DST_WORD))


@triton.jit
def box_kernel(
    records,
    tiles,
    SRC_WORD: tl.constexpr,
    DST_WORD: tl.constexpr,
    SRC_CODE: tl.constexpr,
    DST_CODE: tl.constexpr,
    ALIGNED: tl.constexpr,
    NUM_TARGETS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS_PER_TILE: tl.constexpr,
):
    """One tile: consecutive elements of one record, each with an address of its own."""
    tile = tl.program_id(0).to(tl.int64)
    record = records + tl.load(tiles + 3 * tile) * (_RECORD * NUM_TARGETS)
    first = tl.load(tiles + 3 * tile + 2)
    extent1 = tl.load(record + _EXTENTS + 1)
    extent2 = tl.load(record + _EXTENTS + 2)
    extent3 = tl.load(record + _EXTENTS + 3)
    count = tl.load(record + _EXTENTS) * extent1 * extent2 * extent3
    for block in range(BLOCKS_PER_TILE):
        element = first + block * BLOCK + tl.arange(0, BLOCK)
        row = element // extent3
        index3 = element - row * extent3
        src_at = tl.load(record + _SRC) + row_offset(row, record, _SRC_STRIDES)
        src_at += index3 * tl.load(record + _SRC_STRIDES + 3)
        inside = element < count
        bits = cast_words(tl.load(src_at.to(tl.pointer_type(SRC_WORD)), mask=inside), SRC_CODE, DST_CODE, DST_WORD)
        for target in tl.static_range(NUM_TARGETS):
            other = record + target * _RECORD
            dst_at = tl.load(other + _DST) + row_offset(row, other, _DST_STRIDES)
            dst_at += index3 * tl.load(other + _DST_STRIDES + 3)
            tl.store(dst_at.to(tl.pointer_type(DST_WORD)), bits, mask=inside)


@triton.jit
def row_kernel(
    records,
    tiles,
    SRC_WORD: tl.constexpr,
    DST_WORD: tl.constexpr,
    SRC_CODE: tl.constexpr,
    DST_CODE: tl.constexpr,
    ALIGNED: tl.constexpr,
    NUM_TARGETS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS_PER_TILE: tl.constexpr,
):
    """One tile: a segment of one contiguous row; where ALIGNED, rows begin at multiples of 16 bytes on both sides."""
    tile = tl.program_id(0).to(tl.int64)
    record = records + tl.load(tiles + 3 * tile) * (_RECORD * NUM_TARGETS)
    row = tl.load(tiles + 3 * tile + 1)
    first = tl.load(tiles + 3 * tile + 2)
    extent3 = tl.load(record + _EXTENTS + 3)
    src = (tl.load(record + _SRC) + row_offset(row, record, _SRC_STRIDES)).to(tl.pointer_type(SRC_WORD)) + first
    dst = _row_of_target(record, row, DST_WORD) + first
    if first + BLOCK * BLOCKS_PER_TILE <= extent3:
        for block in range(BLOCKS_PER_TILE):
            column = block * BLOCK + tl.arange(0, BLOCK)
            sources = src + column
            targets = dst + column
            if ALIGNED:
                sources = tl.multiple_of(sources, 16)
                targets = tl.multiple_of(targets, 16)
            bits = cast_words(tl.load(sources), SRC_CODE, DST_CODE, DST_WORD)
            tl.store(targets, bits)
            for target in tl.static_range(1, NUM_TARGETS):
                targets = _row_of_target(record + target * _RECORD, row, DST_WORD) + first + column
                if ALIGNED:
                    targets = tl.multiple_of(targets, 16)
                tl.store(targets, bits)
    else:
        for block in range(BLOCKS_PER_TILE):
            column = block * BLOCK + tl.arange(0, BLOCK)
            inside = first + column < extent3
            bits = cast_words(tl.load(src + column, mask=inside), SRC_CODE, DST_CODE, DST_WORD)
            tl.store(dst + column, bits, mask=inside)
            for target in tl.static_range(1, NUM_TARGETS):
                targets = _row_of_target(record + target * _RECORD, row, DST_WORD) + first + column
                tl.store(targets, bits, mask=inside)
