// PyTorch's pluggable allocator on top of an arena: C functions for torch.cuda.memory.CUDAPluggableAllocator.
//
// Its functions carry no user data, so each arena and group that serves a MemPool takes one slot, with a pair of
// symbols reshard_arena_alloc_<slot> and reshard_arena_free_<slot>. They never touch Python: PyTorch calls them with
// its allocator's lock held, and waiting for the GIL there could deadlock.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "arena_core.h"

namespace reshard {

inline constexpr int kNumTorchSlots = 8;

struct TorchSlotInfo {
    uint64_t num_allocs;
    uint64_t num_frees;
    std::string last_error;  // why the last call that failed did; empty if none did
};

// Takes a slot. Throws Failure when all are taken.
int claim_torch_slot(std::shared_ptr<ArenaCore> arena, const std::string& group);
// Says that no pool allocates by the slot any more. PyTorch may free segments at any later time: from now on the arena
// gives free memory to the device after each, and the slot can be claimed again after the last.
void retire_torch_slot(int slot);
TorchSlotInfo torch_slot_info(int slot);

}  // namespace reshard
