// Innermost loops of the host copy: one row of elements from source to destination.
#pragma once

#include <cstdint>

#include "copy_table.h"

namespace reshard {

// Copies `count` elements; strides are in bytes. Rows that an implementation takes for contiguous ignore the strides.
using RowCopy = void (*)(const unsigned char* src, unsigned char* dst, std::int64_t count, std::int64_t src_stride,
                         std::int64_t dst_stride, std::int64_t itemsize);

// The fastest loop for a well-formed record on this processor. `streaming` writes past the caches, for tables much
// larger than they are; callers then call finish_streaming() on each thread that copied.
RowCopy choose_row_copy(const CopyRecord& record, bool streaming);

void finish_streaming();

#if defined(__x86_64__)
bool has_avx2_f16c();
RowCopy choose_avx2_row_copy(const CopyRecord& record, bool streaming);
#endif

}  // namespace reshard
