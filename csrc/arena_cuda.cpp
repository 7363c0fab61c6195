// CUDA memory as an arena sees it: the driver's virtual memory management, chunks exportable as file descriptors.
#include <unistd.h>

#include <cerrno>

#include "arena_driver.h"
#include "driver.h"

namespace reshard {
namespace {

using driver::api;

[[noreturn]] void rethrow(const driver::DriverError& error) {
    throw Failure(error.is_out_of_memory() ? FailureKind::kOutOfMemory : FailureKind::kDevice, error.what());
}

void check(driver::Result result, const char* what) {
    try {
        driver::check(result, what);
    } catch (const driver::DriverError& error) {
        rethrow(error);
    }
}

// The device's primary context (the one PyTorch uses), current for one scope.
class Scope {
  public:
    explicit Scope(driver::Context context) { check(api().ctx_push_current(context), "cuCtxPushCurrent"); }
    ~Scope() {
        driver::Context old = nullptr;
        api().ctx_pop_current(&old);
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
};

class CudaDriver final : public MemoryDriver {
  public:
    explicit CudaDriver(int ordinal) : ordinal_(ordinal) {
        check(api().init(0), "cuInit");
        check(api().device_get(&device_, ordinal), "cuDeviceGet");
        require(driver::kAttributeVirtualMemoryManagement, "virtual memory management");
        require(driver::kAttributePosixHandleSupported, "memory handles as POSIX file descriptors");
        check(api().primary_ctx_retain(&context_, device_), "cuDevicePrimaryCtxRetain");
        try {
            const Scope scope(context_);
            const driver::MemAllocationProp wanted = properties();
            size_t granularity = 0;
            check(api().mem_get_allocation_granularity(&granularity, &wanted, driver::kGranularityRecommended),
                  "cuMemGetAllocationGranularity");
            granularity_bytes_ = granularity;
        } catch (const Failure&) {
            api().primary_ctx_release(device_);
            throw;
        }
    }

    ~CudaDriver() override { api().primary_ctx_release(device_); }

    int device() const override { return ordinal_; }
    uint64_t granularity_bytes() const override { return granularity_bytes_; }

    uint64_t reserve(uint64_t num_bytes) override {
        const Scope scope(context_);
        driver::DevicePtr address = 0;
        check(api().mem_address_reserve(&address, num_bytes, 0, 0, 0), "cuMemAddressReserve");
        return address;
    }

    void unreserve(Extent range) override {
        const Scope scope(context_);
        check(api().mem_address_free(range.address, range.num_bytes), "cuMemAddressFree");
    }

    ChunkHandle create(uint64_t num_bytes) override {
        const Scope scope(context_);
        const driver::MemAllocationProp wanted = properties();
        driver::MemHandle handle = 0;
        check(api().mem_create(&handle, num_bytes, &wanted, 0), "cuMemCreate");
        return handle;
    }

    void destroy(ChunkHandle handle) override {
        const Scope scope(context_);
        check(api().mem_release(handle), "cuMemRelease");
    }

    void map(Extent range, ChunkHandle handle) override {
        const Scope scope(context_);
        check(api().mem_map(range.address, range.num_bytes, 0, handle, 0), "cuMemMap");
    }

    void allow(Extent run) override {
        const Scope scope(context_);
        const driver::MemAccessDesc access{properties().location, driver::kAccessReadWrite};
        check(api().mem_set_access(run.address, run.num_bytes, &access, 1), "cuMemSetAccess");
    }

    void unmap(Extent run) override {
        const Scope scope(context_);
        check(api().mem_unmap(run.address, run.num_bytes), "cuMemUnmap");
    }

    int export_descriptor(ChunkHandle handle) override {
        const Scope scope(context_);
        require_spare_descriptor();
        int descriptor = -1;
        check(api().mem_export_to_shareable_handle(&descriptor, handle, driver::kHandlePosixFileDescriptor, 0),
              "cuMemExportToShareableHandle");
        return descriptor;
    }

    ChunkHandle import_descriptor(int descriptor, uint64_t) override {
        const Scope scope(context_);
        driver::MemHandle handle = 0;
        void* shareable = reinterpret_cast<void*>(static_cast<intptr_t>(descriptor));
        check(api().mem_import_from_shareable_handle(&handle, shareable, driver::kHandlePosixFileDescriptor),
              "cuMemImportFromShareableHandle");
        return handle;
    }

    void fill(Extent run, uint8_t value) override {
        const Scope scope(context_);
        check(api().memset_d8_async(run.address, value, run.num_bytes, nullptr), "cuMemsetD8Async");
        check(api().ctx_synchronize(), "cuCtxSynchronize");
    }

    void synchronize() override {
        const Scope scope(context_);
        check(api().ctx_synchronize(), "cuCtxSynchronize");
    }

  private:
    driver::MemAllocationProp properties() const {
        driver::MemAllocationProp wanted{};
        wanted.type = driver::kAllocationPinned;
        wanted.requested_handle_types = driver::kHandlePosixFileDescriptor;
        wanted.location = {driver::kLocationDevice, device_};
        return wanted;
    }

    void require(int attribute, const char* what) const {
        int supported = 0;
        check(api().device_get_attribute(&supported, attribute, device_), "cuDeviceGetAttribute");
        if (supported == 0) {
            throw Failure(FailureKind::kDevice, "CUDA device " + std::to_string(ordinal_) + " has no " + what +
                                                    "; an arena needs it (Linux, compute capability 7.0 or newer)");
        }
    }

    // The driver reports a full descriptor table as an unspecific error, so look before it does.
    static void require_spare_descriptor() {
        const int spare = dup(STDERR_FILENO);
        if (spare >= 0) {
            close(spare);
        } else if (errno == EMFILE || errno == ENFILE) {
            throw Failure(
                FailureKind::kDevice,
                "EMFILE: no file descriptor is left to export a chunk with; raise the limit (ulimit -n) or use "
                "larger chunk classes");
        }
    }

    const int ordinal_;
    driver::Device device_ = 0;
    driver::Context context_ = nullptr;
    uint64_t granularity_bytes_ = 0;
};

}  // namespace

std::shared_ptr<MemoryDriver> make_cuda_driver(int device) {
    try {
        return std::make_shared<CudaDriver>(device);
    } catch (const driver::DriverError& error) {
        rethrow(error);
    }
}

}  // namespace reshard
