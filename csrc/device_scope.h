// Runtime-API helpers for code that launches kernels beside a framework that has its own copy of the CUDA runtime.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

#include "driver.h"

namespace reshard {

inline void check_cuda(cudaError_t error, const char* what) {
    if (error == cudaSuccess) return;
    throw std::runtime_error(std::string(what) + " failed: " + cudaGetErrorName(error) + ": " +
                             cudaGetErrorString(error));
}

// Makes a device current for this runtime; the destructor gives the thread its earlier driver context back, which is
// what the framework's runtime goes by.
class DeviceScope {
  public:
    explicit DeviceScope(int device) {
        driver::check(driver::api().ctx_get_current(&earlier_), "cuCtxGetCurrent");
        check_cuda(cudaSetDevice(device), "cudaSetDevice");
    }
    ~DeviceScope() {
        if (earlier_ != nullptr) driver::api().ctx_set_current(earlier_);
    }
    DeviceScope(const DeviceScope&) = delete;
    DeviceScope& operator=(const DeviceScope&) = delete;

  private:
    driver::Context earlier_ = nullptr;
};

// The ordinal of the calling thread's current context, or 0 where it has none.
inline int current_device() {
    driver::check(driver::api().init(0), "cuInit");
    driver::Context context = nullptr;
    driver::check(driver::api().ctx_get_current(&context), "cuCtxGetCurrent");
    if (context == nullptr) return 0;
    driver::Device device = 0;
    driver::check(driver::api().ctx_get_device(&device), "cuCtxGetDevice");
    return device;
}

}  // namespace reshard
