#include "arena_fill.h"

#include <algorithm>
#include <utility>

namespace reshard {

FillPlanner::FillPlanner(std::vector<uint64_t> classes, uint64_t headroom_bytes)
    : classes_(std::move(classes)), headroom_bytes_(headroom_bytes) {}

size_t FillPlanner::push(Piece piece) {
    pieces_.push_back(piece);
    return pieces_.size() - 1;
}

void FillPlanner::add_free(ChunkId chunk, uint64_t num_bytes) {
    free_[num_bytes].push_back(push({num_bytes, Piece::Origin::kExisting, chunk}));
}

bool FillPlanner::take_exact(uint64_t num_bytes, std::vector<size_t>* chosen) {
    uint64_t left = num_bytes;
    return free_.count(num_bytes) > 0 && take_free(num_bytes, chosen, &left);
}

bool FillPlanner::fill(uint64_t num_bytes, FillMode mode, std::vector<size_t>* chosen) {
    uint64_t left = num_bytes;
    while (left > 0) {
        const auto ideal = std::find_if(classes_.begin(), classes_.end(), [&](uint64_t size) { return size <= left; });
        const auto larger = free_.upper_bound(mode == FillMode::kIdeal ? *ideal : left);
        const bool use_free = mode == FillMode::kIdeal ? has_ideal(ideal) : free_.begin() != larger;
        if (use_free || larger == free_.end()) {
            if (take_free(left, chosen, &left) || take_fresh(chosen, &left)) continue;
            short_bytes_ = left;
            return false;
        }
        const bool is_small = *ideal < larger->first / kBreakRatio;
        if (!(is_small && take_fresh(chosen, &left))) break_up(larger);
    }
    return true;
}

// Whether free chunks of the ideal class are there, or as many of the next one as make up for it.
bool FillPlanner::has_ideal(std::vector<uint64_t>::const_iterator ideal) const {
    if (free_.count(*ideal) > 0) return true;
    const auto next = std::next(ideal);
    if (next == classes_.end()) return false;
    const auto found = free_.find(*next);
    return found != free_.end() && found->second.size() >= *ideal / *next;
}

bool FillPlanner::take_free(uint64_t limit_bytes, std::vector<size_t>* chosen, uint64_t* left) {
    auto above = free_.upper_bound(limit_bytes);
    if (above == free_.begin()) return false;
    auto best = std::prev(above);
    chosen->push_back(best->second.back());
    *left -= best->first;
    best->second.pop_back();
    if (best->second.empty()) free_.erase(best);
    return true;
}

bool FillPlanner::take_fresh(std::vector<size_t>* chosen, uint64_t* left) {
    for (const uint64_t size : classes_) {
        if (size > *left || size > headroom_bytes_) continue;
        fresh_.push_back(push({size, Piece::Origin::kFresh, 0}));
        chosen->push_back(fresh_.back());
        headroom_bytes_ -= size;
        *left -= size;
        return true;
    }
    return false;
}

// Into pieces of the next smaller class. A piece of a chunk that is to be broken anyway can be broken again.
void FillPlanner::break_up(std::map<uint64_t, std::vector<size_t>>::iterator smallest) {
    const size_t victim_idx = smallest->second.back();
    const Piece victim = pieces_[victim_idx];
    smallest->second.pop_back();
    if (smallest->second.empty()) free_.erase(smallest);
    std::vector<size_t>& parts = broken_[victim.source];
    if (victim.origin == Piece::Origin::kBroken) parts.erase(std::find(parts.begin(), parts.end(), victim_idx));
    const uint64_t size =
        *std::find_if(classes_.begin(), classes_.end(), [&](uint64_t c) { return c < victim.num_bytes; });
    for (uint64_t made_bytes = 0; made_bytes < victim.num_bytes; made_bytes += size) {
        const size_t part = push({size, Piece::Origin::kBroken, victim.source});
        parts.push_back(part);
        free_[size].push_back(part);
    }
}

}  // namespace reshard
