// Host memory as an arena sees it: one memfd per chunk, MAP_FIXED mappings over a PROT_NONE reservation.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "arena_driver.h"

namespace reshard {
namespace {

[[noreturn]] void fail(const char* call, int error, uint64_t num_bytes) {
    const char* name = strerrorname_np(error);
    std::string text = std::string(call) + " failed with " + (name ? name : "an unknown error") + " (" +
                       std::strerror(error) + ") for " + std::to_string(num_bytes) + " bytes";
    if (error == EMFILE || error == ENFILE) {
        throw Failure(FailureKind::kDevice,
                      text +
                          "; each host chunk holds one file descriptor: raise the limit (ulimit -n) "
                          "or use larger chunk classes");
    }
    const bool memory = error == ENOMEM || error == ENOSPC;
    throw Failure(memory ? FailureKind::kOutOfMemory : FailureKind::kDevice, text);
}

// The kernel kills instead of refusing when shared memory outgrows RAM, so ask first.
uint64_t available_bytes() {
    std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen("/proc/meminfo", "re"), std::fclose);
    char line[128];
    unsigned long long kib = 0;
    while (file && std::fgets(line, sizeof line, file.get())) {
        if (std::sscanf(line, "MemAvailable: %llu kB", &kib) == 1) return kib << 10;
    }
    return UINT64_MAX;
}

void* pointer(uint64_t address) {
    return reinterpret_cast<void*>(address);
}

class HostDriver final : public MemoryDriver {
  public:
    int device() const override { return -1; }
    uint64_t granularity_bytes() const override { return page_bytes_; }

    uint64_t reserve(uint64_t num_bytes) override {
        void* base = mmap(nullptr, num_bytes, PROT_NONE, kHole, -1, 0);
        if (base == MAP_FAILED) fail("mmap (reserve)", errno, num_bytes);
        return reinterpret_cast<uint64_t>(base);
    }

    void unreserve(Extent range) override {
        if (munmap(pointer(range.address), range.num_bytes) != 0) fail("munmap", errno, range.num_bytes);
    }

    ChunkHandle create(uint64_t num_bytes) override {
        if (const uint64_t available = available_bytes(); num_bytes > available) {
            throw Failure(FailureKind::kOutOfMemory, "a chunk of " + std::to_string(num_bytes) +
                                                         " bytes was asked for, but the host has " +
                                                         std::to_string(available) + " bytes available");
        }
        const int descriptor = memfd_create("reshard-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        if (descriptor < 0) fail("memfd_create", errno, num_bytes);
        const auto size = static_cast<off_t>(num_bytes);
        const char* call = nullptr;
        if (ftruncate(descriptor, size) != 0) {
            call = "ftruncate";
        } else if (fallocate(descriptor, 0, 0, size) != 0) {
            call = "fallocate";
        } else if (fcntl(descriptor, F_ADD_SEALS, kSeals) != 0) {
            call = "fcntl (F_ADD_SEALS)";
        }
        if (call) {
            const int error = errno;
            close(descriptor);
            fail(call, error, num_bytes);
        }
        return static_cast<ChunkHandle>(descriptor);
    }

    void destroy(ChunkHandle handle) override {
        if (close(static_cast<int>(handle)) != 0 && errno != EINTR) fail("close", errno, 0);
    }

    void map(Extent range, ChunkHandle handle) override {
        place(range, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, static_cast<int>(handle), "mmap (map)");
    }

    void allow(Extent) override {}

    void unmap(Extent run) override { place(run, PROT_NONE, kHole | MAP_FIXED, -1, "mmap (unmap)"); }

    int export_descriptor(ChunkHandle handle) override {
        const int copy = fcntl(static_cast<int>(handle), F_DUPFD_CLOEXEC, 0);
        if (copy < 0) fail("fcntl (F_DUPFD_CLOEXEC)", errno, 0);
        return copy;
    }

    ChunkHandle import_descriptor(int descriptor, uint64_t num_bytes) override {
        struct stat status = {};
        if (fstat(descriptor, &status) != 0) fail("fstat", errno, num_bytes);
        const int seals = fcntl(descriptor, F_GET_SEALS);
        // An unsealed file could be cut short later, and a load from it would then kill this process.
        if (seals < 0 || (seals & kSeals) != kSeals || static_cast<uint64_t>(status.st_size) != num_bytes) {
            throw Failure(FailureKind::kArgument, "expected a sealed memory file of " + std::to_string(num_bytes) +
                                                      " bytes, got " + std::to_string(status.st_size) +
                                                      " bytes with seals " + std::to_string(seals) +
                                                      "; pass descriptors that an arena exported");
        }
        return static_cast<ChunkHandle>(export_descriptor(static_cast<ChunkHandle>(descriptor)));
    }

    void fill(Extent run, uint8_t value) override { std::memset(pointer(run.address), value, run.num_bytes); }
    void synchronize() override {}

  private:
    static constexpr int kHole = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    static constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;

    static void place(Extent range, int protection, int flags, int descriptor, const char* call) {
        void* placed = mmap(pointer(range.address), range.num_bytes, protection, flags, descriptor, 0);
        if (placed == MAP_FAILED) fail(call, errno, range.num_bytes);
    }

    const uint64_t page_bytes_ = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
};

}  // namespace

std::shared_ptr<MemoryDriver> make_host_driver() {
    return std::make_shared<HostDriver>();
}

void FaultInjector::arm(const std::string& call, uint64_t countdown, FailureKind kind, uint64_t num_times) {
    armed_ = call;
    countdown_ = countdown;
    kind_ = kind;
    num_left_ = num_times;
}

void FaultInjector::strike(const char* call) {
    if (num_left_ == 0 || armed_ != call) return;
    if (countdown_ > 1) {
        --countdown_;
        return;
    }
    --num_left_;
    throw Failure(kind_, std::string(call) + " failed: injected");
}

}  // namespace reshard
