#include "driver.h"

#include <dlfcn.h>

namespace reshard::driver {
namespace {

struct Loaded {
    Api api{};
    std::string problem;  // empty when every function was found
};

Loaded load() {
    Loaded loaded;
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        loaded.problem = std::string("the NVIDIA driver library can't be loaded: ") + dlerror();
        return loaded;
    }
#define RESHARD_DRIVER_RESOLVE(member, symbol, parameters)                                      \
    loaded.api.member = reinterpret_cast<decltype(loaded.api.member)>(dlsym(library, #symbol)); \
    if (loaded.api.member == nullptr && loaded.problem.empty())                                 \
        loaded.problem = "the NVIDIA driver is too old: libcuda.so.1 has no " #symbol;
    RESHARD_DRIVER_FUNCTIONS(RESHARD_DRIVER_RESOLVE)
#undef RESHARD_DRIVER_RESOLVE
    return loaded;
}

const Loaded& loaded() {
    static const Loaded instance = load();
    return instance;
}

}  // namespace

bool available() noexcept {
    return loaded().problem.empty();
}

const Api& api() {
    if (!available()) throw DriverError(kNotInitialized, loaded().problem);
    return loaded().api;
}

void check(Result result, const char* what) {
    if (result == kSuccess) return;
    const char* name = nullptr;
    const char* text = nullptr;
    if (api().get_error_name(result, &name) != kSuccess || name == nullptr) name = "unknown error";
    if (api().get_error_string(result, &text) != kSuccess || text == nullptr) text = "no description";
    throw DriverError(result, std::string(what) + " failed: " + name + " (" + std::to_string(result) + "): " + text);
}

}  // namespace reshard::driver
