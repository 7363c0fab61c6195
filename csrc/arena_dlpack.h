// A range of an arena as a one-dimensional uint8 DLPack tensor, so that any framework can view it without a copy.
#pragma once

#include <pybind11/pybind11.h>

#include "arena_core.h"

namespace reshard {

// The capsule counts as one view until its consumer drops the tensor; `owner` lives at least that long.
// `versioned`: DLPack 1.0's layout (writable), else the older one. `device` is a CUDA ordinal or -1 for the host.
pybind11::capsule make_dlpack(Extent range, int device, bool versioned, Views views, std::shared_ptr<void> owner);

}  // namespace reshard
