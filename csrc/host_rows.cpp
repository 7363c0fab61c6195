#include "host_rows.h"

#include <cstring>

#include "convert.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace reshard {
namespace {

template <typename T>
T load(const unsigned char* address) {
    T value;
    std::memcpy(&value, address, sizeof value);
    return value;
}

template <typename Src, typename Dst>
void cast_row(const unsigned char* src, unsigned char* dst, std::int64_t count, std::int64_t src_stride,
              std::int64_t dst_stride, std::int64_t) {
    for (std::int64_t i = 0; i < count; ++i) {
        const auto value = Dst::narrow(Src::widen(load<typename Src::Bits>(src + i * src_stride)));
        std::memcpy(dst + i * dst_stride, &value, sizeof value);
    }
}

template <std::size_t Itemsize>
void strided_row(const unsigned char* src, unsigned char* dst, std::int64_t count, std::int64_t src_stride,
                 std::int64_t dst_stride, std::int64_t) {
    for (std::int64_t i = 0; i < count; ++i) std::memcpy(dst + i * dst_stride, src + i * src_stride, Itemsize);
}

void any_strided_row(const unsigned char* src, unsigned char* dst, std::int64_t count, std::int64_t src_stride,
                     std::int64_t dst_stride, std::int64_t itemsize) {
    for (std::int64_t i = 0; i < count; ++i)
        std::memcpy(dst + i * dst_stride, src + i * src_stride, static_cast<std::size_t>(itemsize));
}

void contiguous_row(const unsigned char* src, unsigned char* dst, std::int64_t count, std::int64_t, std::int64_t,
                    std::int64_t itemsize) {
    std::memcpy(dst, src, static_cast<std::size_t>(count * itemsize));
}

RowCopy choose_same_type(const CopyRecord& record) {
    if (record.has_contiguous_rows()) return contiguous_row;
    switch (record.src_itemsize) {
        case 1:
            return strided_row<1>;
        case 2:
            return strided_row<2>;
        case 4:
            return strided_row<4>;
        case 8:
            return strided_row<8>;
        case 16:
            return strided_row<16>;
        default:
            return any_strided_row;
    }
}

template <typename Src>
RowCopy choose_cast(std::uint8_t dst_dtype) {
    switch (dst_dtype) {
        case kFloat32:
            return cast_row<Src, Float32>;
        case kBFloat16:
            return cast_row<Src, BFloat16>;
        default:
            return cast_row<Src, Float16>;
    }
}

RowCopy choose_portable(const CopyRecord& record) {
    if (!record.is_cast()) return choose_same_type(record);
    switch (record.src_dtype) {
        case kFloat32:
            return choose_cast<Float32>(record.dst_dtype);
        case kBFloat16:
            return choose_cast<BFloat16>(record.dst_dtype);
        default:
            return choose_cast<Float16>(record.dst_dtype);
    }
}

}  // namespace

RowCopy choose_row_copy(const CopyRecord& record, bool streaming) {
#if defined(__x86_64__)
    if (has_avx2_f16c() && record.has_contiguous_rows())
        if (RowCopy copy = choose_avx2_row_copy(record, streaming)) return copy;
#else
    (void)streaming;
#endif
    return choose_portable(record);
}

void finish_streaming() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

}  // namespace reshard
