#include "arena_fill.h"

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

bool FillPlanner::fill(uint64_t num_bytes, std::vector<size_t>* chosen) {
    uint64_t left = num_bytes;
    while (left > 0) {
        if (take_free(left, chosen, &left) || take_fresh(chosen, &left) || break_one(left)) continue;
        short_bytes_ = left;
        return false;
    }
    return true;
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

// Every free chunk is larger than `left` here. Pieces of a chunk that is to be broken can be broken again.
bool FillPlanner::break_one(uint64_t left) {
    if (free_.empty()) return false;
    auto smallest = free_.begin();
    const size_t victim_idx = smallest->second.back();
    const Piece victim = pieces_[victim_idx];
    smallest->second.pop_back();
    if (smallest->second.empty()) free_.erase(smallest);
    std::vector<size_t>& parts = broken_[victim.source];
    if (victim.origin == Piece::Origin::kBroken) {
        for (size_t& part : parts) {
            if (part == victim_idx) part = parts.back();
        }
        parts.pop_back();
    }
    std::vector<uint64_t> sizes = split(left);
    for (const uint64_t size : split(victim.num_bytes - left)) sizes.push_back(size);
    for (const uint64_t size : sizes) {
        const size_t part = push({size, Piece::Origin::kBroken, victim.source});
        parts.push_back(part);
        free_[size].push_back(part);
    }
    return true;
}

std::vector<uint64_t> FillPlanner::split(uint64_t num_bytes) const {
    std::vector<uint64_t> sizes;
    for (const uint64_t size : classes_) {
        for (; num_bytes >= size; num_bytes -= size) sizes.push_back(size);
    }
    return sizes;
}

}  // namespace reshard
