// The copy table: one 128-byte record per strided copy. reshard/table.py builds it (COPY_RECORD is this struct).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace reshard {

inline constexpr int kNumDims = 4;
inline constexpr int kMaxTargets = 8;  // destinations that one read of a source box may serve

// Element types that have a cast; the codes are those of reshard.dtype.DType. Others are copied as plain bytes.
inline constexpr std::uint8_t kFloat32 = 0;
inline constexpr std::uint8_t kBFloat16 = 1;
inline constexpr std::uint8_t kFloat16 = 2;

// A box of extents[0] x ... x extents[3] elements, row-major, the last dimension innermost. Strides are in bytes;
// extents are at least 1. Source and destination don't overlap.
//
// Note "fans". One source box that goes to several destinations is as many records, each complete in itself, side by
// side: the first one, the head, says how many followers it has, and they agree with it in all but dst and dst_strides.
// An executor may read the box once, at the head, and write it to all of them, or take each record for itself.
struct CopyRecord {
    std::uint64_t src;
    std::uint64_t dst;
    std::int64_t extents[kNumDims];
    std::int64_t src_strides[kNumDims];
    std::int64_t dst_strides[kNumDims];
    std::uint8_t src_dtype;
    std::uint8_t dst_dtype;
    std::uint16_t src_itemsize;
    std::uint16_t dst_itemsize;
    std::uint16_t num_followers;
    std::uint64_t reserved;

    std::int64_t num_elements() const { return extents[0] * extents[1] * extents[2] * extents[3]; }
    bool is_cast() const { return src_dtype != dst_dtype; }
    int num_targets() const { return 1 + num_followers; }
    bool has_contiguous_rows() const {
        return extents[3] == 1 || (src_strides[3] == src_itemsize && dst_strides[3] == dst_itemsize);
    }
};

static_assert(sizeof(CopyRecord) == 128 && alignof(CopyRecord) == 8);
static_assert(offsetof(CopyRecord, extents) == 16 && offsetof(CopyRecord, src_strides) == 48);
static_assert(offsetof(CopyRecord, dst_strides) == 80 && offsetof(CopyRecord, src_dtype) == 112);
static_assert(offsetof(CopyRecord, src_itemsize) == 114 && offsetof(CopyRecord, dst_itemsize) == 116);
static_assert(offsetof(CopyRecord, num_followers) == 118 && offsetof(CopyRecord, reserved) == 120);

using Table = std::span<const CopyRecord>;

// Throws std::invalid_argument, naming the record and what is wrong, unless every record is well formed: extents at
// least 1, strides at least 0, a known cast or equal types, a source that doesn't overlap its own destination, and
// followers (below kMaxTargets) that are there and read what their head reads.
void check_records(Table table);

// The positions of all records that follow no other: heads of fans, and records on their own.
std::vector<std::uint32_t> fan_heads(Table table);

// Two boxes that share a byte: the destinations of `first` and `second`, or (with_source) the source of `first` and
// the destination of `second`. first == second means that one destination names a byte twice, or meets its own source.
struct Overlap {
    std::size_t first;
    std::size_t second;
    bool with_source;
};

// Exact for boxes whose strides come from tensors. A pair whose disjointness would take very long to prove counts as
// an overlap. About n log n; the records must be well formed apart from overlaps.
std::optional<Overlap> find_overlap(Table table);

}  // namespace reshard
