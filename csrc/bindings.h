// The parts of reshard._C. Each part adds its functions and classes to the module; bindings.cpp calls them all.
#pragma once

#include <pybind11/pybind11.h>

namespace reshard {

// Copy tables: checks, execution on the host and on a device (copy_bindings.cpp).
void bind_copy(pybind11::module_& module);

// Quantising copies (quant_bindings.cpp).
void bind_quant(pybind11::module_& module);

// Arena: physical memory, address ranges and their exchange (arena_bindings.cpp).
void bind_arena(pybind11::module_& module);

// Memory of other allocators, opened to other processes by CUDA IPC handles (ipc.cpp).
void bind_ipc(pybind11::module_& module);

// Counters in shared memory and waiting for them (counters.cpp).
void bind_counters(pybind11::module_& module);

}  // namespace reshard
