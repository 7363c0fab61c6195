// Execution of a copy table on host memory.
#pragma once

#include <cstdint>
#include <vector>

#include "copy_table.h"

namespace reshard {

// Runs every record, on up to num_threads threads (0: as many as this process may use); returns when all is written.
// Pieces are balanced by bytes, so one large record or thousands of small ones use every thread. Records may run in
// any order: overlaps between them are the caller's mistake. Throws std::invalid_argument for a malformed record,
// before anything is written.
void copy_host(Table table, int num_threads);

// One checksum per record (see mix_word): of the destination's bytes, or of what a copy would write there, which is the
// source's bytes after the cast. Words are elements in the record's row-major order; an element longer than 8 bytes is
// several words.
std::vector<std::uint64_t> checksum_host(Table table, bool of_destination, int num_threads);

}  // namespace reshard
