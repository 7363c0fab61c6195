#include "arena_torch.h"

#include <sys/types.h>

#include <array>
#include <mutex>

namespace reshard {
namespace {

struct TorchSlot {
    std::mutex mutex;  // of all below; never held during an arena call
    std::shared_ptr<ArenaCore> arena;
    std::string group;
    bool retired = false;
    TorchSlotInfo info{0, 0, ""};
};

// Never destroyed: PyTorch frees its last segments after static destructors have run.
std::array<TorchSlot, kNumTorchSlots>& slots() {
    static auto* instance = new std::array<TorchSlot, kNumTorchSlots>();
    return *instance;
}

std::mutex& claim_mutex() {
    static auto* instance = new std::mutex();
    return *instance;
}

void note_error(TorchSlot* slot, const std::string& message) {
    const std::lock_guard lock(slot->mutex);
    slot->info.last_error = message;
}

std::shared_ptr<ArenaCore> arena_of(TorchSlot* slot) {
    const std::lock_guard lock(slot->mutex);
    return slot->arena;
}

// Gives a retired slot's free memory to the device, and the slot itself up once PyTorch holds no segment of it.
void leave_if_retired(TorchSlot* slot) {
    std::shared_ptr<ArenaCore> arena;
    {
        const std::lock_guard lock(slot->mutex);
        if (!slot->retired || !slot->arena) return;
        arena = slot->arena;
        if (slot->info.num_allocs == slot->info.num_frees) slot->arena.reset();
    }
    arena->trim(0);
}

// nullptr makes PyTorch free its cached blocks, try again and then raise torch.OutOfMemoryError.
void* allocate(int slot_idx, ssize_t size, int device) {
    TorchSlot& slot = slots()[slot_idx];
    const std::shared_ptr<ArenaCore> arena = arena_of(&slot);
    if (!arena) return nullptr;
    try {
        if (device != arena->driver().device()) {
            throw Failure(FailureKind::kArgument, "the pool's arena is on device " +
                                                      std::to_string(arena->driver().device()) +
                                                      ", memory was asked for on " + std::to_string(device));
        }
        static std::atomic<uint64_t> serial{0};
        const std::string name = slot.group + "." + std::to_string(serial.fetch_add(1));
        const RegionId id = arena->reserve(name, static_cast<uint64_t>(size), slot.group);
        try {
            arena->transition({}, {id});
        } catch (const Failure&) {
            arena->free({id});
            throw;
        }
        arena->views(id)->fetch_add(1);  // PyTorch's hold: nobody else can free the region
        const std::lock_guard lock(slot.mutex);
        ++slot.info.num_allocs;
        return reinterpret_cast<void*>(arena->info(id).address);
    } catch (const Failure& failure) {
        note_error(&slot, failure.what());
        return nullptr;
    }
}

void deallocate(int slot_idx, void* pointer) {
    TorchSlot& slot = slots()[slot_idx];
    const std::shared_ptr<ArenaCore> arena = arena_of(&slot);
    if (!arena) return;
    try {
        const auto id = arena->region_at(reinterpret_cast<uint64_t>(pointer));
        if (!id) throw Failure(FailureKind::kArgument, "a segment was freed that the arena does not know");
        arena->views(*id)->fetch_sub(1);
        arena->free({*id});
        {
            const std::lock_guard lock(slot.mutex);
            ++slot.info.num_frees;
        }
        leave_if_retired(&slot);
    } catch (const Failure& failure) {
        note_error(&slot, failure.what());
    }
}

}  // namespace

int claim_torch_slot(std::shared_ptr<ArenaCore> arena, const std::string& group) {
    const std::lock_guard lock(claim_mutex());
    for (int i = 0; i < kNumTorchSlots; ++i) {
        TorchSlot& slot = slots()[i];
        const std::lock_guard slot_lock(slot.mutex);
        if (slot.arena) continue;
        slot.group = group;
        slot.retired = false;
        slot.info = {0, 0, ""};
        slot.arena = std::move(arena);
        return i;
    }
    throw Failure(
        FailureKind::kState,
        "all " + std::to_string(kNumTorchSlots) +
            " pools that one process can have at a time are taken; close one, or reuse a pool for several steps");
}

namespace {

TorchSlot& slot_at(int slot_idx) {
    if (slot_idx < 0 || slot_idx >= kNumTorchSlots) {
        throw Failure(FailureKind::kArgument, "there is no slot " + std::to_string(slot_idx));
    }
    return slots()[slot_idx];
}

}  // namespace

void retire_torch_slot(int slot_idx) {
    TorchSlot& slot = slot_at(slot_idx);
    {
        const std::lock_guard lock(slot.mutex);
        slot.retired = true;
    }
    leave_if_retired(&slot);
}

TorchSlotInfo torch_slot_info(int slot_idx) {
    TorchSlot& slot = slot_at(slot_idx);
    const std::lock_guard lock(slot.mutex);
    return slot.info;
}

}  // namespace reshard

#define RESHARD_TORCH_SLOT(index)                                                                                 \
    extern "C" __attribute__((visibility("default"))) void* reshard_arena_alloc_##index(ssize_t size, int device, \
                                                                                        void* /*stream*/) {       \
        return reshard::allocate(index, size, device);                                                            \
    }                                                                                                             \
    extern "C" __attribute__((visibility("default"))) void reshard_arena_free_##index(                            \
        void* pointer, ssize_t /*size*/, int /*device*/, void* /*stream*/) {                                      \
        reshard::deallocate(index, pointer);                                                                      \
    }

RESHARD_TORCH_SLOT(0)
RESHARD_TORCH_SLOT(1)
RESHARD_TORCH_SLOT(2)
RESHARD_TORCH_SLOT(3)
RESHARD_TORCH_SLOT(4)
RESHARD_TORCH_SLOT(5)
RESHARD_TORCH_SLOT(6)
RESHARD_TORCH_SLOT(7)
