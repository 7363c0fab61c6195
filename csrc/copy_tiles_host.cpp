// A tile plan on host memory: the device's index arithmetic, one vector after the other.
#include <cstring>

#include "copy_tiles.h"

namespace reshard {
namespace {

template <typename Src, typename Dst>
void cast_items(const unsigned char* src, unsigned char* dst, int items) {
    for (int i = 0; i < items; ++i) {
        typename Src::Bits bits;
        std::memcpy(&bits, src + i * sizeof bits, sizeof bits);
        const typename Dst::Bits value = Dst::narrow(Src::widen(bits));
        std::memcpy(dst + i * sizeof value, &value, sizeof value);
    }
}

void move_vector(VectorOp op, const unsigned char* src, unsigned char* dst) {
    switch (op) {
        case VectorOp::kBytes1:
        case VectorOp::kBytes2:
        case VectorOp::kBytes4:
        case VectorOp::kBytes8:
        case VectorOp::kBytes16:
            std::memcpy(dst, src, std::size_t{1} << static_cast<int>(op));
            return;
        case VectorOp::kF32ToBf16x1:
            return cast_items<Float32, BFloat16>(src, dst, 1);
        case VectorOp::kF32ToBf16x4:
            return cast_items<Float32, BFloat16>(src, dst, 4);
        case VectorOp::kF32ToBf16x8:
            return cast_items<Float32, BFloat16>(src, dst, 8);
        case VectorOp::kF32ToF16x1:
            return cast_items<Float32, Float16>(src, dst, 1);
        case VectorOp::kF32ToF16x4:
            return cast_items<Float32, Float16>(src, dst, 4);
        case VectorOp::kF32ToF16x8:
            return cast_items<Float32, Float16>(src, dst, 8);
        case VectorOp::kBf16ToF32x1:
            return cast_items<BFloat16, Float32>(src, dst, 1);
        case VectorOp::kBf16ToF32x4:
            return cast_items<BFloat16, Float32>(src, dst, 4);
        case VectorOp::kF16ToF32x1:
            return cast_items<Float16, Float32>(src, dst, 1);
        case VectorOp::kF16ToF32x4:
            return cast_items<Float16, Float32>(src, dst, 4);
        case VectorOp::kBf16ToF16x1:
            return cast_items<BFloat16, Float16>(src, dst, 1);
        case VectorOp::kBf16ToF16x8:
            return cast_items<BFloat16, Float16>(src, dst, 8);
        case VectorOp::kF16ToBf16x1:
            return cast_items<Float16, BFloat16>(src, dst, 1);
        case VectorOp::kF16ToBf16x8:
            return cast_items<Float16, BFloat16>(src, dst, 8);
    }
}

template <typename Visit>
void for_each_vector(const TilePlan& plan, Visit visit) {
    for (std::uint32_t tile = 0; tile < plan.tile_records.size(); ++tile) {
        const TileRecord& record = plan.records[plan.tile_records[tile]];
        const std::uint32_t begin = (tile - record.first_tile) * plan.options.tile_vectors;
        for (std::uint32_t i = 0; i < plan.options.tile_vectors && begin + i < record.num_vectors; ++i)
            visit(record, begin + i);
    }
}

}  // namespace

void run_tiles_on_host(const TilePlan& plan) {
    for_each_vector(plan, [&](const TileRecord& record, std::uint32_t vector) {
        const VectorIndex index(record, vector);
        const auto* src = reinterpret_cast<const unsigned char*>(record.src) + index.offset(record.src_steps);
        for (std::uint32_t t = 0; t <= record.num_more; ++t) {
            const TileTarget& target = plan.target(record, t);
            move_vector(record.op, src, reinterpret_cast<unsigned char*>(target.dst) + index.offset(target.dst_steps));
        }
    });
}

std::vector<std::uint64_t> checksum_tiles_on_host(const TilePlan& plan, std::size_t num_records, bool of_destination) {
    std::vector<std::uint64_t> sums(num_records, 0);
    for_each_vector(plan, [&](const TileRecord& record, std::uint32_t vector) {
        if (vector % record.vectors_per_item != 0) return;
        const VectorIndex index(record, vector);
        const auto* src = reinterpret_cast<const unsigned char*>(record.src) + index.offset(record.src_steps);
        unsigned char moved[16];
        const bool is_odd = record.vectors_per_item > 1;
        if (!of_destination && !is_odd) move_vector(record.op, src, moved);
        const std::uint64_t element =
            record.first_element + std::uint64_t{vector} / record.vectors_per_item * record.items_per_vector;
        for (std::uint32_t t = 0; t <= record.num_more; ++t) {
            const TileTarget& target = plan.target(record, t);
            const auto* dst = reinterpret_cast<const unsigned char*>(target.dst) + index.offset(target.dst_steps);
            const unsigned char* items = of_destination ? dst : is_odd ? src : moved;
            for (std::uint32_t i = 0; i < record.items_per_vector; ++i)
                sums[record.table_record + t] +=
                    mix_item(items + i * record.dst_itemsize, record.dst_itemsize, element + i);
        }
    });
    return sums;
}

}  // namespace reshard
