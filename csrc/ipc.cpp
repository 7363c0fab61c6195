// Device memory that is not an arena's (cudaMalloc's, PyTorch's caching allocator's), opened to other processes of this
// host by CUDA IPC handles.
//
// A handle names a whole allocation. A process opens each only once per device, however many mappings ask for it, and
// closes it with the last of them; it can't open its own.
#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "arena_dlpack.h"
#include "arena_driver.h"
#include "bindings.h"
#include "driver.h"

namespace py = pybind11;

namespace reshard {
namespace {

using driver::api;
using NoGil = py::call_guard<py::gil_scoped_release>;

void check(driver::Result result, const std::string& what) {
    try {
        driver::check(result, what.c_str());
    } catch (const driver::DriverError& error) {
        throw Failure(error.is_out_of_memory() ? FailureKind::kOutOfMemory : FailureKind::kDevice, error.what());
    }
}

void initialize() {
    try {
        check(api().init(0), "cuInit");
    } catch (const driver::DriverError& error) {
        throw Failure(FailureKind::kDevice, error.what());
    }
}

// A device's primary context, which PyTorch uses too. What is mapped in it lasts as long as someone retains it.
class PrimaryContext {
  public:
    explicit PrimaryContext(int ordinal) {
        check(api().device_get(&device_, ordinal), "cuDeviceGet");
        check(api().primary_ctx_retain(&context_, device_), "cuDevicePrimaryCtxRetain");
    }
    ~PrimaryContext() { api().primary_ctx_release(device_); }
    PrimaryContext(const PrimaryContext&) = delete;
    PrimaryContext& operator=(const PrimaryContext&) = delete;

    driver::Context get() const { return context_; }

  private:
    driver::Device device_ = 0;
    driver::Context context_ = nullptr;
};

// A context that is current for one scope.
class CurrentScope {
  public:
    explicit CurrentScope(const PrimaryContext& primary) {
        check(api().ctx_push_current(primary.get()), "cuCtxPushCurrent");
    }
    ~CurrentScope() {
        driver::Context old = nullptr;
        api().ctx_pop_current(&old);
    }
    CurrentScope(const CurrentScope&) = delete;
    CurrentScope& operator=(const CurrentScope&) = delete;
};

template <typename Value>
Value pointer_attribute(std::uint64_t address, int attribute, const char* name) {
    Value value{};
    check(api().pointer_get_attribute(&value, attribute, address),
          "cuPointerGetAttribute(" + std::string(name) + ") of address " + std::to_string(address));
    return value;
}

struct Exported {
    std::string handle;
    std::uint64_t base, num_bytes;
};

Exported export_memory(std::uint64_t address) {
    initialize();
    unsigned memory_type = 0;
    const driver::Result known = api().pointer_get_attribute(&memory_type, driver::kPointerMemoryType, address);
    if (known != driver::kSuccess || memory_type != driver::kMemoryTypeDevice)
        throw Failure(FailureKind::kState, "address " + std::to_string(address) +
                                               " is not device memory: only that of a GPU has CUDA IPC handles; share "
                                               "host memory from an arena (Arena.host)");
    if (pointer_attribute<int>(address, driver::kPointerIpcCapable, "IS_LEGACY_CUDA_IPC_CAPABLE") == 0)
        throw Failure(FailureKind::kState,
                      "the device memory at " + std::to_string(address) +
                          " has no CUDA IPC handle: it comes from virtual memory management or from a memory pool (as "
                          "PyTorch's does with expandable_segments:True or backend:cudaMallocAsync); allocate it from "
                          "an arena (Arena.cuda), or turn that option off");
    const int ordinal = pointer_attribute<int>(address, driver::kPointerDeviceOrdinal, "DEVICE_ORDINAL");
    Exported exported;
    exported.base = pointer_attribute<std::uint64_t>(address, driver::kPointerRangeStart, "RANGE_START_ADDR");
    exported.num_bytes = pointer_attribute<std::size_t>(address, driver::kPointerRangeSize, "RANGE_SIZE");
    const PrimaryContext primary(ordinal);
    const CurrentScope scope(primary);
    driver::IpcMemHandle handle;
    check(api().ipc_get_mem_handle(&handle, exported.base), "cuIpcGetMemHandle");
    exported.handle.assign(handle.reserved, sizeof handle.reserved);
    return exported;
}

// An open handle, shared by all mappings of it in this process.
class OpenHandle {
  public:
    OpenHandle(const std::string& handle, int device) : primary_(device) {
        driver::IpcMemHandle raw;
        std::memcpy(raw.reserved, handle.data(), sizeof raw.reserved);
        const CurrentScope scope(primary_);
        check(api().ipc_open_mem_handle(&address_, raw, driver::kIpcLazyPeerAccess), "cuIpcOpenMemHandle");
    }
    ~OpenHandle() {
        try {
            const CurrentScope scope(primary_);
            api().ctx_synchronize();
            api().ipc_close_mem_handle(address_);
        } catch (const Failure&) {
            // The device is gone, and the mapping with it.
        }
    }
    OpenHandle(const OpenHandle&) = delete;
    OpenHandle& operator=(const OpenHandle&) = delete;

    std::uint64_t address() const { return address_; }

  private:
    PrimaryContext primary_;
    driver::DevicePtr address_ = 0;
};

using Key = std::pair<std::string, int>;

struct Registry {
    std::mutex mutex;
    std::map<Key, std::weak_ptr<OpenHandle>> open;
};

Registry& registry() {
    static Registry* const instance = new Registry;  // outlives every mapping that the interpreter's end leaves
    return *instance;
}

std::shared_ptr<OpenHandle> open_handle(const std::string& handle, int device) {
    initialize();
    const std::lock_guard lock(registry().mutex);
    std::erase_if(registry().open, [](const auto& entry) { return entry.second.expired(); });
    std::weak_ptr<OpenHandle>& known = registry().open[Key{handle, device}];
    std::shared_ptr<OpenHandle> found = known.lock();
    if (!found) {
        found = std::make_shared<OpenHandle>(handle, device);
        known = found;
    }
    return found;
}

std::size_t num_open_handles() {
    const std::lock_guard lock(registry().mutex);
    return static_cast<std::size_t>(std::count_if(registry().open.begin(), registry().open.end(),
                                                  [](const auto& entry) { return !entry.second.expired(); }));
}

class IpcMapping {
  public:
    IpcMapping(const std::string& handle, std::uint64_t num_bytes, int device)
        : num_bytes_(num_bytes), device_(device) {
        if (handle.size() != sizeof(driver::IpcMemHandle::reserved))
            throw Failure(FailureKind::kArgument,
                          "expected a CUDA IPC handle of 64 bytes, got " + std::to_string(handle.size()));
        if (num_bytes == 0 || device < 0)
            throw Failure(FailureKind::kArgument, "expected a size above 0 bytes and a CUDA ordinal, got " +
                                                      std::to_string(num_bytes) + " and " + std::to_string(device));
        handle_ = open_handle(handle, device);
        address_ = handle_->address();
    }

    std::uint64_t address() const { return address_; }
    std::uint64_t num_bytes() const { return num_bytes_; }
    bool is_open() const { return handle_ != nullptr; }

    void close() {
        if (!handle_) return;
        if (views_->load() > 0)
            throw Failure(FailureKind::kState, "the imported memory still has " + std::to_string(views_->load()) +
                                                   " views; drop them before closing it");
        handle_.reset();
    }

    py::capsule dlpack(bool versioned) const {
        if (!handle_) throw Failure(FailureKind::kState, "the imported memory is closed");
        return make_dlpack({address_, num_bytes_}, device_, versioned, views_, handle_);
    }

  private:
    std::shared_ptr<OpenHandle> handle_;
    std::uint64_t address_ = 0;
    std::uint64_t num_bytes_;
    int device_;
    Views views_ = std::make_shared<Views::element_type>(0);
};

}  // namespace

void bind_ipc(py::module_& module) {
    module.def(
        "ipc_export",
        [](std::uint64_t address) {
            const Exported exported = [&] {
                py::gil_scoped_release release;
                return export_memory(address);
            }();
            return py::make_tuple(py::bytes(exported.handle), exported.base, exported.num_bytes);
        },
        py::arg("address"));
    module.def("ipc_num_open", &num_open_handles);
    py::class_<IpcMapping>(module, "IpcMapping")
        .def(py::init<const std::string&, std::uint64_t, int>(), py::arg("handle"), py::kw_only(), py::arg("num_bytes"),
             py::arg("device"), NoGil())
        .def_property_readonly("address", &IpcMapping::address)
        .def_property_readonly("num_bytes", &IpcMapping::num_bytes)
        .def_property_readonly("is_open", &IpcMapping::is_open)
        .def("close", &IpcMapping::close, NoGil())
        .def("dlpack", &IpcMapping::dlpack, py::arg("versioned"));
}

}  // namespace reshard
