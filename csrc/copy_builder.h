// From what a caller wants copied to the records of a table: dimensions merged and ordered, equal sources gathered.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "copy_table.h"

namespace reshard {

// Copies of boxes of any number of dimensions, in columns. Copy i has the dimensions [first_dims[i], first_dims[i + 1])
// of the flat columns; extents and strides (in elements) are at least 0, and the types have a cast or are equal.
struct CopyColumns {
    std::span<const std::int64_t> src, dst;  // absolute addresses
    std::span<const std::int64_t> first_dims;
    std::span<const std::int64_t> extents, src_strides, dst_strides;
    std::span<const std::int64_t> src_dtypes, dst_dtypes;  // codes
    std::span<const std::int64_t> itemsizes;               // bytes, by code

    std::size_t num_copies() const { return src.size(); }
};

struct BuiltTable {
    std::vector<CopyRecord> records;
    std::vector<std::int64_t> owners;  // the copy that each record is (a part) of
};

// Dimensions of extent 1 go, the rest are ordered so that the innermost has the smallest destination stride, neighbours
// that form one run are merged, and a box that still has more than four is split over its smallest ones. Empty copies
// leave no record. Copies of one source box by the same cast, to destinations that can be written in the same way, are
// gathered into fans of at most `max_targets` (1: none), at the place of the first. Throws std::invalid_argument for
// columns of different lengths.
BuiltTable build_table(const CopyColumns& columns, int max_targets);

}  // namespace reshard
