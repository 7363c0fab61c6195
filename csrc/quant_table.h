// Quantising copies: fp32, bf16 or fp16 matrices into fp8 (e4m3) with fp32 scales. reshard/quant.py builds the table.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

#include "convert.h"
#include "copy_table.h"

namespace reshard {

// How a scale comes from the largest magnitude of its group, and a quantised value from the scale, all in fp32:
//   kBlocks  groups of 128 x 128: scale = max(amax, 1e-4) * fl(1/448), value = x * fl(1/scale)
//   kRows    groups of one row:   scale = max(amax / 448, 1/(448*512)), value = x / scale
//   kBlocksUe8m0  as kBlocks, and then once more with scales that are powers of two: from y = value * scale,
//            scale = 2^ceil(log2(max(amax of y, 1e-4) * fl(1/448))), value = y * (1/scale)
// and value is rounded to e4m3, to nearest even, at most 448. These are the operations of the engine's own quantisers
// on a GPU (a division by the scalar 448 is a multiplication by its reciprocal there), so finite weights come out bit
// for bit the same. A NaN gives 0x7f, and its group a NaN scale.
enum class QuantMode : std::uint8_t { kBlocks = 0, kRows = 1, kBlocksUe8m0 = 2 };

inline constexpr std::int64_t kQuantBlock = 128;
inline constexpr std::uint8_t kFloat8E4M3 = 3;

// A matrix whose first element begins a group on both axes. Strides in bytes. One scale per group: scale_strides step
// from one group to the next, down and across (across is unused in rows).
struct QuantRecord {
    std::uint64_t src;
    std::uint64_t dst;
    std::uint64_t scale;
    std::int64_t extents[2];
    std::int64_t src_strides[2];
    std::int64_t dst_strides[2];
    std::int64_t scale_strides[2];
    std::uint8_t src_dtype;
    QuantMode mode;
    std::uint8_t through_bf16;  // 1: round to bf16 first, as an engine that loads bf16 weights sees them
    // 1: fl(1/scale) of blocks is what a GPU's div.full.f32 gives, to within 2 ulp, as in kernels that Triton compiles
    // (PTX ISA, div); the host rounds it correctly all the same.
    std::uint8_t full_division;
    std::uint8_t reserved[36];

    std::int64_t groups_across() const {
        return mode == QuantMode::kRows ? 1 : (extents[1] + kQuantBlock - 1) / kQuantBlock;
    }
    std::int64_t groups_down() const {
        return mode == QuantMode::kRows ? extents[0] : (extents[0] + kQuantBlock - 1) / kQuantBlock;
    }
    std::int64_t num_groups() const { return groups_down() * groups_across(); }
};

static_assert(sizeof(QuantRecord) == 128 && offsetof(QuantRecord, src_dtype) == 88);

using QuantTable = std::span<const QuantRecord>;

// Throws std::invalid_argument, naming the record, for extents below 1, null or misaligned addresses, unknown types.
void check_quant_records(QuantTable table);

// Runs every record on host memory, on up to num_threads threads (0: all).
void quantize_host(QuantTable table, int num_threads);

RESHARD_HOST_DEVICE inline std::uint8_t e4m3_from_f32(std::uint32_t bits) {
    const std::uint32_t sign = (bits >> 24) & 0x80u;
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7f;
    if (magnitude >= 0x43e00000u) return static_cast<std::uint8_t>(sign | 0x7eu);  // 448, the largest
    if (magnitude < 0x3c800000u) {
        // Below 2^-6 the result is subnormal: adding 2^14 makes the float adder round to a multiple of 2^-9.
        const float shifted = bits_float(magnitude) + 16384.0f;
        return static_cast<std::uint8_t>(sign | (float_bits(shifted) - 0x46800000u));
    }
    const std::uint32_t rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u);
    return static_cast<std::uint8_t>(sign | ((rounded - 0x3c000000u) >> 20));
}

// Whether the larger of two magnitudes, as bits; a NaN is larger than all.
RESHARD_HOST_DEVICE inline std::uint32_t larger_magnitude(std::uint32_t amax, std::uint32_t bits) {
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    return amax > magnitude ? amax : magnitude;
}

RESHARD_HOST_DEVICE inline float group_scale(QuantMode mode, std::uint32_t amax_bits) {
    const float amax = bits_float(amax_bits);
    if (mode != QuantMode::kRows) return (amax < 1e-4f ? 1e-4f : amax) * (1.0f / 448.0f);
    const float scale = amax / 448.0f;
    constexpr float kSmallest = 1.0f / (448.0f * 512.0f);
    return scale < kSmallest ? kSmallest : scale;
}

RESHARD_HOST_DEVICE inline std::uint32_t f32_from_e4m3(std::uint8_t value) {
    const std::uint32_t sign = (value & 0x80u) << 24;
    const std::uint32_t magnitude = value & 0x7fu;
    if (magnitude == 0x7f) return 0x7fc00000u;
    if (magnitude < 8) return sign | float_bits(static_cast<float>(magnitude) * (1.0f / 512.0f));
    return sign | ((magnitude << 20) + 0x3c000000u);
}

// The scale of kBlocksUe8m0, from the largest magnitude and kBlocks' scale and its reciprocal. The engine takes the
// logarithm in fp32, so a scale within rounding above a power of two is that power.
RESHARD_HOST_DEVICE inline float ue8m0_scale(std::uint32_t amax_bits, float scale, float inverse) {
    const float largest = bits_float(f32_from_e4m3(e4m3_from_f32(float_bits(bits_float(amax_bits) * inverse))));
    return exp2f(ceilf(log2f(group_scale(QuantMode::kBlocks, float_bits(largest * scale)))));
}

}  // namespace reshard
