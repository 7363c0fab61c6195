// The arena's books and its one state change: regions of address space, physical chunks, and the hand-over between
// them.
//
// Note "arena states". A region is RESERVED (addresses only), BACKED (chunks mapped, owned by it) or RELEASED (its
// chunks belong to the arena again, contents undefined). Chunks are created when the free ones don't suffice and
// destroyed only by trim(), close() or when a large one has to be broken into smaller ones; in the steady state neither
// happens. With keep_mappings a RELEASED region stays mapped onto its former chunks, whoever owns them now: backing it
// again costs no driver call for those that are free by then, and a stray access reads or destroys another region's
// bytes instead of faulting.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "arena_driver.h"
#include "arena_fill.h"

namespace reshard {

using RegionId = uint64_t;
enum class RegionState { kReserved, kBacked, kReleased };
const char* region_state_label(RegionState state);

struct ArenaOptions {
    std::vector<uint64_t> chunk_classes;  // descending, each a multiple of the next
    uint64_t budget_bytes = UINT64_MAX;   // of physical memory
    bool keep_mappings = false;
    bool poison = false;
};

struct RegionInfo {
    RegionId id;
    std::string name;
    std::string group;
    uint64_t address;
    uint64_t num_bytes;
    RegionState state;
    uint64_t num_chunks;
    uint64_t generation;  // how often its backing changed
    int64_t num_views;
    int64_t num_pins;
};

struct ArenaCounters {
    uint64_t created_bytes = 0;
    uint64_t free_bytes = 0;
    uint64_t backed_bytes = 0;
    uint64_t reserved_bytes = 0;
    uint64_t peak_created_bytes = 0;
    uint64_t num_chunks = 0;
    uint64_t num_regions = 0;
    uint64_t num_creates = 0;
    uint64_t num_destroys = 0;
    uint64_t num_maps = 0;
    uint64_t num_unmaps = 0;
    uint64_t num_allows = 0;
    double synchronize_us = 0;
    double create_us = 0;  // of creating and destroying
    double map_us = 0;
    double allow_us = 0;
    double unmap_us = 0;
};

struct TransitionReport {
    uint64_t released_bytes = 0;
    uint64_t backed_bytes = 0;
    uint64_t num_creates = 0;
    uint64_t num_destroys = 0;
    uint64_t num_maps = 0;
    uint64_t num_unmaps = 0;
    double elapsed_us = 0;
    double synchronize_us = 0;
    double create_us = 0;
    double map_us = 0;
    double allow_us = 0;
    double unmap_us = 0;
};

// Counts the views of a range; shared by the owner of the range and by every view.
using Views = std::shared_ptr<std::atomic<int64_t>>;

class ArenaCore {
  public:
    ArenaCore(std::shared_ptr<MemoryDriver> driver, ArenaOptions options);
    ~ArenaCore();
    ArenaCore(const ArenaCore&) = delete;
    ArenaCore& operator=(const ArenaCore&) = delete;

    RegionId reserve(const std::string& name, uint64_t num_bytes, const std::string& group);
    void free(const std::vector<RegionId>& ids);
    // Releases and backs whole regions in one step; on Failure the arena is as it was (see the note in
    // arena_transition.cpp).
    TransitionReport transition(const std::vector<RegionId>& release, const std::vector<RegionId>& back);
    uint64_t trim(uint64_t keep_free_bytes);
    void close();

    std::vector<int> export_region(RegionId id, std::vector<uint64_t>* chunk_bytes);  // pins it
    void unpin(RegionId id);

    void set_group_budget(const std::string& group, uint64_t num_bytes);
    RegionInfo info(RegionId id) const;
    std::vector<RegionId> regions(const std::optional<std::string>& group) const;
    std::optional<RegionId> region_at(uint64_t address) const;       // that holds the address
    std::vector<std::pair<uint64_t, uint64_t>> chunk_sizes() const;  // (bytes, how many)
    ArenaCounters counters() const;
    Views views(RegionId id) const;
    MemoryDriver& driver() const { return *driver_; }
    std::shared_ptr<MemoryDriver> shared_driver() const { return driver_; }
    const ArenaOptions& options() const { return options_; }
    std::string check() const;  // what is inconsistent in the books; empty when all is well

  private:
    struct Chunk {
        uint64_t num_bytes;
        ChunkHandle handle;
        RegionId owner;  // 0: free
    };
    struct Slot {
        uint64_t offset;
        ChunkId chunk;
    };
    struct Region {
        std::string name;
        std::string group;
        Extent range;
        RegionState state = RegionState::kReserved;
        std::vector<Slot> slots{};      // mapped chunks in address order; owned ones if BACKED, former ones if RELEASED
        std::vector<uint64_t> shape{};  // sizes of the chunks that backed it last, which it asks for again
        uint64_t generation = 0;
        int64_t num_pins = 0;
        Views views = std::make_shared<std::atomic<int64_t>>(0);
    };
    struct Gap;
    struct Refill;
    struct Transition;

    Region& at(RegionId id);
    const Region& at(RegionId id) const;
    void validate(const std::vector<RegionId>& release, const std::vector<RegionId>& back) const;
    void check_group_budgets(const std::vector<RegionId>& release, const std::vector<RegionId>& back) const;
    uint64_t headroom_bytes() const;
    void choose_and_create(Transition* t);
    void choose(Transition* t, uint64_t headroom_bytes, const std::string& refusal);
    uint64_t offer_free(Transition* t);
    bool fill_gaps(Transition* t);
    Refill plan_refill(RegionId id, std::set<ChunkId>* available) const;
    ChunkId add_chunk(Transition* t, uint64_t num_bytes);
    void unmap_old(Transition* t);
    void forget_broken(Transition* t);
    void break_chunks(Transition* t);
    void map_new(Transition* t);
    void commit(Transition* t);
    void poison(const Transition& t);
    std::string roll_back(Transition* t);
    void lose(Region* region);
    void map_slots(const Region& region, const std::vector<Slot>& slots);
    void unmap_run(Extent run);
    void synchronize();
    ChunkHandle create_chunk(uint64_t num_bytes);
    void destroy_chunk(const Chunk& chunk);
    void drop_backing(Region* region);
    void check_unused(const Region& region) const;
    void free_unused(RegionId id);
    uint64_t trim_locked(uint64_t keep_free_bytes);
    static bool uses_any(const Region& region, const std::set<ChunkId>& chunks);

    mutable std::mutex mutex_;
    std::shared_ptr<MemoryDriver> driver_;
    const ArenaOptions options_;
    std::map<RegionId, Region> regions_;
    std::map<uint64_t, RegionId> by_address_;
    std::map<ChunkId, Chunk> chunks_;
    std::map<std::string, uint64_t> group_budgets_;
    RegionId next_region_ = 1;
    ChunkId next_chunk_ = 1;
    ArenaCounters counters_;  // the running ones; sums over the books are made on demand
};

// Memory of another arena, mapped here: the same pages, at addresses of this process.
class ImportedCore {
  public:
    // Chunks in address order. The descriptors stay the caller's.
    ImportedCore(std::shared_ptr<MemoryDriver> driver, const std::vector<int>& descriptors,
                 const std::vector<uint64_t>& chunk_bytes);
    ~ImportedCore();
    ImportedCore(const ImportedCore&) = delete;
    ImportedCore& operator=(const ImportedCore&) = delete;

    void close();
    Extent range() const { return range_; }
    bool is_open() const { return open_; }
    const Views& views() const { return views_; }
    MemoryDriver& driver() const { return *driver_; }

  private:
    void map_all(const std::vector<int>& descriptors, const std::vector<uint64_t>& chunk_bytes);
    void undo() noexcept;

    std::shared_ptr<MemoryDriver> driver_;
    Extent range_{0, 0};
    uint64_t mapped_bytes_ = 0;
    std::vector<ChunkHandle> handles_;
    bool open_ = false;
    Views views_ = std::make_shared<std::atomic<int64_t>>(0);
};

}  // namespace reshard
