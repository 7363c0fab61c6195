#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <limits>
#include <type_traits>
#include <vector>

#include "copy_vectors.cuh"
#include "device_scope.h"
#include "quant_device.h"

namespace reshard {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kRowsPerWarp = kQuantBlock / kWarps;

struct QuantKernelTable {
    const QuantRecord* records;
    const std::uint32_t* first_groups;  // of every record, and the number of groups in all
    std::uint32_t num_records;
    std::uint32_t num_groups;
};

__device__ std::uint32_t record_of(const QuantKernelTable& table, std::uint32_t group) {
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

// Four consecutive elements of a type, by one access.
template <std::uint8_t kSrc>
__device__ __forceinline__ float4 load_four(const char* at, bool through_bf16) {
    float4 x;
    if constexpr (kSrc == kFloat32) {
        x = __ldcs(reinterpret_cast<const float4*>(at));
    } else {
        using Half = std::conditional_t<kSrc == kBFloat16, DeviceBFloat16, DeviceFloat16>;
        const uint2 halves = __ldcs(reinterpret_cast<const uint2*>(at));
        const float2 low = Half::unpack2(halves.x);
        const float2 high = Half::unpack2(halves.y);
        x = {low.x, low.y, high.x, high.y};
    }
    if (kSrc == kBFloat16 || !through_bf16) return x;
    const float2 low = DeviceBFloat16::unpack2(DeviceBFloat16::pack2(x.x, x.y));
    const float2 high = DeviceBFloat16::unpack2(DeviceBFloat16::pack2(x.z, x.w));
    return {low.x, low.y, high.x, high.y};
}

// Calls visit(std::integral_constant) with the source's type as a constant.
template <typename Visit>
__device__ __forceinline__ void with_type(std::uint8_t dtype, Visit visit) {
    if (dtype == kFloat32)
        visit(std::integral_constant<std::uint8_t, kFloat32>{});
    else if (dtype == kBFloat16)
        visit(std::integral_constant<std::uint8_t, kBFloat16>{});
    else
        visit(std::integral_constant<std::uint8_t, kFloat16>{});
}

__device__ __forceinline__ std::uint32_t amax_of(std::uint32_t amax, float4 x) {
    amax = larger_magnitude(larger_magnitude(amax, __float_as_uint(x.x)), __float_as_uint(x.y));
    return larger_magnitude(larger_magnitude(amax, __float_as_uint(x.z)), __float_as_uint(x.w));
}

__device__ __forceinline__ unsigned quantize_two(float low, float high) {
    return __nv_cvt_float2_to_fp8x2({low, high}, __NV_SATFINITE, __NV_E4M3);
}

__device__ __forceinline__ unsigned char quantize_one(float x) {
    return static_cast<unsigned char>(__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3));
}

// The largest of all threads' magnitudes, in every thread. `shared` may be used again after the next barrier.
__device__ std::uint32_t block_amax(std::uint32_t amax, std::uint32_t* shared) {
    amax = __reduce_max_sync(0xffffffffu, amax);
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = amax;
    __syncthreads();
    for (int warp = 0; warp < kWarps; ++warp) amax = max(amax, shared[warp]);
    return amax;
}

// A block of 128 x 128 with four elements a lane and 16 rows a warp: read once, kept in registers.
template <std::uint8_t kSrc>
__device__ __forceinline__ void quantize_block(const QuantRecord& record, std::int64_t first_row,
                                               std::int64_t first_column, float* scale_at, std::uint32_t* shared) {
    const std::int64_t row0 = first_row + threadIdx.x / 32;
    const std::int64_t column = first_column + threadIdx.x % 32 * 4;
    const char* src = reinterpret_cast<const char*>(record.src) + column * record.src_strides[1];
    char* dst = reinterpret_cast<char*>(record.dst) + column;
    const std::int64_t src_stride = record.src_strides[0], dst_stride = record.dst_strides[0];
    const std::int64_t num_rows = record.extents[0];
    const bool inside = column < record.extents[1];
    const bool through_bf16 = record.through_bf16 != 0;
    float4 x[kRowsPerWarp];
    std::uint32_t amax = 0;
#pragma unroll
    for (int i = 0; i < kRowsPerWarp; ++i) {
        const std::int64_t row = row0 + i * kWarps;
        x[i] = {0, 0, 0, 0};
        if (inside && row < num_rows) x[i] = load_four<kSrc>(src + row * src_stride, through_bf16);
    }
#pragma unroll
    for (int i = 0; i < kRowsPerWarp; ++i) amax = amax_of(amax, x[i]);
    const float scale = group_scale(QuantMode::kBlocks, block_amax(amax, shared));
    const float inverse = 1.0f / scale;
    if (threadIdx.x == 0) *scale_at = scale;
#pragma unroll
    for (int i = 0; i < kRowsPerWarp; ++i) {
        const std::int64_t row = row0 + i * kWarps;
        if (!inside || row >= num_rows) continue;
        const unsigned word =
            quantize_two(x[i].x * inverse, x[i].y * inverse) | quantize_two(x[i].z * inverse, x[i].w * inverse) << 16;
        __stcs(reinterpret_cast<unsigned*>(dst + row * dst_stride), word);
    }
}

// Any group, element by element, read twice.
__device__ void quantize_group(const QuantRecord& record, std::int64_t first_row, std::int64_t first_column,
                               std::int64_t rows, std::int64_t columns, float* scale_at, std::uint32_t* shared) {
    const char* src = reinterpret_cast<const char*>(record.src) + first_row * record.src_strides[0] +
                      first_column * record.src_strides[1];
    char* dst =
        reinterpret_cast<char*>(record.dst) + first_row * record.dst_strides[0] + first_column * record.dst_strides[1];
    std::uint32_t amax = 0;
    for (std::int64_t i = threadIdx.x; i < rows * columns; i += kThreads) {
        const char* at = src + i / columns * record.src_strides[0] + i % columns * record.src_strides[1];
        amax = larger_magnitude(amax, __float_as_uint(load_one(record, at)));
    }
    const float scale = group_scale(record.mode, block_amax(amax, shared));
    const float inverse = 1.0f / scale;
    if (threadIdx.x == 0) *scale_at = scale;
    for (std::int64_t i = threadIdx.x; i < rows * columns; i += kThreads) {
        const std::int64_t row = i / columns, column = i % columns;
        const float x = load_one(record, src + row * record.src_strides[0] + column * record.src_strides[1]);
        dst[row * record.dst_strides[0] + column * record.dst_strides[1]] =
            quantize_one(record.mode == QuantMode::kRows ? x / scale : x * inverse);
    }
}

// Whether rows are contiguous on both sides and made of aligned groups of four elements.
__device__ bool fits_vectors(const QuantRecord& record) {
    const std::int64_t size = record.src_dtype == kFloat32 ? 4 : 2;
    const std::uint64_t src = record.src | static_cast<std::uint64_t>(record.src_strides[0]);
    const std::uint64_t dst = record.dst | static_cast<std::uint64_t>(record.dst_strides[0]);
    return record.src_strides[1] == size && record.dst_strides[1] == 1 && record.extents[1] % 4 == 0 &&
           src % (4 * size) == 0 && dst % 4 == 0;
}

// One contiguous row, four elements at a time, read twice (the second time mostly from the caches).
template <std::uint8_t kSrc>
__device__ __forceinline__ void quantize_row(const QuantRecord& record, std::int64_t row, float* scale_at,
                                             std::uint32_t* shared) {
    const char* src = reinterpret_cast<const char*>(record.src) + row * record.src_strides[0];
    char* dst = reinterpret_cast<char*>(record.dst) + row * record.dst_strides[0];
    constexpr int kSize = kSrc == kFloat32 ? 4 : 2;
    const std::int64_t columns = record.extents[1];
    const bool through_bf16 = record.through_bf16 != 0;
    std::uint32_t amax = 0;
#pragma unroll 4
    for (std::int64_t column = 4 * threadIdx.x; column < columns; column += 4 * kThreads)
        amax = amax_of(amax, load_four<kSrc>(src + column * kSize, through_bf16));
    const float scale = group_scale(QuantMode::kRows, block_amax(amax, shared));
    if (threadIdx.x == 0) *scale_at = scale;
    for (std::int64_t column = 4 * threadIdx.x; column < columns; column += 4 * kThreads) {
        const float4 x = load_four<kSrc>(src + column * kSize, through_bf16);
        const unsigned word = quantize_two(x.x / scale, x.y / scale) | quantize_two(x.z / scale, x.w / scale) << 16;
        __stcs(reinterpret_cast<unsigned*>(dst + column), word);
    }
}

__global__ void __launch_bounds__(kThreads) quantize_kernel(const __grid_constant__ QuantKernelTable table) {
    __shared__ std::uint32_t shared[kWarps];
    for (std::uint32_t group = blockIdx.x; group < table.num_groups; group += gridDim.x) {
        const std::uint32_t index = record_of(table, group);
        const QuantRecord& record = table.records[index];
        const bool by_rows = record.mode == QuantMode::kRows;
        const std::int64_t groups_across = by_rows ? 1 : (record.extents[1] + kQuantBlock - 1) / kQuantBlock;
        const std::int64_t within = group - table.first_groups[index];
        const std::int64_t down = within / groups_across, across = within % groups_across;
        auto* scale_at = reinterpret_cast<float*>(record.scale + down * record.scale_strides[0] +
                                                  (by_rows ? 0 : across * record.scale_strides[1]));
        const std::int64_t row = by_rows ? down : down * kQuantBlock, column = across * kQuantBlock;
        const bool fits = fits_vectors(record);
        if (by_rows && fits)
            with_type(record.src_dtype, [&](auto type) { quantize_row<type.value>(record, row, scale_at, shared); });
        else if (by_rows)
            quantize_group(record, row, 0, 1, record.extents[1], scale_at, shared);
        else if (fits)
            with_type(record.src_dtype,
                      [&](auto type) { quantize_block<type.value>(record, row, column, scale_at, shared); });
        else
            quantize_group(record, row, column, min(kQuantBlock, record.extents[0] - row),
                           min(kQuantBlock, record.extents[1] - column), scale_at, shared);
    }
}

}  // namespace

QuantDeviceTable::QuantDeviceTable(QuantTable table, int device) : num_records_(table.size()) {
    check_quant_records(table);
    device_ = device >= 0 ? device : current_device();
    std::vector<std::uint32_t> first_groups{0};
    for (const QuantRecord& record : table) {
        const std::int64_t end = first_groups.back() + record.num_groups();
        if (end > std::numeric_limits<std::int32_t>::max())
            throw std::invalid_argument("the quantising table has too many groups: make several tables of it");
        first_groups.push_back(static_cast<std::uint32_t>(end));
    }
    num_groups_ = first_groups.back();
    if (num_groups_ == 0) return;
    const DeviceScope scope(device_);
    const std::size_t records_bytes = table.size_bytes();
    const std::size_t groups_bytes = first_groups.size() * sizeof(std::uint32_t);
    device_bytes_ = records_bytes + groups_bytes;
    void* memory = nullptr;
    check_cuda(cudaMalloc(&memory, device_bytes_), "allocating a quantising table on the device");
    memory_.reset(memory);
    check_cuda(cudaMemcpy(memory, table.data(), records_bytes, cudaMemcpyHostToDevice), "uploading records");
    check_cuda(cudaMemcpy(static_cast<char*>(memory) + records_bytes, first_groups.data(), groups_bytes,
                          cudaMemcpyHostToDevice),
               "uploading groups");
    int num_sms = 0, per_sm = 0;
    check_cuda(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device_), "cudaDeviceGetAttribute");
    check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, quantize_kernel, kThreads, 0),
               "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    blocks_ = std::min<unsigned>(num_groups_, static_cast<unsigned>(num_sms * std::max(1, per_sm)));
}

void QuantDeviceTable::launch(std::uint64_t stream) const {
    if (num_groups_ == 0) return;
    const DeviceScope scope(device_);
    const auto* memory = static_cast<const char*>(memory_.get());
    QuantKernelTable table{reinterpret_cast<const QuantRecord*>(memory),
                           reinterpret_cast<const std::uint32_t*>(memory + num_records_ * sizeof(QuantRecord)),
                           static_cast<std::uint32_t>(num_records_), num_groups_};
    void* arguments[] = {&table};
    check_cuda(cudaLaunchKernel(reinterpret_cast<const void*>(quantize_kernel), dim3(blocks_), dim3(kThreads),
                                arguments, 0, reinterpret_cast<cudaStream_t>(stream)),
               "launching the quantising kernel");
}

}  // namespace reshard
