// reshard._C: the one module. reshard/_C.pyi documents everything that is bound here and in the functions of
// bindings.h.
#include "bindings.h"

#include "driver.h"

namespace py = pybind11;

PYBIND11_MODULE(_C, module) {
#ifdef RESHARD_CUDA_KERNELS
    module.attr("CUDA_KERNELS") = true;
#else
    module.attr("CUDA_KERNELS") = false;
#endif
    module.def("driver_available", &reshard::driver::available);
    reshard::bind_copy(module);
    reshard::bind_quant(module);
    reshard::bind_arena(module);
    reshard::bind_ipc(module);
    reshard::bind_counters(module);
}
