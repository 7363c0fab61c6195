// Which chunks a transition uses: what regions can keep, what they had before, then the planner's choice
// (arena_fill.h).
#include <algorithm>

#include "arena_transition.h"

namespace reshard {

std::string size_text(uint64_t num_bytes) {
    if (num_bytes == UINT64_MAX) return "unlimited";
    return std::to_string(num_bytes) + " bytes (" + std::to_string(num_bytes >> 20) + " MiB)";
}

// A device may hold less than the budget allows: what it refuses to create is then made by breaking up free chunks.
void ArenaCore::choose_and_create(Transition* t) {
    uint64_t headroom = headroom_bytes();
    std::string refusal;
    for (int attempt = 0;; ++attempt) {
        choose(t, headroom, refusal);
        const uint64_t before = counters_.created_bytes;
        try {
            for (const size_t piece : t->planner.fresh())
                t->made[piece] = add_chunk(t, t->planner.pieces()[piece].num_bytes);
            return;
        } catch (const Failure& failure) {
            headroom = attempt == 0 ? counters_.created_bytes - before : 0;
            refusal = failure.what();
            const std::string trouble = roll_back(t);
            if (failure.kind != FailureKind::kOutOfMemory || !trouble.empty() || attempt == 2)
                throw Failure(failure.kind, refusal + trouble);
        }
    }
}

void ArenaCore::choose(Transition* t, uint64_t headroom, const std::string& refusal) {
    t->planner = FillPlanner(options_.chunk_classes, headroom);
    t->made.clear();
    const uint64_t available_bytes = offer_free(t);
    if (fill_gaps(t)) return;
    std::string names;
    uint64_t wanted_bytes = 0;
    for (const RegionId id : t->back) {
        wanted_bytes += at(id).range.num_bytes;
        if (names.size() < 200) names += (names.empty() ? "'" : ", '") + at(id).name + "'";
    }
    throw Failure(FailureKind::kOutOfMemory, "no memory to back " + names + ", " + size_text(wanted_bytes) +
                                                 " together: " + size_text(t->planner.short_bytes()) +
                                                 " or more are missing after " + size_text(available_bytes) +
                                                 " free in the arena and " + size_text(headroom) +
                                                 " that could be created (budget " + size_text(options_.budget_bytes) +
                                                 ")" + (refusal.empty() ? "" : "; the device said: " + refusal) +
                                                 "; release a region or raise the budget");
}

// Keeps what each region to be backed can keep, and gives the other free chunks to the planner; returns the bytes of
// both.
uint64_t ArenaCore::offer_free(Transition* t) {
    std::set<ChunkId> available;
    uint64_t available_bytes = 0;
    const std::set<RegionId> leaving(t->release.begin(), t->release.end());
    for (const auto& [id, chunk] : chunks_) {
        if (chunk.owner != 0 && leaving.count(chunk.owner) == 0) continue;
        available.insert(id);
        available_bytes += chunk.num_bytes;
    }
    t->refills.clear();
    for (const RegionId id : t->back) t->refills.push_back(plan_refill(id, &available));
    // The planner takes the last one added first: chunks that are free already, so that a failure loses no contents.
    for (const bool is_free : {false, true}) {
        for (const ChunkId id : available) {
            const Chunk& chunk = chunks_.at(id);
            if ((chunk.owner == 0) == is_free) t->planner.add_free(id, chunk.num_bytes);
        }
    }
    return available_bytes;
}

// First every size that a region had before and that is free, then what is missing of those, the largest first, then
// regions that were never backed.
bool ArenaCore::fill_gaps(Transition* t) {
    struct Hole {
        uint64_t num_bytes;
        std::vector<size_t>* part;
        FillMode mode;
    };
    std::vector<Hole> again;
    std::vector<Hole> first;
    for (Refill& refill : t->refills) {
        for (Gap& gap : refill.gaps) {
            gap.parts.resize(std::max<size_t>(1, gap.shape.size()));
            if (gap.shape.empty()) first.push_back({gap.num_bytes, &gap.parts[0], FillMode::kIdeal});
            for (size_t i = 0; i < gap.shape.size(); ++i) {
                if (t->planner.take_exact(gap.shape[i], &gap.parts[i])) continue;
                again.push_back({gap.shape[i], &gap.parts[i], FillMode::kNoBreaking});
            }
        }
    }
    std::stable_sort(again.begin(), again.end(),
                     [](const Hole& a, const Hole& b) { return a.num_bytes > b.num_bytes; });
    const auto fill = [&](const Hole& hole) { return t->planner.fill(hole.num_bytes, hole.mode, hole.part); };
    return std::all_of(again.begin(), again.end(), fill) && std::all_of(first.begin(), first.end(), fill);
}

ArenaCore::Refill ArenaCore::plan_refill(RegionId id, std::set<ChunkId>* available) const {
    const Region& region = at(id);
    Refill refill{id, {}, {}};
    if (region.slots.empty()) refill.gaps.push_back({0, region.range.num_bytes, {}, region.shape});
    bool open = false;
    for (const Slot& slot : region.slots) {
        if (available->erase(slot.chunk) > 0) {
            refill.kept.push_back(slot);
            open = false;
            continue;
        }
        if (!open) refill.gaps.push_back({slot.offset, 0, {}, {}});
        open = true;
        Gap& gap = refill.gaps.back();
        gap.shape.push_back(chunks_.at(slot.chunk).num_bytes);
        gap.num_bytes += gap.shape.back();
        gap.former.push_back(slot);
    }
    return refill;
}

}  // namespace reshard
