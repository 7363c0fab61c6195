// Contiguous rows with AVX2 and F16C, chosen at run time on x86-64 processors that have them.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstring>

#include "convert.h"
#include "host_rows.h"

#define RESHARD_AVX2 __attribute__((target("avx2,f16c")))
#define RESHARD_AVX2_INLINE __attribute__((target("avx2,f16c"), always_inline)) static inline

namespace reshard {
namespace {

struct Float32 {
    using Bits = std::uint32_t;
    static constexpr std::int64_t kSize = 4;
    RESHARD_AVX2_INLINE __m256 widen8(const unsigned char* src) {
        return _mm256_loadu_ps(reinterpret_cast<const float*>(src));
    }
    RESHARD_AVX2_INLINE std::uint32_t widen(Bits bits) { return bits; }
    RESHARD_AVX2_INLINE Bits narrow(std::uint32_t bits) { return bits; }
};

struct BFloat16 {
    using Bits = std::uint16_t;
    static constexpr std::int64_t kSize = 2;
    RESHARD_AVX2_INLINE __m256 widen8(const unsigned char* src) {
        const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
    }
    // Eight 32-bit lanes, each holding one 16-bit result.
    RESHARD_AVX2_INLINE __m256i narrow8(__m256 values) {
        const __m256i bits = _mm256_castps_si256(values);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const __m256i bias = _mm256_add_epi32(_mm256_set1_epi32(0x7fff), odd);
        return _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
    }
    RESHARD_AVX2_INLINE std::uint32_t widen(Bits bits) { return f32_from_bf16(bits); }
    RESHARD_AVX2_INLINE Bits narrow(std::uint32_t bits) { return bf16_from_f32(bits); }
};

struct Float16 {
    using Bits = std::uint16_t;
    static constexpr std::int64_t kSize = 2;
    RESHARD_AVX2_INLINE __m256 widen8(const unsigned char* src) {
        const __m256 values = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src)));
        const __m256 is_nan = _mm256_cmp_ps(values, values, _CMP_UNORD_Q);
        return _mm256_blendv_ps(values, _mm256_castsi256_ps(_mm256_set1_epi32(kNan32)), is_nan);
    }
    RESHARD_AVX2_INLINE __m256i narrow8(__m256 values) {
        return _mm256_cvtepu16_epi32(_mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
    RESHARD_AVX2_INLINE std::uint32_t widen(Bits bits) { return f32_from_f16(bits); }
    RESHARD_AVX2_INLINE Bits narrow(std::uint32_t bits) { return f16_from_f32(bits); }
};

template <bool Streaming>
RESHARD_AVX2_INLINE void store32(unsigned char* dst, __m256i value) {
    if constexpr (Streaming)
        _mm256_stream_si256(reinterpret_cast<__m256i*>(dst), value);
    else
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst), value);
}

template <typename Half>
RESHARD_AVX2_INLINE __m256i narrow8_canonical(__m256 values) {
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(Half::narrow8(values), _mm256_set1_epi32(kNan16), is_nan);
}

// Sixteen elements.
template <typename Src, typename Dst, bool Streaming>
RESHARD_AVX2_INLINE void cast16(const unsigned char* src, unsigned char* dst) {
    const __m256 low = Src::widen8(src);
    const __m256 high = Src::widen8(src + 8 * Src::kSize);
    if constexpr (Dst::kSize == 4) {
        store32<Streaming>(dst, _mm256_castps_si256(low));
        store32<Streaming>(dst + 32, _mm256_castps_si256(high));
    } else {
        const __m256i packed = _mm256_packus_epi32(narrow8_canonical<Dst>(low), narrow8_canonical<Dst>(high));
        store32<Streaming>(dst, _mm256_permute4x64_epi64(packed, 0b11011000));
    }
}

template <typename Src, typename Dst>
RESHARD_AVX2_INLINE void cast_one(const unsigned char* src, unsigned char* dst) {
    typename Src::Bits bits;
    std::memcpy(&bits, src, sizeof bits);
    const typename Dst::Bits value = Dst::narrow(Src::widen(bits));
    std::memcpy(dst, &value, sizeof value);
}

// Number of elements before `dst` reaches a 32-byte boundary, or `count` where it never does.
RESHARD_AVX2_INLINE std::int64_t head_elements(const unsigned char* dst, std::int64_t itemsize, std::int64_t count) {
    const std::int64_t bytes = -static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(dst)) & 31;
    return bytes % itemsize == 0 && bytes / itemsize < count ? bytes / itemsize : count;
}

template <typename Src, typename Dst, bool Streaming>
RESHARD_AVX2 void cast_row(const unsigned char* src, unsigned char* dst, std::int64_t count, std::int64_t, std::int64_t,
                           std::int64_t) {
    std::int64_t i = 0;
    if constexpr (Streaming) {
        const std::int64_t head = head_elements(dst, Dst::kSize, count);
        for (; i < head; ++i) cast_one<Src, Dst>(src + i * Src::kSize, dst + i * Dst::kSize);
    }
    for (; i + 16 <= count; i += 16) cast16<Src, Dst, Streaming>(src + i * Src::kSize, dst + i * Dst::kSize);
    for (; i < count; ++i) cast_one<Src, Dst>(src + i * Src::kSize, dst + i * Dst::kSize);
}

RESHARD_AVX2 void stream_row(const unsigned char* src, unsigned char* dst, std::int64_t count, std::int64_t,
                             std::int64_t, std::int64_t itemsize) {
    const std::int64_t bytes = count * itemsize;
    std::int64_t i = head_elements(dst, 1, bytes);
    std::memcpy(dst, src, static_cast<std::size_t>(i));
    for (; i + 64 <= bytes; i += 64) {
        const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i));
        const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i + 32));
        store32<true>(dst + i, low);
        store32<true>(dst + i + 32, high);
    }
    std::memcpy(dst + i, src + i, static_cast<std::size_t>(bytes - i));
}

template <bool Streaming>
RowCopy choose(std::uint8_t src, std::uint8_t dst) {
    static constexpr RowCopy kTable[3][3] = {
        {nullptr, cast_row<Float32, BFloat16, Streaming>, cast_row<Float32, Float16, Streaming>},
        {cast_row<BFloat16, Float32, Streaming>, nullptr, cast_row<BFloat16, Float16, Streaming>},
        {cast_row<Float16, Float32, Streaming>, cast_row<Float16, BFloat16, Streaming>, nullptr},
    };
    return kTable[src][dst];
}

}  // namespace

bool has_avx2_f16c() {
    static const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
    return has;
}

RowCopy choose_avx2_row_copy(const CopyRecord& record, bool streaming) {
    if (!record.is_cast()) return streaming ? stream_row : nullptr;
    return streaming ? choose<true>(record.src_dtype, record.dst_dtype)
                     : choose<false>(record.src_dtype, record.dst_dtype);
}

}  // namespace reshard

#endif
