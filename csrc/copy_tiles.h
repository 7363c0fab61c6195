// A copy table as a device runs it: records turned into vectors, vectors into tiles.
//
// A vector is what one thread moves in one step: 16 bytes of the wider side where alignment allows, fewer where not. A
// tile is a run of consecutive vectors of one record; thread blocks take tiles in turn, so work is balanced by bytes
// over records of any size. The planning is host code and the index arithmetic is shared by host and device, so that
// both are tested without a device (run_tiles_on_host).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "convert.h"
#include "copy_table.h"

namespace reshard {

// How one vector is moved. Bytes<n> copies n bytes; the casts name how many elements one vector has.
enum class VectorOp : std::uint8_t {
    kBytes1,
    kBytes2,
    kBytes4,
    kBytes8,
    kBytes16,
    kF32ToBf16x1,
    kF32ToBf16x4,
    kF32ToBf16x8,
    kF32ToF16x1,
    kF32ToF16x4,
    kF32ToF16x8,
    kBf16ToF32x1,
    kBf16ToF32x4,
    kF16ToF32x1,
    kF16ToF32x4,
    kBf16ToF16x1,
    kBf16ToF16x8,
    kF16ToBf16x1,
    kF16ToBf16x8,
};

// Whether a vector has at least 8 bytes of source.
RESHARD_HOST_DEVICE inline bool is_wide(VectorOp op) {
    switch (op) {
        case VectorOp::kBytes1:
        case VectorOp::kBytes2:
        case VectorOp::kBytes4:
        case VectorOp::kF32ToBf16x1:
        case VectorOp::kF32ToF16x1:
        case VectorOp::kBf16ToF32x1:
        case VectorOp::kF16ToF32x1:
        case VectorOp::kBf16ToF16x1:
        case VectorOp::kF16ToBf16x1:
            return false;
        default:
            return true;
    }
}

// Division by a constant, exact for numerators below 2^31: floor(n * magic / 2^(32 + shift)).
struct FastDivisor {
    std::uint32_t divisor;
    std::uint32_t magic;
    std::uint32_t shift;

    RESHARD_HOST_DEVICE std::uint32_t quotient(std::uint32_t n) const {
#ifdef __CUDA_ARCH__
        return __umulhi(n, magic) >> shift;
#else
        return static_cast<std::uint32_t>((static_cast<std::uint64_t>(n) * magic) >> 32) >> shift;
#endif
    }
};

inline constexpr int kTileDims = kNumDims + 1;

// One destination of a tile record; steps are in bytes per index.
struct TileTarget {
    std::uint64_t dst;
    std::int64_t dst_steps[kTileDims];
};

// A part of a copy record, or of a fan of them, that one VectorOp covers. Dimensions run from the innermost to the
// outermost, all with an extent of at least 2; steps are in bytes per index, a vector being one index of the innermost
// dimension.
struct TileRecord {
    std::uint64_t src;
    std::int64_t src_steps[kTileDims];
    TileTarget target;                    // the first record's
    FastDivisor divisors[kTileDims - 1];  // extents of all dimensions but the outermost, then zeros
    std::uint32_t num_dims;
    std::uint32_t num_vectors;  // below 2^31
    std::uint32_t first_tile;
    std::uint32_t table_record;      // the copy record that this is part of; those of more targets come right after
    std::uint32_t first_more;        // position of the other targets in TilePlan::more_targets
    std::uint32_t num_more;          // how many there are
    std::uint64_t first_element;     // its first element, in that record's row-major order
    std::uint16_t items_per_vector;  // elements in one vector; 1 where an element takes several vectors
    std::uint16_t vectors_per_item;  // vectors in one element; 1 where a vector has several elements
    std::uint16_t dst_itemsize;
    VectorOp op;
    bool wide_rows;  // wide vectors, side by side, in at most two dimensions: most records
};

// Where vector number n of a record lies, relative to its source's and to its targets' addresses.
struct VectorIndex {
    std::uint32_t at[kTileDims];

    // Divisors of the outermost and of missing dimensions are all zeros: they leave the whole rest as the index.
    RESHARD_HOST_DEVICE VectorIndex(const TileRecord& record, std::uint32_t n) : at{} {
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
        for (int dim = 0; dim < kTileDims - 1; ++dim) {
            const std::uint32_t quotient = record.divisors[dim].quotient(n);
            at[dim] = n - quotient * record.divisors[dim].divisor;
            n = quotient;
        }
        at[kTileDims - 1] = n;
    }

    RESHARD_HOST_DEVICE std::int64_t offset(const std::int64_t (&steps)[kTileDims]) const {
        std::int64_t sum = 0;
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
        for (int dim = 0; dim < kTileDims; ++dim) sum += at[dim] * steps[dim];
        return sum;
    }
};

// A checksum's term for one element whose bytes may lie at any address.
RESHARD_HOST_DEVICE inline std::uint64_t mix_item(const unsigned char* item, std::uint32_t itemsize,
                                                  std::uint64_t element) {
    const std::uint32_t words = (itemsize + 7) / 8;
    std::uint64_t sum = 0;
    for (std::uint32_t w = 0; w < words; ++w) {
        std::uint64_t word = 0;
        for (std::uint32_t byte = 8 * w; byte < itemsize && byte < 8 * w + 8; ++byte)
            word |= static_cast<std::uint64_t>(item[byte]) << (8 * (byte - 8 * w));
        sum += mix_word(word, element * words + w);
    }
    return sum;
}

struct TileOptions {
    std::uint32_t tile_vectors = 1024;
    bool wide_casts = true;                // eight elements a vector, 32 bytes of source, for fp32 to a 16-bit type
    std::uint32_t max_vectors = 1u << 30;  // of one tile record; larger boxes are cut (tests make it small)
};

struct TilePlan {
    std::vector<TileRecord> records;
    std::vector<std::uint32_t> tile_records;  // the record of every tile
    std::vector<TileTarget> more_targets;     // of fans
    TileOptions options;

    // Target t of a record: its own, then the others.
    const TileTarget& target(const TileRecord& record, std::uint32_t t) const {
        return t == 0 ? record.target : more_targets[record.first_more + t - 1];
    }
};

// Cuts the records `heads` of a checked table, each with its followers, into tiles and appends them to a plan, those
// with wide rows first. Throws
// std::invalid_argument for a cast whose elements are not aligned to their own size, which devices can't load, and for
// 2^32 tiles or more.
void add_tiles(TilePlan& plan, Table table, std::span<const std::uint32_t> heads);

// Runs a plan on host memory, vector by vector, as the device does. For tests.
void run_tiles_on_host(const TilePlan& plan);

// The checksums of a plan on host memory, as the device computes them. For tests.
std::vector<std::uint64_t> checksum_tiles_on_host(const TilePlan& plan, std::size_t num_records, bool of_destination);

}  // namespace reshard
