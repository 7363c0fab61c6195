// Casts between fp32, bf16 and fp16, and the checksum's mixing step: one definition for host and device code.
//
// Rounding is to nearest, ties to even; overflow gives infinity; subnormals are kept. A NaN becomes the canonical NaN
// of the destination (0x7fff, or 0x7fffffff), as NVIDIA's conversion instructions do, except that bf16 to fp32 is a
// plain shift and keeps the NaN's payload.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define RESHARD_HOST_DEVICE __host__ __device__
#else
#define RESHARD_HOST_DEVICE
#endif

namespace reshard {

inline constexpr std::uint16_t kNan16 = 0x7fff;
inline constexpr std::uint32_t kNan32 = 0x7fffffff;

RESHARD_HOST_DEVICE inline std::uint32_t float_bits(float value) {
    std::uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

RESHARD_HOST_DEVICE inline float bits_float(std::uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

RESHARD_HOST_DEVICE inline std::uint16_t bf16_from_f32(std::uint32_t bits) {
    if ((bits & 0x7fffffffu) > 0x7f800000u) return kNan16;
    return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

RESHARD_HOST_DEVICE inline std::uint32_t f32_from_bf16(std::uint16_t half) {
    return static_cast<std::uint32_t>(half) << 16;
}

RESHARD_HOST_DEVICE inline std::uint16_t f16_from_f32(std::uint32_t bits) {
    const std::uint32_t sign = (bits >> 16) & 0x8000u;
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return kNan16;
    if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // 65520 and up round to infinity
    if (magnitude < 0x38800000u) {
        // Below 2^-14 the result is subnormal: adding 0.5 makes the float adder round to a multiple of 2^-24.
        const float shifted = bits_float(magnitude) + 0.5f;
        return static_cast<std::uint16_t>(sign | (float_bits(shifted) - 0x3f000000u));
    }
    const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return static_cast<std::uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

RESHARD_HOST_DEVICE inline std::uint32_t f32_from_f16(std::uint16_t half) {
    const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000u) << 16;
    const std::uint32_t magnitude = half & 0x7fffu;
    if (magnitude > 0x7c00u) return kNan32;
    if (magnitude == 0x7c00u) return sign | 0x7f800000u;
    if (magnitude >= 0x400u) return sign | ((magnitude << 13) + 0x38000000u);
    return sign | float_bits(static_cast<float>(magnitude) * 0x1p-24f);
}

// One term of a checksum: word number `index` of a box, mixed so that a changed, moved or swapped word shows. The
// checksum is the sum of all terms modulo 2^64, so it doesn't depend on the order in which they are added.
RESHARD_HOST_DEVICE inline std::uint64_t mix_word(std::uint64_t word, std::uint64_t index) {
    std::uint64_t x = (word ^ (index * 0x9e3779b97f4a7c15ull)) + 0x2545f4914f6cdd1dull;
    x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93ull;
    return x ^ (x >> 29);
}

// Element types as host code casts them: through the bits of an fp32.
struct Float32 {
    using Bits = std::uint32_t;
    static std::uint32_t widen(Bits bits) { return bits; }
    static Bits narrow(std::uint32_t bits) { return bits; }
};

struct BFloat16 {
    using Bits = std::uint16_t;
    static std::uint32_t widen(Bits bits) { return f32_from_bf16(bits); }
    static Bits narrow(std::uint32_t bits) { return bf16_from_f32(bits); }
};

struct Float16 {
    using Bits = std::uint16_t;
    static std::uint32_t widen(Bits bits) { return f32_from_f16(bits); }
    static Bits narrow(std::uint32_t bits) { return f16_from_f32(bits); }
};

}  // namespace reshard
