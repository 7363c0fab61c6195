#include "arena_core.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

namespace reshard {

const char* region_state_label(RegionState state) {
    switch (state) {
        case RegionState::kReserved:
            return "RESERVED";
        case RegionState::kBacked:
            return "BACKED";
        case RegionState::kReleased:
            return "RELEASED";
    }
    return "?";
}

namespace {

// Adds the microseconds of its scope to a counter.
class Stopwatch {
  public:
    explicit Stopwatch(double* total_us) : total_us_(total_us), start_(std::chrono::steady_clock::now()) {}
    ~Stopwatch() {
        *total_us_ += std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start_).count();
    }
    Stopwatch(const Stopwatch&) = delete;
    Stopwatch& operator=(const Stopwatch&) = delete;

  private:
    double* total_us_;
    std::chrono::steady_clock::time_point start_;
};

void check_options(const ArenaOptions& options, uint64_t granularity) {
    const std::vector<uint64_t>& classes = options.chunk_classes;
    if (classes.empty()) throw Failure(FailureKind::kArgument, "expected at least one chunk class, got none");
    for (size_t i = 0; i < classes.size(); ++i) {
        const bool divides = i + 1 == classes.size() ||
                             (classes[i + 1] > 0 && classes[i] > classes[i + 1] && classes[i] % classes[i + 1] == 0);
        if (classes[i] == 0 || classes[i] % granularity != 0 || !divides) {
            throw Failure(FailureKind::kArgument,
                          "expected chunk classes in descending order, each a multiple of the next and of the "
                          "granularity of " +
                              std::to_string(granularity) + " bytes; class " + std::to_string(i) + " is " +
                              std::to_string(classes[i]) + " bytes");
        }
    }
}

}  // namespace

// ---- construction and address space ---------------------------------------------------------------------------------

ArenaCore::ArenaCore(std::shared_ptr<MemoryDriver> driver, ArenaOptions options)
    : driver_(std::move(driver)), options_(std::move(options)) {
    check_options(options_, driver_->granularity_bytes());
}

ArenaCore::~ArenaCore() {
    for (auto& [id, region] : regions_) {
        try {
            if (!region.slots.empty()) driver_->unmap(region.range);
            driver_->unreserve(region.range);
        } catch (const Failure&) {
            // The device may be gone by now; its driver has taken the memory back.
        }
    }
    for (auto& [id, chunk] : chunks_) {
        try {
            driver_->destroy(chunk.handle);
        } catch (const Failure&) {
        }
    }
}

ArenaCore::Region& ArenaCore::at(RegionId id) {
    auto found = regions_.find(id);
    if (found == regions_.end()) throw Failure(FailureKind::kState, "region " + std::to_string(id) + " was freed");
    return found->second;
}

const ArenaCore::Region& ArenaCore::at(RegionId id) const {
    return const_cast<ArenaCore*>(this)->at(id);
}

RegionId ArenaCore::reserve(const std::string& name, uint64_t num_bytes, const std::string& group) {
    const std::lock_guard lock(mutex_);
    const uint64_t unit = options_.chunk_classes.back();
    if (num_bytes == 0 || num_bytes > UINT64_MAX - unit) {
        throw Failure(FailureKind::kArgument,
                      "region '" + name + "': expected a size above 0, got " + std::to_string(num_bytes) + " bytes");
    }
    for (const auto& [id, region] : regions_) {
        if (region.name == name)
            throw Failure(FailureKind::kArgument,
                          "region '" + name + "' exists already; free it or choose another name");
    }
    const uint64_t rounded = (num_bytes + unit - 1) / unit * unit;
    Region region{name, group, {driver_->reserve(rounded), rounded}};
    by_address_.emplace(region.range.address, next_region_);
    regions_.emplace(next_region_, std::move(region));
    return next_region_++;
}

void ArenaCore::free(const std::vector<RegionId>& ids) {
    const std::lock_guard lock(mutex_);
    for (const RegionId id : ids) check_unused(at(id));
    for (const RegionId id : ids) free_unused(id);
}

void ArenaCore::check_unused(const Region& region) const {
    if (region.views->load() == 0 && region.num_pins == 0) return;
    throw Failure(FailureKind::kState, "region '" + region.name + "' still has " +
                                           std::to_string(region.views->load()) + " views and " +
                                           std::to_string(region.num_pins) + " shares; drop them before freeing it");
}

void ArenaCore::free_unused(RegionId id) {
    Region& region = at(id);
    if (!region.slots.empty()) {
        synchronize();
        unmap_run(region.range);
        drop_backing(&region);
    }
    driver_->unreserve(region.range);
    by_address_.erase(region.range.address);
    regions_.erase(id);
}

// The mapping is gone already; this is the books' part.
void ArenaCore::drop_backing(Region* region) {
    if (region->state == RegionState::kBacked) {
        for (const Slot& slot : region->slots) chunks_.at(slot.chunk).owner = 0;
        region->state = RegionState::kReleased;
    }
    region->slots.clear();
}

// ---- physical memory ------------------------------------------------------------------------------------------------

ChunkHandle ArenaCore::create_chunk(uint64_t num_bytes) {
    const Stopwatch watch(&counters_.create_us);
    const ChunkHandle handle = driver_->create(num_bytes);
    ++counters_.num_creates;
    counters_.created_bytes += num_bytes;
    counters_.peak_created_bytes = std::max(counters_.peak_created_bytes, counters_.created_bytes);
    return handle;
}

void ArenaCore::destroy_chunk(const Chunk& chunk) {
    const Stopwatch watch(&counters_.create_us);
    driver_->destroy(chunk.handle);
    ++counters_.num_destroys;
    counters_.created_bytes -= chunk.num_bytes;
}

void ArenaCore::synchronize() {
    const Stopwatch watch(&counters_.synchronize_us);
    driver_->synchronize();
}

void ArenaCore::unmap_run(Extent run) {
    const Stopwatch watch(&counters_.unmap_us);
    driver_->unmap(run);
    ++counters_.num_unmaps;
}

// Maps slots that lie next to each other and opens them with one call; on Failure none of them is mapped.
void ArenaCore::map_slots(const Region& region, const std::vector<Slot>& slots) {
    if (slots.empty()) return;
    Extent run{region.range.address + slots.front().offset, 0};
    try {
        {
            const Stopwatch watch(&counters_.map_us);
            for (const Slot& slot : slots) {
                const Chunk& chunk = chunks_.at(slot.chunk);
                driver_->map({region.range.address + slot.offset, chunk.num_bytes}, chunk.handle);
                run.num_bytes += chunk.num_bytes;
            }
        }
        const Stopwatch watch(&counters_.allow_us);
        driver_->allow(run);
    } catch (const Failure&) {
        if (run.num_bytes > 0) driver_->unmap(run);
        throw;
    }
    counters_.num_maps += slots.size();
    ++counters_.num_allows;
}

uint64_t ArenaCore::headroom_bytes() const {
    return options_.budget_bytes > counters_.created_bytes ? options_.budget_bytes - counters_.created_bytes : 0;
}

uint64_t ArenaCore::trim(uint64_t keep_free_bytes) {
    const std::lock_guard lock(mutex_);
    return trim_locked(keep_free_bytes);
}

uint64_t ArenaCore::trim_locked(uint64_t keep_free_bytes) {
    uint64_t free_bytes = 0;
    for (const auto& [id, chunk] : chunks_) free_bytes += chunk.owner == 0 ? chunk.num_bytes : 0;
    std::set<ChunkId> victims;
    uint64_t gone = 0;
    for (const auto& [id, chunk] : chunks_) {
        if (chunk.owner != 0 || free_bytes - gone < keep_free_bytes + chunk.num_bytes) continue;
        victims.insert(id);
        gone += chunk.num_bytes;
    }
    if (victims.empty()) return 0;
    synchronize();
    for (auto& [id, region] : regions_) {
        if (region.state != RegionState::kReleased) continue;
        region.shape.clear();  // whoever trims wants a new start, with large chunks
        if (!uses_any(region, victims)) continue;
        unmap_run(region.range);
        region.slots.clear();
    }
    for (const ChunkId id : victims) {
        destroy_chunk(chunks_.at(id));
        chunks_.erase(id);
    }
    return gone;
}

bool ArenaCore::uses_any(const Region& region, const std::set<ChunkId>& chunks) {
    return std::any_of(region.slots.begin(), region.slots.end(),
                       [&](const Slot& slot) { return chunks.count(slot.chunk) > 0; });
}

void ArenaCore::close() {
    const std::lock_guard lock(mutex_);
    for (const auto& [id, region] : regions_) check_unused(region);
    while (!regions_.empty()) free_unused(regions_.begin()->first);
    trim_locked(0);
}

// ---- sharing --------------------------------------------------------------------------------------------------------

std::vector<int> ArenaCore::export_region(RegionId id, std::vector<uint64_t>* chunk_bytes) {
    const std::lock_guard lock(mutex_);
    Region& region = at(id);
    if (region.state != RegionState::kBacked) {
        throw Failure(FailureKind::kState, "region '" + region.name + "' is " + region_state_label(region.state) +
                                               "; only a BACKED region can be shared");
    }
    std::vector<int> descriptors;
    try {
        for (const Slot& slot : region.slots) {
            const Chunk& chunk = chunks_.at(slot.chunk);
            descriptors.push_back(driver_->export_descriptor(chunk.handle));
            chunk_bytes->push_back(chunk.num_bytes);
        }
    } catch (const Failure&) {
        for (const int descriptor : descriptors) ::close(descriptor);
        throw;
    }
    ++region.num_pins;
    return descriptors;
}

void ArenaCore::unpin(RegionId id) {
    const std::lock_guard lock(mutex_);
    Region& region = at(id);
    if (region.num_pins == 0) throw Failure(FailureKind::kState, "region '" + region.name + "' is not shared");
    --region.num_pins;
}

// ---- questions ------------------------------------------------------------------------------------------------------

void ArenaCore::set_group_budget(const std::string& group, uint64_t num_bytes) {
    const std::lock_guard lock(mutex_);
    group_budgets_[group] = num_bytes;
}

RegionInfo ArenaCore::info(RegionId id) const {
    const std::lock_guard lock(mutex_);
    const Region& region = at(id);
    return {id,
            region.name,
            region.group,
            region.range.address,
            region.range.num_bytes,
            region.state,
            region.state == RegionState::kBacked ? region.slots.size() : 0,
            region.generation,
            region.views->load(),
            region.num_pins};
}

std::vector<RegionId> ArenaCore::regions(const std::optional<std::string>& group) const {
    const std::lock_guard lock(mutex_);
    std::vector<RegionId> ids;
    for (const auto& [id, region] : regions_) {
        if (!group || region.group == *group) ids.push_back(id);
    }
    return ids;
}

std::optional<RegionId> ArenaCore::region_at(uint64_t address) const {
    const std::lock_guard lock(mutex_);
    auto found = by_address_.upper_bound(address);
    if (found == by_address_.begin()) return std::nullopt;
    --found;
    if (address - found->first >= at(found->second).range.num_bytes) return std::nullopt;
    return found->second;
}

std::vector<std::pair<uint64_t, uint64_t>> ArenaCore::chunk_sizes() const {
    const std::lock_guard lock(mutex_);
    std::map<uint64_t, uint64_t> sizes;
    for (const auto& [id, chunk] : chunks_) ++sizes[chunk.num_bytes];
    return {sizes.rbegin(), sizes.rend()};
}

Views ArenaCore::views(RegionId id) const {
    const std::lock_guard lock(mutex_);
    return at(id).views;
}

ArenaCounters ArenaCore::counters() const {
    const std::lock_guard lock(mutex_);
    ArenaCounters all = counters_;
    all.num_chunks = chunks_.size();
    all.num_regions = regions_.size();
    for (const auto& [id, chunk] : chunks_) (chunk.owner == 0 ? all.free_bytes : all.backed_bytes) += chunk.num_bytes;
    for (const auto& [id, region] : regions_) all.reserved_bytes += region.range.num_bytes;
    return all;
}

std::string ArenaCore::check() const {
    const std::lock_guard lock(mutex_);
    uint64_t total = 0;
    uint64_t owned = 0;
    for (const auto& [id, chunk] : chunks_) {
        total += chunk.num_bytes;
        owned += chunk.owner != 0;
    }
    if (total != counters_.created_bytes) return "created_bytes differs from the sum of the chunks";
    uint64_t used = 0;
    for (const auto& [id, region] : regions_) {
        uint64_t offset = 0;
        for (const Slot& slot : region.slots) {
            const auto chunk = chunks_.find(slot.chunk);
            if (chunk == chunks_.end() || slot.offset != offset)
                return "region '" + region.name + "' maps a lost chunk or has a hole";
            if (region.state == RegionState::kBacked && chunk->second.owner != id)
                return "region '" + region.name + "' does not own its chunk";
            offset += chunk->second.num_bytes;
        }
        const bool full = offset == region.range.num_bytes;
        const bool may_be_empty = region.state != RegionState::kBacked;
        const bool may_be_full =
            region.state == RegionState::kBacked || (region.state == RegionState::kReleased && options_.keep_mappings);
        if (!(full && may_be_full) && !(offset == 0 && may_be_empty))
            return "region '" + region.name + "' is mapped in part";
        used += region.state == RegionState::kBacked ? region.slots.size() : 0;
    }
    if (used != owned) return "a chunk has an owner that does not map it";
    return total <= options_.budget_bytes ? "" : "the budget is exceeded";
}

}  // namespace reshard
