#include "bindings.h"

namespace reshard {

void bind_arena(pybind11::module_&) {}

}  // namespace reshard
