// What a transition knows between its choice and its commit; shared by arena_choose.cpp and arena_transition.cpp.
#pragma once

#include <functional>
#include <string>

#include "arena_core.h"

namespace reshard {

std::string size_text(uint64_t num_bytes);

// A part of a region that gets other chunks. `former` are mapped there now (keep_mappings only); `shape` holds the
// sizes of those, or of the chunks that were there last, and is empty for a region that was never backed.
struct ArenaCore::Gap {
    uint64_t offset;
    uint64_t num_bytes;
    std::vector<Slot> former;
    std::vector<uint64_t> shape;
    std::vector<std::vector<size_t>> parts{};  // pieces for each size of the shape
    std::vector<Slot> slots{};
};

struct ArenaCore::Refill {
    RegionId id;
    std::vector<Slot> kept;
    std::vector<Gap> gaps;
};

struct ArenaCore::Transition {
    const std::vector<RegionId>& release;
    const std::vector<RegionId>& back;
    FillPlanner planner{{}, 0};
    std::vector<Refill> refills{};
    std::map<size_t, ChunkId> made{};  // piece -> its chunk, for fresh pieces and those of broken chunks
    std::set<RegionId> forgotten{};    // regions whose kept mappings went because a chunk was broken
    std::set<RegionId> lost{};         // regions being released that lost contents already
    std::vector<std::function<void()>> undo{};
};

}  // namespace reshard
