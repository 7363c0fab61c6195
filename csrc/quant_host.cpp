#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "host_threads.h"
#include "quant_table.h"

namespace reshard {
namespace {

std::string describe_problem(const QuantRecord& record) {
    if (record.extents[0] < 1 || record.extents[1] < 1) return "an extent is below 1";
    if (record.src == 0 || record.dst == 0 || record.scale == 0) return "an address is null";
    if (record.src_dtype > kFloat16)
        return "there is no quantising copy from dtype code " + std::to_string(record.src_dtype);
    if (record.mode > QuantMode::kBlocksUe8m0) return "an unknown mode";
    const std::uint64_t size = record.src_dtype == kFloat32 ? 4 : 2;
    const auto bits = [](const std::int64_t (&strides)[2]) {
        return static_cast<std::uint64_t>(strides[0] | strides[1]);
    };
    if ((record.src | bits(record.src_strides)) % size != 0)
        return "its source elements are not aligned to their own size";
    if ((record.scale | bits(record.scale_strides)) % 4 != 0) return "its scales are not aligned to 4 bytes";
    return {};
}

std::uint32_t load_bits(const QuantRecord& record, std::int64_t row, std::int64_t column) {
    const auto* at = reinterpret_cast<const unsigned char*>(record.src) + row * record.src_strides[0] +
                     column * record.src_strides[1];
    std::uint32_t bits;
    if (record.src_dtype == kFloat32) {
        std::memcpy(&bits, at, sizeof bits);
    } else {
        std::uint16_t half;
        std::memcpy(&half, at, sizeof half);
        bits = record.src_dtype == kBFloat16 ? f32_from_bf16(half) : f32_from_f16(half);
    }
    return record.through_bf16 ? f32_from_bf16(bf16_from_f32(bits)) : bits;
}

void quantize_group(const QuantRecord& record, std::int64_t group) {
    const std::int64_t down = group / record.groups_across();
    const std::int64_t across = group % record.groups_across();
    const bool by_rows = record.mode == QuantMode::kRows;
    const std::int64_t first_row = by_rows ? down : down * kQuantBlock;
    const std::int64_t last_row = by_rows ? down + 1 : std::min(first_row + kQuantBlock, record.extents[0]);
    const std::int64_t first_column = by_rows ? 0 : across * kQuantBlock;
    const std::int64_t last_column =
        by_rows ? record.extents[1] : std::min(first_column + kQuantBlock, record.extents[1]);
    std::uint32_t amax = 0;
    for (std::int64_t row = first_row; row < last_row; ++row)
        for (std::int64_t column = first_column; column < last_column; ++column)
            amax = larger_magnitude(amax, load_bits(record, row, column));
    const bool twice = record.mode == QuantMode::kBlocksUe8m0;
    const float first_scale = group_scale(record.mode, amax), first_inverse = 1.0f / first_scale;
    const float scale = twice ? ue8m0_scale(amax, first_scale, first_inverse) : first_scale;
    const float inverse = 1.0f / scale;
    std::memcpy(reinterpret_cast<unsigned char*>(record.scale) + down * record.scale_strides[0] +
                    across * record.scale_strides[1],
                &scale, sizeof scale);
    for (std::int64_t row = first_row; row < last_row; ++row) {
        auto* dst = reinterpret_cast<unsigned char*>(record.dst) + row * record.dst_strides[0];
        for (std::int64_t column = first_column; column < last_column; ++column) {
            float x = bits_float(load_bits(record, row, column));
            if (twice) x = bits_float(f32_from_e4m3(e4m3_from_f32(float_bits(x * first_inverse)))) * first_scale;
            dst[column * record.dst_strides[1]] = e4m3_from_f32(float_bits(by_rows ? x / scale : x * inverse));
        }
    }
}

}  // namespace

void check_quant_records(QuantTable table) {
    for (std::size_t i = 0; i < table.size(); ++i)
        if (const std::string problem = describe_problem(table[i]); !problem.empty())
            throw std::invalid_argument("quantising table record " + std::to_string(i) + ": " + problem);
}

void quantize_host(QuantTable table, int num_threads) {
    check_quant_records(table);
    std::vector<std::int64_t> first{0};
    for (const QuantRecord& record : table) first.push_back(first.back() + record.num_groups());
    run_on_threads(first.back(), num_threads, [&](std::int64_t group) {
        const auto record = std::upper_bound(first.begin(), first.end(), group) - first.begin() - 1;
        quantize_group(table[static_cast<std::size_t>(record)], group - first[static_cast<std::size_t>(record)]);
    });
}

}  // namespace reshard
