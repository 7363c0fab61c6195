// One vector of a copy in registers: how each VectorOp loads, converts and stores.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "copy_tiles.h"

namespace reshard {

// Every byte is used once, but hints that say so (streaming, or past the nearest cache) measured slower or the same on
// an H200: they are ordinary accesses.
template <typename Word>
__device__ __forceinline__ Word load_once(const void* address) {
    return *static_cast<const Word*>(address);
}

template <typename Word>
__device__ __forceinline__ void store_once(void* address, Word word) {
    *static_cast<Word*>(address) = word;
}

struct DeviceBFloat16 {
    static constexpr int kBytes = 2;
    static __device__ __forceinline__ std::uint32_t pack2(float low, float high) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        return reinterpret_cast<const std::uint32_t&>(pair);
    }
    static __device__ __forceinline__ float2 unpack2(std::uint32_t pair) {
        return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
    }
};

struct DeviceFloat16 {
    static constexpr int kBytes = 2;
    static __device__ __forceinline__ std::uint32_t pack2(float low, float high) {
        const __half2 pair = __floats2half2_rn(low, high);
        return reinterpret_cast<const std::uint32_t&>(pair);
    }
    static __device__ __forceinline__ float2 unpack2(std::uint32_t pair) {
        return __half22float2(reinterpret_cast<const __half2&>(pair));
    }
};

struct DeviceFloat32 {
    static constexpr int kBytes = 4;
};

template <int kBytes>
struct WordOf;
template <>
struct WordOf<1> {
    using Type = unsigned char;
};
template <>
struct WordOf<2> {
    using Type = unsigned short;
};
template <>
struct WordOf<4> {
    using Type = unsigned;
};
template <>
struct WordOf<8> {
    using Type = uint2;
};
template <>
struct WordOf<16> {
    using Type = uint4;
};

// A mover has: Loaded, what a load leaves in registers; Stored, the destination's word; load, convert.
template <int kBytes>
struct BytesMover {
    using Loaded = typename WordOf<kBytes>::Type;
    using Stored = Loaded;
    static __device__ __forceinline__ Loaded load(const void* src) { return load_once<Loaded>(src); }
    static __device__ __forceinline__ Stored convert(Loaded loaded) { return loaded; }
};

template <typename Dst>
struct NarrowMover1 {
    using Loaded = unsigned;
    using Stored = unsigned short;
    static __device__ __forceinline__ Loaded load(const void* src) { return load_once<Loaded>(src); }
    static __device__ __forceinline__ Stored convert(Loaded loaded) {
        return static_cast<Stored>(Dst::pack2(__uint_as_float(loaded), 0.0f));
    }
};

template <typename Dst>
struct NarrowMover4 {
    using Loaded = uint4;
    using Stored = uint2;
    static __device__ __forceinline__ Loaded load(const void* src) { return load_once<Loaded>(src); }
    static __device__ __forceinline__ Stored convert(Loaded v) {
        return {Dst::pack2(__uint_as_float(v.x), __uint_as_float(v.y)),
                Dst::pack2(__uint_as_float(v.z), __uint_as_float(v.w))};
    }
};

template <typename Dst>
struct NarrowMover8 {
    struct Loaded {
        uint4 low, high;
    };
    using Stored = uint4;
    static __device__ __forceinline__ Loaded load(const void* src) {
        return {load_once<uint4>(src), load_once<uint4>(static_cast<const uint4*>(src) + 1)};
    }
    static __device__ __forceinline__ Stored convert(Loaded v) {
        const uint2 low = NarrowMover4<Dst>::convert(v.low);
        const uint2 high = NarrowMover4<Dst>::convert(v.high);
        return {low.x, low.y, high.x, high.y};
    }
};

template <typename Src>
struct WidenMover1 {
    using Loaded = unsigned short;
    using Stored = unsigned;
    static __device__ __forceinline__ Loaded load(const void* src) { return load_once<Loaded>(src); }
    static __device__ __forceinline__ Stored convert(Loaded loaded) { return __float_as_uint(Src::unpack2(loaded).x); }
};

template <typename Src>
struct WidenMover4 {
    using Loaded = uint2;
    using Stored = uint4;
    static __device__ __forceinline__ Loaded load(const void* src) { return load_once<Loaded>(src); }
    static __device__ __forceinline__ Stored convert(Loaded v) {
        const float2 low = Src::unpack2(v.x);
        const float2 high = Src::unpack2(v.y);
        return {__float_as_uint(low.x), __float_as_uint(low.y), __float_as_uint(high.x), __float_as_uint(high.y)};
    }
};

template <typename Src, typename Dst>
struct HalvesMover1 {
    using Loaded = unsigned short;
    using Stored = unsigned short;
    static __device__ __forceinline__ Loaded load(const void* src) { return load_once<Loaded>(src); }
    static __device__ __forceinline__ Stored convert(Loaded loaded) {
        return static_cast<Stored>(Dst::pack2(Src::unpack2(loaded).x, 0.0f));
    }
};

template <typename Src, typename Dst>
struct HalvesMover8 {
    using Loaded = uint4;
    using Stored = uint4;
    static __device__ __forceinline__ Loaded load(const void* src) { return load_once<Loaded>(src); }
    static __device__ __forceinline__ unsigned convert2(unsigned pair) {
        const float2 values = Src::unpack2(pair);
        return Dst::pack2(values.x, values.y);
    }
    static __device__ __forceinline__ Stored convert(Loaded v) {
        return {convert2(v.x), convert2(v.y), convert2(v.z), convert2(v.w)};
    }
};

// Calls visit(mover) with the mover of `op`.
template <typename Visit>
__device__ __forceinline__ void with_mover(VectorOp op, Visit visit) {
    switch (op) {
        case VectorOp::kBytes1:
            return visit(BytesMover<1>{});
        case VectorOp::kBytes2:
            return visit(BytesMover<2>{});
        case VectorOp::kBytes4:
            return visit(BytesMover<4>{});
        case VectorOp::kBytes8:
            return visit(BytesMover<8>{});
        case VectorOp::kBytes16:
            return visit(BytesMover<16>{});
        case VectorOp::kF32ToBf16x1:
            return visit(NarrowMover1<DeviceBFloat16>{});
        case VectorOp::kF32ToBf16x4:
            return visit(NarrowMover4<DeviceBFloat16>{});
        case VectorOp::kF32ToBf16x8:
            return visit(NarrowMover8<DeviceBFloat16>{});
        case VectorOp::kF32ToF16x1:
            return visit(NarrowMover1<DeviceFloat16>{});
        case VectorOp::kF32ToF16x4:
            return visit(NarrowMover4<DeviceFloat16>{});
        case VectorOp::kF32ToF16x8:
            return visit(NarrowMover8<DeviceFloat16>{});
        case VectorOp::kBf16ToF32x1:
            return visit(WidenMover1<DeviceBFloat16>{});
        case VectorOp::kBf16ToF32x4:
            return visit(WidenMover4<DeviceBFloat16>{});
        case VectorOp::kF16ToF32x1:
            return visit(WidenMover1<DeviceFloat16>{});
        case VectorOp::kF16ToF32x4:
            return visit(WidenMover4<DeviceFloat16>{});
        case VectorOp::kBf16ToF16x1:
            return visit(HalvesMover1<DeviceBFloat16, DeviceFloat16>{});
        case VectorOp::kBf16ToF16x8:
            return visit(HalvesMover8<DeviceBFloat16, DeviceFloat16>{});
        case VectorOp::kF16ToBf16x1:
            return visit(HalvesMover1<DeviceFloat16, DeviceBFloat16>{});
        case VectorOp::kF16ToBf16x8:
            return visit(HalvesMover8<DeviceFloat16, DeviceBFloat16>{});
    }
}

}  // namespace reshard
