#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <memory>
#include <span>
#include <stdexcept>
#include <vector>

#include "device_scope.h"
#include "quant_device.h"
#include "quant_groups.cuh"
#include "quant_units.cuh"

namespace reshard {
namespace {

constexpr int kSmallThreads = 256, kLargeThreads = 512;  // of a block for units of up to 32 KiB, and of more
constexpr std::int64_t kSmallUnitBytes = 32 << 10;
constexpr std::int64_t kLargeUnitBytes = 75 << 10;  // up to here three blocks share a multiprocessor's 227 KiB
constexpr std::int64_t kMaxUnitBytes = 112 << 10;   // and up to here two
constexpr int kNumClasses = 3;
constexpr int kReservedSharedBytes = 1024;  // for what the kernel holds beside its unit

// How the units of one record lie over a block's threads.
struct Shape {
    int threads;
    std::int64_t rows, lanes, num_chunks, bytes;

    // Records of one class go into one launch.
    int launch_class() const { return threads == kSmallThreads ? 0 : bytes <= kLargeUnitBytes ? 1 : 2; }
};

Shape block_shape(std::int64_t size) {
    const std::int64_t lanes = kQuantBlock * size / kChunkBytes;
    const std::int64_t bytes = kQuantBlock * kQuantBlock * size;
    const int threads = bytes > kSmallUnitBytes ? kLargeThreads : kSmallThreads;
    return {threads, kQuantBlock, lanes, kQuantBlock * lanes / threads, bytes};
}

// As many rows as fit a small unit, at most one a warp; or one row.
Shape row_shape(std::int64_t row_chunks) {
    const std::int64_t row_bytes = row_chunks * kChunkBytes;
    const int threads = row_bytes > kSmallUnitBytes ? kLargeThreads : kSmallThreads;
    std::int64_t rows = threads / 32;
    const auto chunks = [&] { return (row_chunks + threads / rows - 1) / (threads / rows); };
    while (rows > 1 && chunks() * threads * kChunkBytes > kSmallUnitBytes) rows /= 2;
    const std::int64_t bytes = rows == 1 ? row_bytes : chunks() * threads * kChunkBytes;
    return {threads, rows, threads / rows, chunks(), bytes};
}

Shape shape_of(const QuantRecord& record) {
    const std::int64_t size = record.src_dtype == kFloat32 ? 4 : 2;
    return record.mode == QuantMode::kRows ? row_shape(record.extents[1] * size / kChunkBytes) : block_shape(size);
}

// Whether a record can go by units: contiguous rows, made of aligned chunks, not longer than shared memory allows.
bool fits_units(const QuantRecord& record, std::int64_t shared_bytes) {
    const std::int64_t size = record.src_dtype == kFloat32 ? 4 : 2;
    const std::int64_t elements = kChunkBytes / size;
    const std::uint64_t src = record.src | static_cast<std::uint64_t>(record.src_strides[0]);
    const std::uint64_t dst = record.dst | static_cast<std::uint64_t>(record.dst_strides[0]);
    const std::int64_t unit_bytes =
        record.mode == QuantMode::kRows ? record.extents[1] * size : kQuantBlock * kQuantBlock * size;
    return record.src_strides[1] == size && record.dst_strides[1] == 1 && record.extents[1] % elements == 0 &&
           src % kChunkBytes == 0 && dst % static_cast<std::uint64_t>(elements) == 0 &&
           unit_bytes <= std::min(kMaxUnitBytes, shared_bytes) &&
           std::max(record.extents[0], record.extents[1]) < std::numeric_limits<std::int32_t>::max();
}

UnitRecord unit_record(const QuantRecord& record, const Shape& shape) {
    const std::int64_t elements = kChunkBytes / (record.src_dtype == kFloat32 ? 4 : 2);
    const bool by_rows = record.mode == QuantMode::kRows;
    UnitRecord made{};
    made.src = record.src;
    made.dst = record.dst;
    made.scale = record.scale;
    made.src_stride = record.src_strides[0];
    made.dst_stride = record.dst_strides[0];
    made.scale_strides[0] = record.scale_strides[0];
    made.scale_strides[1] = record.scale_strides[1];
    made.rows = static_cast<std::uint32_t>(record.extents[0]);
    made.row_chunks = static_cast<std::uint32_t>(record.extents[1] / elements);
    made.units_across = static_cast<std::uint32_t>(record.groups_across());
    made.unit_rows = static_cast<std::uint16_t>(shape.rows);
    made.lane_bits = static_cast<std::uint16_t>(std::countr_zero(static_cast<std::uint64_t>(shape.lanes)));
    made.row_step = static_cast<std::uint16_t>(by_rows ? 0 : shape.threads / shape.lanes);
    made.lane_step = static_cast<std::uint16_t>(by_rows ? shape.lanes : 0);
    made.num_chunks = static_cast<std::uint16_t>(shape.num_chunks);
    made.group_warps = static_cast<std::uint16_t>((by_rows ? shape.lanes : shape.threads) / 32);
    made.src_dtype = record.src_dtype;
    made.mode = record.mode;
    made.through_bf16 = record.through_bf16;
    // A row's quotient is corrected from the exact reciprocal.
    made.full_division = record.mode == QuantMode::kRows ? 0 : record.full_division;
    return made;
}

std::uint32_t add_count(std::uint32_t sum, std::int64_t more) {
    if (sum + more > std::numeric_limits<std::int32_t>::max())
        throw std::invalid_argument("the quantising table has too many groups: make several tables of it");
    return static_cast<std::uint32_t>(sum + more);
}

const void* unit_kernel_of(int threads) {
    return threads == kSmallThreads ? reinterpret_cast<const void*>(unit_kernel<kSmallThreads>)
                                    : reinterpret_cast<const void*>(unit_kernel<kLargeThreads>);
}

int attribute_of(cudaDeviceAttr attribute, int device) {
    int value = 0;
    check_cuda(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
    return value;
}

// One array in the table's device memory, from a multiple of 8 bytes on.
struct Part {
    const void* data;
    std::size_t num_bytes;
    std::size_t at = 0;
};

template <typename Value>
Part part_of(const std::vector<Value>& values) {
    return {values.data(), values.size() * sizeof(Value)};
}

std::unique_ptr<void, FreeOnDevice> upload(std::span<Part> parts, std::size_t& num_bytes) {
    num_bytes = 0;
    for (Part& part : parts) {
        part.at = num_bytes;
        num_bytes += (part.num_bytes + 7) / 8 * 8;
    }
    void* memory = nullptr;
    check_cuda(cudaMalloc(&memory, num_bytes), "allocating a quantising table on the device");
    std::unique_ptr<void, FreeOnDevice> owner(memory);
    for (const Part& part : parts)
        check_cuda(cudaMemcpy(static_cast<char*>(memory) + part.at, part.data, part.num_bytes, cudaMemcpyHostToDevice),
                   "uploading a quantising table");
    return owner;
}

}  // namespace

QuantDeviceTable::QuantDeviceTable(QuantTable table, int device) {
    check_quant_records(table);
    device_ = device >= 0 ? device : current_device();
    if (table.empty()) return;
    const DeviceScope scope(device_);
    const int shared_bytes = attribute_of(cudaDevAttrMaxSharedMemoryPerBlockOptin, device_) - kReservedSharedBytes;
    std::vector<QuantRecord> by_units, others;
    std::vector<Shape> shapes;
    std::vector<std::uint32_t> first_groups{0};
    for (const QuantRecord& record : table) {
        if (fits_units(record, shared_bytes)) {
            by_units.push_back(record);
            shapes.push_back(shape_of(record));
        } else {
            others.push_back(record);
            first_groups.push_back(add_count(first_groups.back(), record.num_groups()));
        }
    }
    std::vector<UnitRecord> records;
    std::vector<std::uint32_t> unit_records;
    for (int launch_class = 0; launch_class < kNumClasses; ++launch_class) {
        UnitLaunch launch{kLargeThreads, 0, static_cast<std::uint32_t>(unit_records.size()), 0};
        for (std::size_t i = 0; i < by_units.size(); ++i) {
            if (shapes[i].launch_class() != launch_class) continue;
            launch.threads = shapes[i].threads;
            launch.shared_bytes = std::max(launch.shared_bytes, static_cast<std::uint32_t>(shapes[i].bytes));
            records.push_back(unit_record(by_units[i], shapes[i]));
            records.back().first_unit = static_cast<std::uint32_t>(unit_records.size());
            const std::int64_t units_down = (by_units[i].extents[0] + shapes[i].rows - 1) / shapes[i].rows;
            const std::uint32_t end = add_count(records.back().first_unit, units_down * by_units[i].groups_across());
            unit_records.resize(end, static_cast<std::uint32_t>(records.size() - 1));
        }
        launch.num_units = static_cast<std::uint32_t>(unit_records.size()) - launch.first_unit;
        if (launch.num_units == 0) continue;
        launches_.push_back(launch);
        check_cuda(cudaFuncSetAttribute(unit_kernel_of(launch.threads), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        shared_bytes),
                   "cudaFuncSetAttribute");
    }
    num_others_ = static_cast<std::uint32_t>(others.size());
    num_groups_ = first_groups.back();
    Part parts[] = {part_of(records), part_of(unit_records), part_of(others), part_of(first_groups)};
    memory_ = upload(parts, device_bytes_);
    unit_records_at_ = parts[1].at;
    others_at_ = parts[2].at;
    first_groups_at_ = parts[3].at;
    int per_sm = 0;
    check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, group_kernel, kGroupThreads, 0),
               "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    const int num_sms = attribute_of(cudaDevAttrMultiProcessorCount, device_);
    group_blocks_ = std::min<unsigned>(num_groups_, static_cast<unsigned>(num_sms * std::max(1, per_sm)));
}

void QuantDeviceTable::launch(std::uint64_t stream_handle) const {
    if (num_launches() == 0) return;
    const DeviceScope scope(device_);
    const auto* memory = static_cast<const char*>(memory_.get());
    auto* stream = reinterpret_cast<cudaStream_t>(stream_handle);
    for (const UnitLaunch& launch : launches_) {
        UnitTable table{reinterpret_cast<const UnitRecord*>(memory),
                        reinterpret_cast<const std::uint32_t*>(memory + unit_records_at_), launch.first_unit};
        void* arguments[] = {&table};
        check_cuda(cudaLaunchKernel(unit_kernel_of(launch.threads), dim3(launch.num_units), dim3(launch.threads),
                                    arguments, launch.shared_bytes, stream),
                   "launching the quantising kernel");
    }
    if (num_groups_ == 0) return;
    GroupTable table{reinterpret_cast<const QuantRecord*>(memory + others_at_),
                     reinterpret_cast<const std::uint32_t*>(memory + first_groups_at_), num_others_, num_groups_};
    void* arguments[] = {&table};
    check_cuda(cudaLaunchKernel(reinterpret_cast<const void*>(group_kernel), dim3(group_blocks_), dim3(kGroupThreads),
                                arguments, 0, stream),
               "launching the quantising kernel of single groups");
}

}  // namespace reshard
