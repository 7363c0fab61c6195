// Quantising copies of groups of any shape and strides, element by element.
#pragma once

#include "quant_values.cuh"

namespace reshard {

inline constexpr int kGroupThreads = 256;
inline constexpr int kGroupWarps = kGroupThreads / 32;

struct GroupTable {
    const QuantRecord* records;
    const std::uint32_t* first_groups;  // of every record, and the number of groups in all
    std::uint32_t num_records;
    std::uint32_t num_groups;
};

__device__ std::uint32_t record_of(const GroupTable& table, std::uint32_t group) {
    std::uint32_t low = 0, high = table.num_records;
    while (high - low > 1) {
        const std::uint32_t middle = (low + high) / 2;
        (table.first_groups[middle] <= group ? low : high) = middle;
    }
    return low;
}

__device__ __forceinline__ float through(const QuantRecord& record, float x) {
    return record.through_bf16 ? __bfloat162float(__float2bfloat16_rn(x)) : x;
}

__device__ __forceinline__ float load_one(const QuantRecord& record, const char* at) {
    if (record.src_dtype == kFloat32) return through(record, __ldcs(reinterpret_cast<const float*>(at)));
    const unsigned half = __ldcs(reinterpret_cast<const unsigned short*>(at));
    return record.src_dtype == kBFloat16 ? DeviceBFloat16::unpack2(half).x
                                         : through(record, DeviceFloat16::unpack2(half).x);
}

// The largest of all threads' magnitudes, in every thread. `shared` may be used again after the next barrier.
__device__ std::uint32_t block_amax(std::uint32_t amax, std::uint32_t* shared) {
    amax = __reduce_max_sync(0xffffffffu, amax);
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = amax;
    __syncthreads();
    for (int warp = 0; warp < kGroupWarps; ++warp) amax = max(amax, shared[warp]);
    return amax;
}

// Any group, element by element, read twice.
__device__ void quantize_group(const QuantRecord& record, std::int64_t first_row, std::int64_t first_column,
                               std::int64_t rows, std::int64_t columns, float* scale_at, std::uint32_t* shared) {
    const char* src = reinterpret_cast<const char*>(record.src) + first_row * record.src_strides[0] +
                      first_column * record.src_strides[1];
    char* dst =
        reinterpret_cast<char*>(record.dst) + first_row * record.dst_strides[0] + first_column * record.dst_strides[1];
    const std::int64_t lanes = record.mode == QuantMode::kRows ? kGroupThreads : kQuantBlock;
    const auto for_each_element = [&](auto visit) {
        for (std::int64_t row = threadIdx.x / lanes; row < rows; row += kGroupThreads / lanes)
            for (std::int64_t column = threadIdx.x % lanes; column < columns; column += lanes) visit(row, column);
    };
    const auto load = [&](std::int64_t row, std::int64_t column) {
        return load_one(record, src + row * record.src_strides[0] + column * record.src_strides[1]);
    };
    std::uint32_t amax = 0;
    for_each_element([&](std::int64_t row, std::int64_t column) {
        amax = larger_magnitude(amax, __float_as_uint(load(row, column)));
    });
    const Scaling scaled(record.mode, record.full_division != 0, block_amax(amax, shared));
    if (threadIdx.x == 0) *scale_at = scaled.scale;
    for_each_element([&](std::int64_t row, std::int64_t column) {
        dst[row * record.dst_strides[0] + column * record.dst_strides[1]] = quantize_one(scaled(load(row, column)));
    });
}

__global__ void __launch_bounds__(kGroupThreads) group_kernel(const __grid_constant__ GroupTable table) {
    __shared__ std::uint32_t shared[kGroupWarps];
    for (std::uint32_t group = blockIdx.x; group < table.num_groups; group += gridDim.x) {
        const std::uint32_t index = record_of(table, group);
        const QuantRecord& record = table.records[index];
        const bool by_rows = record.mode == QuantMode::kRows;
        const std::int64_t groups_across = by_rows ? 1 : (record.extents[1] + kQuantBlock - 1) / kQuantBlock;
        const std::int64_t within = group - table.first_groups[index];
        const std::int64_t down = within / groups_across, across = within % groups_across;
        auto* scale_at = reinterpret_cast<float*>(record.scale + down * record.scale_strides[0] +
                                                  (by_rows ? 0 : across * record.scale_strides[1]));
        if (by_rows) {
            quantize_group(record, down, 0, 1, record.extents[1], scale_at, shared);
            continue;
        }
        const std::int64_t row = down * kQuantBlock, column = across * kQuantBlock;
        quantize_group(record, row, column, min(kQuantBlock, record.extents[0] - row),
                       min(kQuantBlock, record.extents[1] - column), scale_at, shared);
    }
}

}  // namespace reshard
