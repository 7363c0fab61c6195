// Note "strong guarantee". A transition is chosen completely before the first driver call, so a budget that is too
// small changes nothing. Then: create, unmap, break, map, each with its undo; only when all have succeeded do the books
// change. Contents survive an undo because chunks are not destroyed, with one exception: a chunk of a region being
// released that was broken up has lost its bytes. Such a region ends RELEASED and the error says so.
#include <algorithm>
#include <chrono>
#include <utility>

#include "arena_transition.h"

namespace reshard {
namespace {

constexpr uint8_t kPoison = 0xA5;
constexpr ChunkHandle kNoHandle = UINT64_MAX;

}  // namespace

TransitionReport ArenaCore::transition(const std::vector<RegionId>& release, const std::vector<RegionId>& back) {
    const std::lock_guard lock(mutex_);
    const auto start = std::chrono::steady_clock::now();
    const ArenaCounters before = counters_;
    validate(release, back);
    Transition t{release, back};
    choose_and_create(&t);
    try {
        if (!release.empty() || options_.keep_mappings) synchronize();
        unmap_old(&t);
        break_chunks(&t);
        map_new(&t);
    } catch (const Failure& failure) {
        throw Failure(failure.kind, failure.what() + roll_back(&t));
    }
    commit(&t);
    TransitionReport report;
    for (const RegionId id : release) report.released_bytes += at(id).range.num_bytes;
    for (const RegionId id : back) report.backed_bytes += at(id).range.num_bytes;
    report.num_creates = counters_.num_creates - before.num_creates;
    report.num_destroys = counters_.num_destroys - before.num_destroys;
    report.num_maps = counters_.num_maps - before.num_maps;
    report.num_unmaps = counters_.num_unmaps - before.num_unmaps;
    report.synchronize_us = counters_.synchronize_us - before.synchronize_us;
    report.create_us = counters_.create_us - before.create_us;
    report.map_us = counters_.map_us - before.map_us;
    report.allow_us = counters_.allow_us - before.allow_us;
    report.unmap_us = counters_.unmap_us - before.unmap_us;
    report.elapsed_us = std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
    if (options_.poison) poison(t);
    return report;
}

void ArenaCore::validate(const std::vector<RegionId>& release, const std::vector<RegionId>& back) const {
    std::set<RegionId> seen;
    for (const RegionId id : release) {
        const Region& region = at(id);
        if (region.state != RegionState::kBacked || !seen.insert(id).second) {
            throw Failure(FailureKind::kState,
                          "region '" + region.name + "' can't be released: it is " + region_state_label(region.state) +
                              (region.state == RegionState::kBacked ? " and named twice" : ", not BACKED"));
        }
        if (region.num_pins > 0) {
            throw Failure(FailureKind::kState,
                          "region '" + region.name + "' can't be released: " + std::to_string(region.num_pins) +
                              " shares of it are out and their holders would write into other memory; end them first");
        }
    }
    for (const RegionId id : back) {
        const Region& region = at(id);
        if (region.state == RegionState::kBacked || !seen.insert(id).second) {
            throw Failure(FailureKind::kState,
                          "region '" + region.name + "' can't be backed: it is " + region_state_label(region.state) +
                              (region.state == RegionState::kBacked ? " already" : " and named twice"));
        }
    }
    check_group_budgets(release, back);
}

void ArenaCore::check_group_budgets(const std::vector<RegionId>& release, const std::vector<RegionId>& back) const {
    for (const auto& [group, budget] : group_budgets_) {
        uint64_t num_bytes = 0;
        bool grows = false;
        for (const auto& [id, region] : regions_) {
            if (region.group != group) continue;
            const bool leaves = std::find(release.begin(), release.end(), id) != release.end();
            const bool comes = std::find(back.begin(), back.end(), id) != back.end();
            grows |= comes;
            if ((region.state == RegionState::kBacked && !leaves) || comes) num_bytes += region.range.num_bytes;
        }
        if (grows && num_bytes > budget) {
            throw Failure(FailureKind::kOutOfMemory, "group '" + group + "' would hold " + size_text(num_bytes) +
                                                         ", its budget is " + size_text(budget) +
                                                         "; release regions of it or raise its budget");
        }
    }
}

ChunkId ArenaCore::add_chunk(Transition* t, uint64_t num_bytes) {
    const ChunkId id = next_chunk_++;
    chunks_.emplace(id, Chunk{num_bytes, create_chunk(num_bytes), 0});
    t->undo.emplace_back([this, id] {
        destroy_chunk(chunks_.at(id));  // if that fails it stays, as a free chunk
        chunks_.erase(id);
    });
    return id;
}

// ---- doing ----------------------------------------------------------------------------------------------------------

void ArenaCore::unmap_old(Transition* t) {
    for (const RegionId id : t->release) {
        if (options_.keep_mappings) break;
        const Region& region = at(id);
        unmap_run(region.range);
        t->undo.emplace_back([this, &region] { map_slots(region, region.slots); });
    }
    for (const Refill& refill : t->refills) {
        const Region& region = at(refill.id);
        for (const Gap& gap : refill.gaps) {
            if (gap.former.empty()) continue;
            unmap_run({region.range.address + gap.offset, gap.num_bytes});
            t->undo.emplace_back([this, &region, &gap] { map_slots(region, gap.former); });
        }
    }
    forget_broken(t);
}

// A kept mapping onto a chunk that is about to be destroyed would keep its memory alive.
void ArenaCore::forget_broken(Transition* t) {
    if (!options_.keep_mappings || t->planner.broken().empty()) return;
    std::set<ChunkId> chunks;
    for (const auto& [id, parts] : t->planner.broken()) chunks.insert(id);
    const std::set<RegionId> coming(t->back.begin(), t->back.end());
    for (const auto& [id, region] : regions_) {
        if (coming.count(id) > 0 || !uses_any(region, chunks)) continue;
        unmap_run(region.range);
        t->forgotten.insert(id);
        const Region& kept = region;
        t->undo.emplace_back([this, &kept] { map_slots(kept, kept.slots); });
    }
}

void ArenaCore::break_chunks(Transition* t) {
    for (const auto& [id, parts] : t->planner.broken()) {
        Chunk& chunk = chunks_.at(id);
        destroy_chunk(chunk);
        chunk.handle = kNoHandle;
        if (chunk.owner != 0) t->lost.insert(chunk.owner);
        t->undo.emplace_back([this, &chunk] { chunk.handle = create_chunk(chunk.num_bytes); });
        for (const size_t part : parts) t->made[part] = add_chunk(t, t->planner.pieces()[part].num_bytes);
    }
}

void ArenaCore::map_new(Transition* t) {
    for (Refill& refill : t->refills) {
        const Region& region = at(refill.id);
        for (Gap& gap : refill.gaps) {
            uint64_t offset = gap.offset;
            for (const std::vector<size_t>& part : gap.parts) {
                for (const size_t idx : part) {
                    const Piece& piece = t->planner.pieces()[idx];
                    const bool exists = piece.origin == Piece::Origin::kExisting;
                    gap.slots.push_back({offset, exists ? piece.source : t->made.at(idx)});
                    offset += piece.num_bytes;
                }
            }
            map_slots(region, gap.slots);
            t->undo.emplace_back(
                [this, &region, &gap] { unmap_run({region.range.address + gap.offset, gap.num_bytes}); });
        }
    }
}

void ArenaCore::commit(Transition* t) {
    for (const RegionId id : t->release) {
        Region& region = at(id);
        for (const Slot& slot : region.slots) chunks_.at(slot.chunk).owner = 0;
        region.state = RegionState::kReleased;
        ++region.generation;
        if (!options_.keep_mappings) region.slots.clear();
    }
    for (const RegionId id : t->forgotten) at(id).slots.clear();
    for (const auto& [id, parts] : t->planner.broken()) chunks_.erase(id);
    for (Refill& refill : t->refills) {
        Region& region = at(refill.id);
        region.slots = std::move(refill.kept);
        for (const Gap& gap : refill.gaps) region.slots.insert(region.slots.end(), gap.slots.begin(), gap.slots.end());
        std::sort(region.slots.begin(), region.slots.end(),
                  [](const Slot& a, const Slot& b) { return a.offset < b.offset; });
        region.shape.clear();
        for (const Slot& slot : region.slots) {
            Chunk& chunk = chunks_.at(slot.chunk);
            chunk.owner = refill.id;
            region.shape.push_back(chunk.num_bytes);
        }
        region.state = RegionState::kBacked;
        ++region.generation;
    }
}

// Released first: with kept mappings a region being backed may lie on the same chunks.
void ArenaCore::poison(const Transition& t) {
    for (const RegionId id : t.release) {
        const Region& region = at(id);
        for (const Slot& slot : region.slots) {
            const Chunk& chunk = chunks_.at(slot.chunk);
            if (chunk.owner == 0) driver_->fill({region.range.address + slot.offset, chunk.num_bytes}, kPoison);
        }
    }
    for (const RegionId id : t.back) driver_->fill(at(id).range, kPoison);
}

// ---- undoing --------------------------------------------------------------------------------------------------------

std::string ArenaCore::roll_back(Transition* t) {
    std::string trouble;
    for (auto step = t->undo.rbegin(); step != t->undo.rend(); ++step) {
        try {
            (*step)();
        } catch (const Failure& failure) {
            trouble = std::string("; undoing it failed too: ") + failure.what();
        }
    }
    t->undo.clear();
    std::set<ChunkId> gone;
    for (const auto& [id, chunk] : chunks_) {
        if (chunk.handle == kNoHandle) gone.insert(id);
    }
    std::string names;
    for (auto& [id, region] : regions_) {
        const auto named = [id = id](const std::vector<RegionId>& ids) {
            return std::find(ids.begin(), ids.end(), id) != ids.end();
        };
        const bool touched = !trouble.empty() && (named(t->release) || named(t->back) || t->forgotten.count(id) > 0);
        if (t->lost.count(id) == 0 && !touched && !uses_any(region, gone)) continue;
        if (region.state == RegionState::kBacked) names += (names.empty() ? "'" : ", '") + region.name + "'";
        lose(&region);
    }
    for (const ChunkId id : gone) chunks_.erase(id);
    t->lost.clear();
    t->forgotten.clear();
    return trouble + (names.empty() ? "" : "; regions that lost their contents and are RELEASED now: " + names);
}

void ArenaCore::lose(Region* region) {
    try {
        unmap_run(region->range);
    } catch (const Failure&) {
        // Nothing was mapped there: the step that failed was the mapping.
    }
    drop_backing(region);
}

}  // namespace reshard
