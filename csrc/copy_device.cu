#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "copy_device.h"
#include "copy_vectors.cuh"
#include "device_scope.h"

namespace reshard {

struct KernelTable {
    const TileRecord* records;
    const TileTarget* more_targets;
    const std::uint32_t* tile_records;
    std::uint32_t first_tile, end_tile;
    std::uint32_t tile_vectors;
};

namespace {

constexpr int kThreads = 256;
constexpr int kChecksumBlocksPerSm = 8;

// A vector's place in a record with wide rows: a row, and a column whose step is the vector's own size. With one
// dimension the divisor is all zeros, so that the row is 0 and the column is n.
struct RowShape {
    struct Index {
        std::uint32_t column, row;
    };
    // Addresses of one side, in registers.
    struct Side {
        char* base;
        std::int64_t row_step;
        __device__ Side(std::uint64_t address, const std::int64_t (&steps)[kTileDims])
            : base(reinterpret_cast<char*>(address)), row_step(steps[1]) {}
        template <typename Word>
        __device__ char* at(Index index) const {
            return base + index.row * row_step + std::int64_t{index.column} * sizeof(Word);
        }
    };
    FastDivisor divisor;
    __device__ explicit RowShape(const TileRecord& record) : divisor(record.divisors[0]) {}
    __device__ Index index(std::uint32_t n) const {
        const std::uint32_t row = divisor.quotient(n);
        return {n - row * divisor.divisor, row};
    }
};

struct BoxShape {
    using Index = VectorIndex;
    struct Side {
        char* base;
        const std::int64_t (&steps)[kTileDims];
        __device__ Side(std::uint64_t address, const std::int64_t (&all_steps)[kTileDims])
            : base(reinterpret_cast<char*>(address)), steps(all_steps) {}
        template <typename Word>
        __device__ char* at(const Index& index) const {
            return base + index.offset(steps);
        }
    };
    const TileRecord& record;
    __device__ explicit BoxShape(const TileRecord& record) : record(record) {}
    __device__ Index index(std::uint32_t n) const { return {record, n}; }
};

// Vectors [begin, end) of a record by one block, to all its targets: each thread issues kInFlight loads before its
// first store. Past the end it loads the last vector again, which keeps the loads free of branches.
template <typename Mover, int kInFlight, typename Shape>
__device__ __forceinline__ void copy_vectors(const TileRecord& record, const TileTarget* more, std::uint32_t begin,
                                             std::uint32_t end) {
    using Stored = typename Mover::Stored;
    const Shape shape(record);
    const typename Shape::Side src(record.src, record.src_steps), dst(record.target.dst, record.target.dst_steps);
    const TileTarget* const end_of_more = more + record.num_more;
#pragma unroll 1
    for (std::uint32_t first = begin + threadIdx.x; first < end; first += kInFlight * kThreads) {
        typename Mover::Loaded loaded[kInFlight];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i)
            loaded[i] =
                Mover::load(src.template at<typename Mover::Loaded>(shape.index(min(first + i * kThreads, end - 1))));
        Stored stored[kInFlight];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) stored[i] = Mover::convert(loaded[i]);
        const auto store_all = [&](const typename Shape::Side& side) {
#pragma unroll
            for (int i = 0; i < kInFlight; ++i) {
                const std::uint32_t n = first + i * kThreads;
                if (n < end) store_once<Stored>(side.template at<Stored>(shape.index(n)), stored[i]);
            }
        };
        store_all(dst);
#pragma unroll 1
        for (const TileTarget* target = more; target != end_of_more; ++target)
            store_all(typename Shape::Side(target->dst, target->dst_steps));
    }
}

// Calls visit(record, further targets, first vector, end) for the tiles that are this block's.
template <typename Visit>
__device__ __forceinline__ void for_each_tile(const KernelTable& table, Visit visit) {
    for (std::uint32_t tile = table.first_tile + blockIdx.x; tile < table.end_tile; tile += gridDim.x) {
        const TileRecord& record = table.records[table.tile_records[tile]];
        const std::uint32_t begin = (tile - record.first_tile) * table.tile_vectors;
        const std::uint32_t end = min(begin + table.tile_vectors, record.num_vectors);
        visit(record, table.more_targets + record.first_more, begin, end);
    }
}

template <int kInFlight>
__global__ void __launch_bounds__(kThreads) row_kernel(const __grid_constant__ KernelTable table) {
    for_each_tile(table, [](const TileRecord& record, const TileTarget* more, std::uint32_t begin, std::uint32_t end) {
        with_mover(record.op, [&](auto mover) {
            using Mover = decltype(mover);
            if constexpr (sizeof(typename Mover::Loaded) >= 8)
                copy_vectors<Mover, kInFlight, RowShape>(record, more, begin, end);
        });
    });
}

__global__ void __launch_bounds__(kThreads) box_kernel(const __grid_constant__ KernelTable table) {
    for_each_tile(table, [](const TileRecord& record, const TileTarget* more, std::uint32_t begin, std::uint32_t end) {
        with_mover(record.op,
                   [&](auto mover) { copy_vectors<decltype(mover), 2, BoxShape>(record, more, begin, end); });
    });
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

// The bytes at a vector of the destination, or those that a copy would write there.
__device__ __forceinline__ uint4 vector_bits(VectorOp op, const char* src, const char* dst, bool of_destination) {
    uint4 bits{};
    with_mover(op, [&](auto mover) {
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

__device__ __forceinline__ std::uint64_t vector_checksum(const TileRecord& record, const TileTarget& target,
                                                         std::uint32_t n, bool of_destination) {
    const VectorIndex index(record, n);
    const char* src = reinterpret_cast<const char*>(record.src) + index.offset(record.src_steps);
    const char* dst = reinterpret_cast<const char*>(target.dst) + index.offset(target.dst_steps);
    const std::uint32_t items = record.items_per_vector;
    const std::uint64_t element = record.first_element + std::uint64_t{n / record.vectors_per_item} * items;
    if (record.vectors_per_item > 1) {
        if (n % record.vectors_per_item != 0) return 0;
        const auto* item = reinterpret_cast<const unsigned char*>(of_destination ? dst : src);
        return mix_item(item, record.dst_itemsize, element);
    }
    const uint4 bits = vector_bits(record.op, src, dst, of_destination);
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
    for_each_tile(table, [&](const TileRecord& record, const TileTarget* more, std::uint32_t begin, std::uint32_t end) {
        for (std::uint32_t t = 0; t <= record.num_more; ++t) {
            const TileTarget& target = *(t == 0 ? &record.target : more + t - 1);
            std::uint64_t sum = 0;
            for (std::uint32_t n = begin + threadIdx.x; n < end; n += kThreads)
                sum += vector_checksum(record, target, n, of_destination);
            for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_down_sync(0xffffffffu, sum, lanes);
            if (threadIdx.x % 32 == 0) atomicAdd(&sums[record.table_record + t], static_cast<unsigned long long>(sum));
        }
    });
}

const void* row_kernel_of(int in_flight) {
    switch (in_flight) {
        case 1:
            return reinterpret_cast<const void*>(row_kernel<1>);
        case 2:
            return reinterpret_cast<const void*>(row_kernel<2>);
        case 4:
            return reinterpret_cast<const void*>(row_kernel<4>);
        default:
            throw std::invalid_argument("vectors_in_flight must be 1, 2 or 4");
    }
}

// A block for every tile, or at most so many as are resident at once. Also loads the kernel, which a launch in a graph
// capture must not have to do.
unsigned grid_blocks(const void* kernel, int device, int blocks_per_sm, std::size_t num_tiles) {
    int num_sms = 0;
    int fitting = 0;
    check_cuda(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
    check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fitting, kernel, kThreads, 0),
               "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    constexpr std::size_t kMaxBlocks = std::numeric_limits<std::int32_t>::max();
    const std::size_t most =
        blocks_per_sm == 0 ? kMaxBlocks : static_cast<std::size_t>(num_sms) * static_cast<std::size_t>(blocks_per_sm);
    return static_cast<unsigned>(std::max<std::size_t>(1, std::min(most, num_tiles)));
}

bool is_plain(const CopyRecord& record) {
    const bool one_run = record.extents[0] * record.extents[1] * record.extents[2] == 1;
    return one_run && !record.is_cast() && record.has_contiguous_rows() && record.num_followers == 0;
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
    row_kernel_of(options.vectors_in_flight);
    if (options.blocks_per_sm < 0) throw std::invalid_argument("blocks_per_sm must be 0 (one block a tile) or more");
    device_ = options.device >= 0 ? options.device : current_device();
    std::vector<std::uint32_t> order = fan_heads(table);
    const auto plain = std::stable_partition(order.begin(), order.end(), [&](std::uint32_t i) {
        const std::uint64_t min_bytes = options.copy_engine_min_bytes;
        return min_bytes == 0 || !is_plain(table[i]) || written_bytes(table[i]) < min_bytes;
    });
    for (auto i = plain; i != order.end(); ++i)
        plain_.push_back({table[*i].src, table[*i].dst, written_bytes(table[*i])});
    TilePlan plan{{}, {}, {}, options.tiles};
    add_tiles(plan, table, {order.begin(), plain});
    num_kernel_tiles_ = static_cast<std::uint32_t>(plan.tile_records.size());
    num_row_tiles_ = num_kernel_tiles_;
    for (const TileRecord& record : plan.records)
        if (!record.wide_rows) num_row_tiles_ = std::min(num_row_tiles_, record.first_tile);
    add_tiles(plan, table, {plain, order.end()});
    num_tiles_ = static_cast<std::uint32_t>(plan.tile_records.size());
    if (num_tiles_ > 0) upload(plan);
}

void DeviceTable::upload(const TilePlan& plan) {
    const DeviceScope scope(device_);
    records_bytes_ = plan.records.size() * sizeof(TileRecord);
    targets_bytes_ = plan.more_targets.size() * sizeof(TileTarget);
    const std::size_t tiles_bytes = plan.tile_records.size() * sizeof(std::uint32_t);
    device_bytes_ = records_bytes_ + targets_bytes_ + tiles_bytes;
    void* memory = nullptr;
    check_cuda(cudaMalloc(&memory, device_bytes_), "allocating a copy table on the device");
    memory_.reset(memory);
    auto* targets = static_cast<char*>(memory) + records_bytes_;
    check_cuda(cudaMemcpy(memory, plan.records.data(), records_bytes_, cudaMemcpyHostToDevice), "uploading records");
    check_cuda(cudaMemcpy(targets, plan.more_targets.data(), targets_bytes_, cudaMemcpyHostToDevice),
               "uploading targets");
    check_cuda(cudaMemcpy(targets + targets_bytes_, plan.tile_records.data(), tiles_bytes, cudaMemcpyHostToDevice),
               "uploading tiles");
    const int per_sm = options_.blocks_per_sm;
    row_blocks_ = grid_blocks(row_kernel_of(options_.vectors_in_flight), device_, per_sm, num_row_tiles_);
    box_blocks_ =
        grid_blocks(reinterpret_cast<const void*>(box_kernel), device_, per_sm, num_kernel_tiles_ - num_row_tiles_);
    checksum_blocks_ =
        grid_blocks(reinterpret_cast<const void*>(checksum_kernel), device_, kChecksumBlocksPerSm, num_tiles_);
}

KernelTable DeviceTable::kernel_table(std::uint32_t first_tile, std::uint32_t end_tile) const {
    const auto* memory = static_cast<const char*>(memory_.get());
    return {reinterpret_cast<const TileRecord*>(memory),
            reinterpret_cast<const TileTarget*>(memory + records_bytes_),
            reinterpret_cast<const std::uint32_t*>(memory + records_bytes_ + targets_bytes_),
            first_tile,
            end_tile,
            options_.tiles.tile_vectors};
}

void DeviceTable::launch(std::uint64_t stream) const {
    if (num_launches() == 0) return;
    const DeviceScope scope(device_);
    if (!plain_.empty()) launch_plain(stream);
    const auto queue = [&](const void* kernel, unsigned blocks, std::uint32_t first_tile, std::uint32_t end_tile) {
        if (first_tile == end_tile) return;
        KernelTable table = kernel_table(first_tile, end_tile);
        void* arguments[] = {&table};
        check_cuda(cudaLaunchKernel(kernel, dim3(blocks), dim3(kThreads), arguments, 0, stream_of(stream)),
                   "launching a copy kernel");
    };
    queue(row_kernel_of(options_.vectors_in_flight), row_blocks_, 0, num_row_tiles_);
    queue(reinterpret_cast<const void*>(box_kernel), box_blocks_, num_row_tiles_, num_kernel_tiles_);
}

void DeviceTable::launch_checksum(std::uint64_t stream, std::uint64_t sums, bool of_destination) const {
    if (num_records_ == 0) return;
    const DeviceScope scope(device_);
    auto* words = reinterpret_cast<unsigned long long*>(sums);
    check_cuda(cudaMemsetAsync(words, 0, num_records_ * sizeof *words, stream_of(stream)), "clearing checksums");
    KernelTable table = kernel_table(0, num_tiles_);
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
