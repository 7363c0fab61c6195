// Quantising copies whose groups pass through shared memory: read once, by 16-byte accesses.
#pragma once

#include <cuda_pipeline_primitives.h>

#include "quant_values.cuh"

namespace reshard {

// Note "units". A block of threads takes one unit: a group of 128 x 128, or a few rows. It brings it into shared memory
// (cp.async), looks for the largest magnitudes there, and writes it quantised. A thread works on those 16-byte chunks
// that it brought itself, so only the largest magnitude crosses threads, by one barrier. Several blocks on each
// multiprocessor keep memory busy while others calculate; a block for every unit, in order, keeps accesses near each
// other, which measured better than blocks that stay and fetch ahead.
struct UnitRecord {
    std::uint64_t src, dst, scale;
    std::int64_t src_stride, dst_stride;  // bytes from row to row
    std::int64_t scale_strides[2];
    std::uint32_t rows, row_chunks;
    std::uint32_t first_unit;
    std::uint32_t units_across;
    std::uint16_t unit_rows;
    std::uint16_t lane_bits;            // 2^lane_bits threads stand side by side in a row
    std::uint16_t row_step, lane_step;  // from one chunk of a thread to its next: one of them is 0
    std::uint16_t num_chunks;           // of a thread
    std::uint16_t group_warps;          // warps that share one scale; a power of two
    std::uint8_t src_dtype;
    QuantMode mode;
    std::uint8_t through_bf16;
    std::uint8_t full_division;
};

struct UnitTable {
    const UnitRecord* records;
    const std::uint32_t* unit_records;  // the record of every unit
    std::uint32_t first_unit;           // of this launch
};

inline constexpr int kChunkBytes = 16;
inline constexpr int kMaxUnitWarps = 16;

// Where this thread's chunks lie, one after the other: row and column (in chunks).
struct Walk {
    std::uint32_t row, column;

    __device__ Walk(const UnitRecord& record, std::uint32_t down, std::uint32_t across)
        : row(down * record.unit_rows + (threadIdx.x >> record.lane_bits)),
          column((across << record.lane_bits) + (threadIdx.x & ((1u << record.lane_bits) - 1))) {}

    // Calls visit(number of the chunk) for those inside the matrix.
    template <typename Visit>
    __device__ __forceinline__ void for_each(const UnitRecord& record, Visit visit) const {
        const std::uint32_t rows = record.rows, row_chunks = record.row_chunks;
        const std::uint32_t row_step = record.row_step, lane_step = record.lane_step;
        const int num_chunks = record.num_chunks;
#pragma unroll 4
        for (int i = 0; i < num_chunks; ++i)
            if (row + i * row_step < rows && column + i * lane_step < row_chunks) visit(i);
    }
};

__device__ __forceinline__ void bring(const UnitRecord& record, const Walk& walk, char* slots) {
    const char* at = reinterpret_cast<const char*>(record.src) + walk.row * record.src_stride +
                     std::int64_t{walk.column} * kChunkBytes;
    const std::int64_t step = record.row_step * record.src_stride + record.lane_step * kChunkBytes;
    const std::uint32_t slot_bytes = blockDim.x * kChunkBytes;
    walk.for_each(record, [&](int i) { __pipeline_memcpy_async(slots + i * slot_bytes, at + i * step, kChunkBytes); });
    __pipeline_commit();
    __pipeline_wait_prior(0);
}

// The largest magnitude of all warps that share this one's scale.
__device__ __forceinline__ std::uint32_t group_amax(std::uint32_t amax, std::uint32_t group_warps) {
    __shared__ std::uint32_t amax_of_warp[kMaxUnitWarps];
    amax = __reduce_max_sync(0xffffffffu, amax);
    if (group_warps == 1) return amax;
    const std::uint32_t warp = threadIdx.x / 32;
    if (threadIdx.x % 32 == 0) amax_of_warp[warp] = amax;
    __syncthreads();
    const std::uint32_t first = warp & ~(group_warps - 1);
    for (std::uint32_t w = first; w < first + group_warps; ++w) amax = max(amax, amax_of_warp[w]);
    return amax;
}

template <typename Values>
__device__ __forceinline__ void quantize_unit(const UnitRecord& record, std::uint32_t down, std::uint32_t across,
                                              char* slots) {
    const Walk walk(record, down, across);
    bring(record, walk, slots);
    const std::uint32_t slot_bytes = blockDim.x * kChunkBytes;
    const auto chunk = [&](int i) { return Values(*reinterpret_cast<const uint4*>(slots + i * slot_bytes)); };
    typename Values::Largest largest;
    walk.for_each(record, [&](int i) { chunk(i).find_largest(largest); });
    const bool by_rows = record.mode == QuantMode::kRows;
    const Scaling scaled(record.mode, record.full_division != 0, group_amax(largest.bits(), record.group_warps));
    if (by_rows ? walk.column == 0 && walk.row < record.rows : threadIdx.x == 0)
        *reinterpret_cast<float*>(record.scale + (by_rows ? walk.row : down) * record.scale_strides[0] +
                                  (by_rows ? 0 : across * record.scale_strides[1])) = scaled.scale;
    char* at = reinterpret_cast<char*>(record.dst) + walk.row * record.dst_stride +
               std::int64_t{walk.column} * Values::kElements;
    const std::int64_t step = record.row_step * record.dst_stride + record.lane_step * Values::kElements;
    if (by_rows && scaled.is_finite)
        walk.for_each(record,
                      [&](int i) { chunk(i).store(at + i * step, [&](float x) { return scaled.divided(x); }); });
    else if (by_rows)
        walk.for_each(record, [&](int i) { chunk(i).store(at + i * step, [&](float x) { return x / scaled.scale; }); });
    else if (record.mode == QuantMode::kBlocksUe8m0)
        walk.for_each(
            record, [&](int i) { chunk(i).store(at + i * step, [&](float x) { return scaled.quantised_before(x); }); });
    else
        walk.for_each(record,
                      [&](int i) { chunk(i).store(at + i * step, [&](float x) { return x * scaled.inverse; }); });
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads, 1536 / kThreads) unit_kernel(const __grid_constant__ UnitTable table) {
    extern __shared__ __align__(16) char shared[];
    const std::uint32_t unit = table.first_unit + blockIdx.x;
    const UnitRecord& record = table.records[table.unit_records[unit]];
    const std::uint32_t within = unit - record.first_unit;
    const std::uint32_t down = within / record.units_across, across = within - down * record.units_across;
    with_values(record.src_dtype, record.through_bf16 != 0, [&](auto values) {
        quantize_unit<typename decltype(values)::Type>(record, down, across, shared + threadIdx.x * kChunkBytes);
    });
}

}  // namespace reshard
