// Values in registers on their way into e4m3, by the rules of quant_table.h.
#pragma once

#include <cuda_fp8.h>

#include <type_traits>

#include "copy_vectors.cuh"
#include "quant_table.h"

namespace reshard {

__device__ __forceinline__ unsigned quantize_two(float low, float high) {
    return __nv_cvt_float2_to_fp8x2({low, high}, __NV_SATFINITE, __NV_E4M3);
}

__device__ __forceinline__ unsigned quantize_four(float a, float b, float c, float d) {
    return quantize_two(a, b) | quantize_two(c, d) << 16;
}

__device__ __forceinline__ unsigned char quantize_one(float x) {
    return static_cast<unsigned char>(__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3));
}

__device__ __forceinline__ float float_of_e4m3(unsigned char value) {
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(value, __NV_E4M3)));
}

__device__ __forceinline__ float reciprocal(float x, bool full_division) {
    if (!full_division) return 1.0f / x;
    float result;
    asm("div.full.f32 %0, %1, %2;" : "=f"(result) : "f"(1.0f), "f"(x));
    return result;
}

struct Scaling {
    QuantMode mode;
    float first_scale, first_inverse;  // of kBlocksUe8m0's first quantising; else the same as the others
    float scale, inverse;
    bool is_finite;

    __device__ Scaling(QuantMode mode, bool full_division, std::uint32_t amax)
        : mode(mode), first_scale(group_scale(mode, amax)), first_inverse(reciprocal(first_scale, full_division)) {
        const bool twice = mode == QuantMode::kBlocksUe8m0;
        scale = twice ? ue8m0_scale(amax, first_scale, first_inverse) : first_scale;
        inverse = twice ? 1.0f / scale : first_inverse;
        is_finite = isfinite(scale);
    }

    // What is left of x after the first quantising, over the second scale.
    __device__ __forceinline__ float quantised_before(float x) const {
        return float_of_e4m3(quantize_one(x * first_inverse)) * first_scale * inverse;
    }

    // x / scale, rounded to nearest, for a finite scale: the first correction brings the quotient to within one unit in
    // the last place, from where the second makes it exact (Markstein, "Computation of elementary functions on the IBM
    // RISC System/6000 processor", 1990: `inverse` is 1 / scale so rounded). Residuals that underflow belong to
    // quotients that are zero in e4m3. A zero takes its sign from x: the corrections lose it.
    __device__ __forceinline__ float divided(float x) const {
        float quotient = x * inverse;
        quotient = __fmaf_rn(__fmaf_rn(-quotient, scale, x), inverse, quotient);
        return copysignf(__fmaf_rn(__fmaf_rn(-quotient, scale, x), inverse, quotient), x);
    }

    __device__ __forceinline__ float operator()(float x) const {
        if (mode == QuantMode::kBlocksUe8m0) return quantised_before(x);
        return mode == QuantMode::kRows ? x / scale : x * inverse;
    }
};

// Sixteen bytes of source as the engine's quantiser would see them: Float32Values, where that is in fp32.
struct Float32Values {
    static constexpr int kElements = 4;
    float x[4];

    struct Largest {
        std::uint32_t amax = 0;
        __device__ std::uint32_t bits() const { return amax; }
    };

    __device__ __forceinline__ explicit Float32Values(uint4 bits) {
        const unsigned words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = __uint_as_float(words[i]);
    }

    __device__ __forceinline__ void find_largest(Largest& largest) const {
#pragma unroll
        for (const float value : x) largest.amax = larger_magnitude(largest.amax, __float_as_uint(value));
    }

    template <typename Scale>
    __device__ __forceinline__ void store(char* at, Scale scale) const {
        store_once(at, quantize_four(scale(x[0]), scale(x[1]), scale(x[2]), scale(x[3])));
    }
};

// Eight fp16 values that stay as they are.
struct Float16Values {
    static constexpr int kElements = 8;
    using Largest = Float32Values::Largest;
    float x[8];

    __device__ __forceinline__ explicit Float16Values(uint4 bits) {
        const unsigned words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 two = DeviceFloat16::unpack2(words[i]);
            x[2 * i] = two.x;
            x[2 * i + 1] = two.y;
        }
    }

    __device__ __forceinline__ void find_largest(Largest& largest) const {
#pragma unroll
        for (const float value : x) largest.amax = larger_magnitude(largest.amax, __float_as_uint(value));
    }

    template <typename Scale>
    __device__ __forceinline__ void store(char* at, Scale scale) const {
        store_once(at, uint2{quantize_four(scale(x[0]), scale(x[1]), scale(x[2]), scale(x[3])),
                             quantize_four(scale(x[4]), scale(x[5]), scale(x[6]), scale(x[7]))});
    }
};

// Values in bf16, or rounded to it, two a word.
template <std::uint8_t kSrc>
struct BFloat16Values {
    static constexpr int kElements = kSrc == kFloat32 ? 4 : 8;
    unsigned pairs[kElements / 2];

    struct Largest {
        __nv_bfloat162 amax = __floats2bfloat162_rn(0.0f, 0.0f);
        __device__ std::uint32_t bits() const {
            const float2 two = __bfloat1622float2(amax);
            return max(__float_as_uint(two.x), __float_as_uint(two.y));
        }
    };

    __device__ __forceinline__ explicit BFloat16Values(uint4 bits) {
        if constexpr (kSrc == kFloat32) {
            pairs[0] = DeviceBFloat16::pack2(__uint_as_float(bits.x), __uint_as_float(bits.y));
            pairs[1] = DeviceBFloat16::pack2(__uint_as_float(bits.z), __uint_as_float(bits.w));
        } else {
            const unsigned words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 two = DeviceFloat16::unpack2(words[i]);
                pairs[i] = kSrc == kBFloat16 ? words[i] : DeviceBFloat16::pack2(two.x, two.y);
            }
        }
    }

    // A NaN is the largest of all.
    __device__ __forceinline__ void find_largest(Largest& largest) const {
#pragma unroll
        for (const unsigned pair : pairs)
            largest.amax = __hmax2_nan(largest.amax, __habs2(reinterpret_cast<const __nv_bfloat162&>(pair)));
    }

    template <typename Scale>
    __device__ __forceinline__ unsigned quantized(int word, Scale scale) const {
        const float2 low = DeviceBFloat16::unpack2(pairs[2 * word]);
        const float2 high = DeviceBFloat16::unpack2(pairs[2 * word + 1]);
        return quantize_four(scale(low.x), scale(low.y), scale(high.x), scale(high.y));
    }

    template <typename Scale>
    __device__ __forceinline__ void store(char* at, Scale scale) const {
        if constexpr (kElements == 4)
            store_once(at, quantized(0, scale));
        else
            store_once(at, uint2{quantized(0, scale), quantized(1, scale)});
    }
};

template <typename Values>
struct ValuesTag {
    using Type = Values;
};

// Calls visit(ValuesTag<the type of a chunk's values>).
template <typename Visit>
__device__ __forceinline__ void with_values(std::uint8_t src_dtype, bool through_bf16, Visit visit) {
    if (src_dtype == kBFloat16) return visit(ValuesTag<BFloat16Values<kBFloat16>>{});
    if (src_dtype == kFloat32)
        return through_bf16 ? visit(ValuesTag<BFloat16Values<kFloat32>>{}) : visit(ValuesTag<Float32Values>{});
    return through_bf16 ? visit(ValuesTag<BFloat16Values<kFloat16>>{}) : visit(ValuesTag<Float16Values>{});
}

}  // namespace reshard
