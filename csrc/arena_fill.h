// Which chunks fill a range: a pure choice over sizes, made before any driver call. No memory is touched here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

namespace reshard {

using ChunkId = uint64_t;

// One chunk of the outcome. A fresh piece is created; a piece of a broken chunk is created once that chunk is
// destroyed.
struct Piece {
    enum class Origin { kExisting, kFresh, kBroken };
    uint64_t num_bytes;
    Origin origin;
    ChunkId source;  // the chunk itself (existing), the chunk that is broken up (broken), or 0 (fresh)
};

// How a demand is met that has never been met before, or one that a region asks for again.
//   kIdeal: with few and therefore large pieces, because a hand-over costs a driver call or two for each. What is left
//   of the
//     demand calls for its ideal class, the largest that fits. In this order: a free chunk of the ideal class, or of
//     the next if there are enough; one that is too large, broken up; smaller free ones; fresh ones.
//   kNoBreaking: smaller free ones before anything is broken up, so that hand-overs that repeat come to a steady state:
//   the
//     pieces of a chunk that was broken since are all there.
// Either way a demand below 1/kBreakRatio of the smallest chunk that could be broken is met by a fresh one if there is
// headroom.
enum class FillMode { kIdeal, kNoBreaking };

class FillPlanner {
  public:
    static constexpr uint64_t kBreakRatio = 32;

    // `classes`: descending, each a multiple of the next.
    FillPlanner(std::vector<uint64_t> classes, uint64_t headroom_bytes);

    void add_free(ChunkId chunk, uint64_t num_bytes);

    // Takes a free chunk of exactly this size; false if there is none.
    bool take_exact(uint64_t num_bytes, std::vector<size_t>* chosen);

    // Appends the indices into pieces() that fill `num_bytes`, in address order; false if memory is short.
    bool fill(uint64_t num_bytes, FillMode mode, std::vector<size_t>* chosen);

    const std::vector<Piece>& pieces() const { return pieces_; }
    const std::vector<size_t>& fresh() const { return fresh_; }  // pieces to create
    // chunk to break -> all of its pieces, used or not
    const std::map<ChunkId, std::vector<size_t>>& broken() const { return broken_; }
    uint64_t short_bytes() const { return short_bytes_; }  // what the last failed fill() lacked

  private:
    bool take_free(uint64_t limit_bytes, std::vector<size_t>* chosen, uint64_t* left);
    bool take_fresh(std::vector<size_t>* chosen, uint64_t* left);
    bool has_ideal(std::vector<uint64_t>::const_iterator ideal) const;
    void break_up(std::map<uint64_t, std::vector<size_t>>::iterator smallest);
    size_t push(Piece piece);

    std::vector<uint64_t> classes_;
    uint64_t headroom_bytes_;
    uint64_t short_bytes_ = 0;
    std::vector<Piece> pieces_;
    std::map<uint64_t, std::vector<size_t>> free_;  // size -> pieces, used from the back
    std::vector<size_t> fresh_;
    std::map<ChunkId, std::vector<size_t>> broken_;
};

}  // namespace reshard
