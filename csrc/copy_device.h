// Execution of a copy table on a CUDA device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "copy_table.h"
#include "copy_tiles.h"

namespace reshard {

struct DeviceOptions {
    int device = -1;  // CUDA ordinal; -1 is the device of the calling thread's current context, or 0 without one
    TileOptions tiles;
    int vectors_in_flight = 4;  // loads that each thread issues before its first store: 1, 2 or 4
    int blocks_per_sm = 0;      // 0 is one block a tile, which keeps accesses near each other in time and place
    // Plain contiguous copies of at least so many bytes go through cudaMemcpyBatchAsync instead of the kernel; 0 is
    // never, which measured fastest on an H200 (see docs/benchmarks).
    std::uint64_t copy_engine_min_bytes = 0;
};

struct KernelTable;

struct FreeOnDevice {
    void operator()(void* memory) const;
};

// A copy table in device memory: planned and uploaded by the constructor, launched any number of times.
class DeviceTable {
  public:
    // Throws std::invalid_argument for a malformed table, std::runtime_error with CUDA's words for a failed call.
    DeviceTable(Table table, const DeviceOptions& options);

    // Queues one run on a stream (a cudaStream_t as an integer, of this table's device). Doesn't allocate, synchronise
    // or block, and can be captured in a graph.
    void launch(std::uint64_t stream) const;

    // Queues the checksums of all records (see checksum_host): num_records() words at address `sums` in memory that the
    // device can write, set to zero first. Source checksums are those of what a run would write. Can be captured too.
    void launch_checksum(std::uint64_t stream, std::uint64_t sums, bool of_destination) const;

    int device() const { return device_; }
    std::size_t num_records() const { return num_records_; }
    std::size_t num_tiles() const { return num_tiles_; }
    std::size_t device_bytes() const { return device_bytes_; }
    int num_launches() const {
        return (num_row_tiles_ > 0) + (num_kernel_tiles_ > num_row_tiles_) + (plain_.empty() ? 0 : 1);
    }

  private:
    struct PlainCopy {
        std::uint64_t src, dst, num_bytes;
    };

    void upload(const TilePlan& plan);
    KernelTable kernel_table(std::uint32_t first_tile, std::uint32_t end_tile) const;
    void launch_plain(std::uint64_t stream) const;
    void launch_batch(std::uint64_t stream) const;

    DeviceOptions options_;
    int device_ = 0;
    std::size_t num_records_ = 0;
    std::uint32_t num_row_tiles_ = 0;     // those that the kernel for wide rows runs: the first ones
    std::uint32_t num_kernel_tiles_ = 0;  // those and the ones that the other kernel runs, which come next
    std::uint32_t num_tiles_ = 0;         // of all records, for checksums
    std::size_t device_bytes_ = 0;
    unsigned row_blocks_ = 0;
    unsigned box_blocks_ = 0;
    unsigned checksum_blocks_ = 0;
    std::size_t records_bytes_ = 0;
    std::size_t targets_bytes_ = 0;
    std::unique_ptr<void, FreeOnDevice> memory_;  // records, further targets, then the record number of every tile
    std::vector<PlainCopy> plain_;
};

}  // namespace reshard
