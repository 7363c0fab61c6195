#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "copy_device.h"
#include "copy_vectors.cuh"
#include "device_scope.h"

namespace reshard {

struct KernelTable {
    const TileRecord* records;
    const std::uint32_t* tile_records;
    std::uint32_t num_tiles;
    std::uint32_t tile_vectors;
};

namespace {

constexpr int kThreads = 256;

// Addresses of a record's vectors. Most records have at most two dimensions; those keep what they need in registers.
// With one dimension the divisor is all zeros, so that the row is 0 and the column is n.
struct RowLocator {
    const char* src;
    char* dst;
    std::int64_t src_steps[2], dst_steps[2];
    FastDivisor divisor;
    __device__ explicit RowLocator(const TileRecord& record)
        : src(reinterpret_cast<const char*>(record.src)),
          dst(reinterpret_cast<char*>(record.dst)),
          src_steps{record.src_steps[0], record.src_steps[1]},
          dst_steps{record.dst_steps[0], record.dst_steps[1]},
          divisor(record.divisors[0]) {}
    __device__ VectorOffsets at(std::uint32_t n) const {
        const std::uint32_t row = divisor.quotient(n);
        const std::uint32_t column = n - row * divisor.divisor;
        return {column * src_steps[0] + row * src_steps[1], column * dst_steps[0] + row * dst_steps[1]};
    }
};

struct BoxLocator {
    const char* src;
    char* dst;
    const TileRecord& record;
    __device__ explicit BoxLocator(const TileRecord& record)
        : src(reinterpret_cast<const char*>(record.src)), dst(reinterpret_cast<char*>(record.dst)), record(record) {}
    __device__ VectorOffsets at(std::uint32_t n) const { return vector_offsets(record, n); }
};

// Vectors [begin, end) of a record by one block: each thread issues kInFlight loads before its first store. Past the
// end it loads the last vector again, which keeps the loads free of branches.
template <typename Mover, int kInFlight, typename Locator>
__device__ __forceinline__ void copy_vectors(const Locator locator, std::uint32_t begin, std::uint32_t end) {
#pragma unroll 1
    for (std::uint32_t first = begin + threadIdx.x; first < end; first += kInFlight * kThreads) {
        typename Mover::Loaded loaded[kInFlight];
        char* targets[kInFlight];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
            const VectorOffsets at = locator.at(min(first + i * kThreads, end - 1));
            targets[i] = locator.dst + at.dst;
            loaded[i] = Mover::load(locator.src + at.src);
        }
#pragma unroll
        for (int i = 0; i < kInFlight; ++i)
            if (first + i * kThreads < end) store_once<typename Mover::Stored>(targets[i], Mover::convert(loaded[i]));
    }
}

template <typename Mover, int kInFlight>
__device__ __forceinline__ void copy_tile(const TileRecord& record, std::uint32_t begin, std::uint32_t end) {
    if constexpr (sizeof(typename Mover::Loaded) >= 8) {
        constexpr int kLoads = sizeof(typename Mover::Loaded) > 16 ? kInFlight / 2 : kInFlight;
        if (record.num_dims <= 2) return copy_vectors<Mover, kLoads>(RowLocator(record), begin, end);
    }
    copy_vectors<Mover, 2>(BoxLocator(record), begin, end);
}

template <int kInFlight>
__global__ void __launch_bounds__(kThreads, 16 / kInFlight) copy_kernel(const __grid_constant__ KernelTable table) {
    for (std::uint32_t tile = blockIdx.x; tile < table.num_tiles; tile += gridDim.x) {
        const TileRecord& record = table.records[table.tile_records[tile]];
        const std::uint32_t begin = (tile - record.first_tile) * table.tile_vectors;
        const std::uint32_t end = min(begin + table.tile_vectors, record.num_vectors);
        with_mover(record.op, [&](auto mover) { copy_tile<decltype(mover), kInFlight>(record, begin, end); });
    }
}

__device__ __forceinline__ uint4 widened(unsigned char word) {
    return {word, 0, 0, 0};
}
__device__ __forceinline__ uint4 widened(unsigned short word) {
    return {word, 0, 0, 0};
}
__device__ __forceinline__ uint4 widened(unsigned word) {
    return {word, 0, 0, 0};
}
__device__ __forceinline__ uint4 widened(uint2 word) {
    return {word.x, word.y, 0, 0};
}
__device__ __forceinline__ uint4 widened(uint4 word) {
    return word;
}

// The destination's bytes of one vector, as they are there or as a copy would write them.
__device__ __forceinline__ uint4 vector_bits(const TileRecord& record, VectorOffsets at, bool of_destination) {
    const char* src = reinterpret_cast<const char*>(record.src) + at.src;
    const char* dst = reinterpret_cast<const char*>(record.dst) + at.dst;
    uint4 bits{};
    with_mover(record.op, [&](auto mover) {
        using Mover = decltype(mover);
        using Stored = typename Mover::Stored;
        bits = widened(of_destination ? load_once<Stored>(dst) : Mover::convert(Mover::load(src)));
    });
    return bits;
}

template <int kItemBytes>
__device__ __forceinline__ std::uint64_t mix_bits(uint4 bits, std::uint32_t items, std::uint64_t element) {
    const std::uint64_t halves[2] = {bits.x | std::uint64_t{bits.y} << 32, bits.z | std::uint64_t{bits.w} << 32};
    constexpr int kPerHalf = 8 / kItemBytes;
    constexpr std::uint64_t kMask =
        kItemBytes == 8 ? ~std::uint64_t{0} : (std::uint64_t{1} << (8 * kItemBytes % 64)) - 1;
    std::uint64_t sum = 0;
#pragma unroll
    for (int i = 0; i < 2 * kPerHalf; ++i) {
        const std::uint64_t word = (halves[i / kPerHalf] >> (8 * kItemBytes * (i % kPerHalf))) & kMask;
        if (i < items) sum += mix_word(word, element + i);
    }
    return sum;
}

__device__ __forceinline__ std::uint64_t vector_checksum(const TileRecord& record, std::uint32_t n,
                                                         bool of_destination) {
    const VectorOffsets at = vector_offsets(record, n);
    const std::uint32_t items = record.items_per_vector;
    const std::uint64_t element = record.first_element + std::uint64_t{n / record.vectors_per_item} * items;
    if (record.vectors_per_item > 1) {
        if (n % record.vectors_per_item != 0) return 0;
        const auto* item =
            reinterpret_cast<const unsigned char*>(of_destination ? record.dst + at.dst : record.src + at.src);
        return mix_item(item, record.dst_itemsize, element);
    }
    const uint4 bits = vector_bits(record, at, of_destination);
    switch (record.dst_itemsize) {
        case 1:
            return mix_bits<1>(bits, items, element);
        case 2:
            return mix_bits<2>(bits, items, element);
        case 4:
            return mix_bits<4>(bits, items, element);
        case 8:
            return mix_bits<8>(bits, items, element);
        default:
            return mix_bits<8>(bits, 2, 2 * element);
    }
}

__global__ void __launch_bounds__(kThreads)
    checksum_kernel(const __grid_constant__ KernelTable table, unsigned long long* sums, bool of_destination) {
    for (std::uint32_t tile = blockIdx.x; tile < table.num_tiles; tile += gridDim.x) {
        const TileRecord& record = table.records[table.tile_records[tile]];
        const std::uint32_t begin = (tile - record.first_tile) * table.tile_vectors;
        const std::uint32_t end = min(begin + table.tile_vectors, record.num_vectors);
        std::uint64_t sum = 0;
        for (std::uint32_t n = begin + threadIdx.x; n < end; n += kThreads)
            sum += vector_checksum(record, n, of_destination);
        for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_down_sync(0xffffffffu, sum, lanes);
        if (threadIdx.x % 32 == 0) atomicAdd(&sums[record.table_record], static_cast<unsigned long long>(sum));
    }
}

const void* copy_kernel_of(int in_flight) {
    return in_flight == 8 ? reinterpret_cast<const void*>(copy_kernel<8>)
                          : reinterpret_cast<const void*>(copy_kernel<4>);
}

// As many blocks as there are tiles, at most what is resident at once. Also loads the kernel, which a launch in a graph
// capture must not have to do.
unsigned grid_blocks(const void* kernel, int device, int blocks_per_sm, std::size_t num_tiles) {
    int num_sms = 0;
    int fitting = 0;
    check_cuda(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
    check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fitting, kernel, kThreads, 0),
               "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    const int per_sm = blocks_per_sm == 0 ? fitting : blocks_per_sm;
    const std::size_t resident = static_cast<std::size_t>(num_sms) * static_cast<std::size_t>(per_sm);
    return static_cast<unsigned>(std::max<std::size_t>(1, std::min(resident, num_tiles)));
}

bool is_plain(const CopyRecord& record) {
    const bool one_run = record.extents[0] * record.extents[1] * record.extents[2] == 1;
    return one_run && !record.is_cast() && record.has_contiguous_rows();
}

std::uint64_t written_bytes(const CopyRecord& record) {
    return static_cast<std::uint64_t>(record.num_elements()) * record.dst_itemsize;
}

cudaStream_t stream_of(std::uint64_t handle) {
    return reinterpret_cast<cudaStream_t>(handle);
}

}  // namespace

void FreeOnDevice::operator()(void* memory) const {
    cudaFree(memory);
}

DeviceTable::DeviceTable(Table table, const DeviceOptions& options) : options_(options), num_records_(table.size()) {
    check_records(table);
    if (options.vectors_in_flight != 4 && options.vectors_in_flight != 8)
        throw std::invalid_argument("vectors_in_flight must be 4 or 8");
    if (options.blocks_per_sm < 0) throw std::invalid_argument("blocks_per_sm must be 0 (as many as fit) or more");
    device_ = options.device >= 0 ? options.device : current_device();
    std::vector<std::uint32_t> order(table.size());
    std::iota(order.begin(), order.end(), 0u);
    const auto plain = std::stable_partition(order.begin(), order.end(), [&](std::uint32_t i) {
        const std::uint64_t min_bytes = options.copy_engine_min_bytes;
        return min_bytes == 0 || !is_plain(table[i]) || written_bytes(table[i]) < min_bytes;
    });
    for (auto i = plain; i != order.end(); ++i)
        plain_.push_back({table[*i].src, table[*i].dst, written_bytes(table[*i])});
    TilePlan plan{{}, {}, options.tiles};
    add_tiles(plan, table, {order.begin(), plain});
    num_kernel_tiles_ = plan.tile_records.size();
    add_tiles(plan, table, {plain, order.end()});
    num_tiles_ = plan.tile_records.size();
    if (num_tiles_ > 0) upload(plan);
}

void DeviceTable::upload(const TilePlan& plan) {
    const DeviceScope scope(device_);
    records_bytes_ = plan.records.size() * sizeof(TileRecord);
    device_bytes_ = records_bytes_ + plan.tile_records.size() * sizeof(std::uint32_t);
    void* memory = nullptr;
    check_cuda(cudaMalloc(&memory, device_bytes_), "allocating a copy table on the device");
    memory_.reset(memory);
    auto* tiles = static_cast<char*>(memory) + records_bytes_;
    check_cuda(cudaMemcpy(memory, plan.records.data(), records_bytes_, cudaMemcpyHostToDevice), "uploading records");
    check_cuda(cudaMemcpy(tiles, plan.tile_records.data(), device_bytes_ - records_bytes_, cudaMemcpyHostToDevice),
               "uploading tiles");
    copy_blocks_ =
        grid_blocks(copy_kernel_of(options_.vectors_in_flight), device_, options_.blocks_per_sm, num_kernel_tiles_);
    checksum_blocks_ = grid_blocks(reinterpret_cast<const void*>(checksum_kernel), device_, 0, num_tiles_);
}

KernelTable DeviceTable::kernel_table(std::size_t num_tiles) const {
    const auto* memory = static_cast<const char*>(memory_.get());
    return {reinterpret_cast<const TileRecord*>(memory),
            reinterpret_cast<const std::uint32_t*>(memory + records_bytes_), static_cast<std::uint32_t>(num_tiles),
            options_.tiles.tile_vectors};
}

void DeviceTable::launch(std::uint64_t stream) const {
    if (num_launches() == 0) return;
    const DeviceScope scope(device_);
    if (!plain_.empty()) launch_plain(stream);
    if (num_kernel_tiles_ == 0) return;
    KernelTable table = kernel_table(num_kernel_tiles_);
    void* arguments[] = {&table};
    check_cuda(cudaLaunchKernel(copy_kernel_of(options_.vectors_in_flight), dim3(copy_blocks_), dim3(kThreads),
                                arguments, 0, stream_of(stream)),
               "launching the copy kernel");
}

void DeviceTable::launch_checksum(std::uint64_t stream, std::uint64_t sums, bool of_destination) const {
    if (num_records_ == 0) return;
    const DeviceScope scope(device_);
    auto* words = reinterpret_cast<unsigned long long*>(sums);
    check_cuda(cudaMemsetAsync(words, 0, num_records_ * sizeof *words, stream_of(stream)), "clearing checksums");
    KernelTable table = kernel_table(num_tiles_);
    void* arguments[] = {&table, &words, &of_destination};
    check_cuda(cudaLaunchKernel(reinterpret_cast<const void*>(checksum_kernel), dim3(checksum_blocks_), dim3(kThreads),
                                arguments, 0, stream_of(stream)),
               "launching the checksum kernel");
}

// Batched copies need CUDA 12.8, a stream of their own kind (not a default stream) and no capture; copies one by one
// do in every other case.
void DeviceTable::launch_plain(std::uint64_t stream) const {
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    check_cuda(cudaStreamIsCapturing(stream_of(stream), &capture), "cudaStreamIsCapturing");
#if CUDART_VERSION >= 12080
    const bool is_default = stream_of(stream) == nullptr || stream_of(stream) == cudaStreamLegacy ||
                            stream_of(stream) == cudaStreamPerThread;
    if (capture == cudaStreamCaptureStatusNone && !is_default) return launch_batch(stream);
#endif
    for (const PlainCopy& copy : plain_)
        check_cuda(cudaMemcpyAsync(reinterpret_cast<void*>(copy.dst), reinterpret_cast<const void*>(copy.src),
                                   copy.num_bytes, cudaMemcpyDefault, stream_of(stream)),
                   "cudaMemcpyAsync");
}

void DeviceTable::launch_batch(std::uint64_t stream) const {
#if CUDART_VERSION >= 12080
    std::vector<void*> targets;
    std::vector<std::size_t> sizes;
    for (const PlainCopy& copy : plain_) {
        targets.push_back(reinterpret_cast<void*>(copy.dst));
        sizes.push_back(copy.num_bytes);
    }
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
    std::size_t first_with_attributes = 0;
#if CUDART_VERSION >= 13000
    std::vector<const void*> sources;
    for (const PlainCopy& copy : plain_) sources.push_back(reinterpret_cast<const void*>(copy.src));
    check_cuda(cudaMemcpyBatchAsync(targets.data(), sources.data(), sizes.data(), sizes.size(), &attributes,
                                    &first_with_attributes, 1, stream_of(stream)),
               "cudaMemcpyBatchAsync");
#else
    std::vector<void*> sources;
    for (const PlainCopy& copy : plain_) sources.push_back(reinterpret_cast<void*>(copy.src));
    std::size_t failed = 0;
    check_cuda(cudaMemcpyBatchAsync(targets.data(), sources.data(), sizes.data(), sizes.size(), &attributes,
                                    &first_with_attributes, 1, &failed, stream_of(stream)),
               "cudaMemcpyBatchAsync");
#endif
#else
    (void)stream;
#endif
}

}  // namespace reshard
