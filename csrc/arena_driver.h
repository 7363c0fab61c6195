// The mechanism below an arena: address space, physical chunks, mappings. One interface, two instances (host, CUDA).
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace reshard {

// What went wrong, so that the bindings can pick the Python type without reading the message.
enum class FailureKind { kOutOfMemory, kState, kDevice, kArgument };

struct Failure : std::runtime_error {
    Failure(FailureKind kind, const std::string& message) : std::runtime_error(message), kind(kind) {}
    FailureKind kind;
};

struct Extent {
    uint64_t address;
    uint64_t num_bytes;
};

using ChunkHandle = uint64_t;

// Every call throws Failure and then has had no effect. Calls are made under the arena's lock.
class MemoryDriver {
  public:
    virtual ~MemoryDriver() = default;

    virtual int device() const = 0;                  // CUDA ordinal; -1 is the host
    virtual uint64_t granularity_bytes() const = 0;  // every size and offset is a multiple of it

    virtual uint64_t reserve(uint64_t num_bytes) = 0;
    virtual void unreserve(Extent range) = 0;

    virtual ChunkHandle create(uint64_t num_bytes) = 0;
    virtual void destroy(ChunkHandle handle) = 0;

    // After map() a range is not yet accessible; allow() opens one contiguous run of mapped chunks at once.
    virtual void map(Extent range, ChunkHandle handle) = 0;
    virtual void allow(Extent run) = 0;
    virtual void unmap(Extent run) = 0;  // a run of whole mappings

    virtual int export_descriptor(ChunkHandle handle) = 0;                          // the caller closes it
    virtual ChunkHandle import_descriptor(int descriptor, uint64_t num_bytes) = 0;  // the descriptor stays the caller's

    virtual void fill(Extent run, uint8_t value) = 0;  // returns when the bytes are written
    virtual void synchronize() = 0;                    // work in flight on this memory has ended
};

std::shared_ptr<MemoryDriver> make_host_driver();
std::shared_ptr<MemoryDriver> make_cuda_driver(int device);

// Fails the given call (by its name above, 1 = the next one) once; for tests of the arena's guarantees.
class FaultInjector : public MemoryDriver {
  public:
    explicit FaultInjector(std::shared_ptr<MemoryDriver> inner) : inner_(std::move(inner)) {}
    void arm(const std::string& call, uint64_t countdown, FailureKind kind, uint64_t num_times);

    int device() const override { return inner_->device(); }
    uint64_t granularity_bytes() const override { return inner_->granularity_bytes(); }
    uint64_t reserve(uint64_t num_bytes) override { return strike("reserve"), inner_->reserve(num_bytes); }
    void unreserve(Extent range) override { strike("unreserve"), inner_->unreserve(range); }
    ChunkHandle create(uint64_t num_bytes) override { return strike("create"), inner_->create(num_bytes); }
    void destroy(ChunkHandle handle) override { strike("destroy"), inner_->destroy(handle); }
    void map(Extent range, ChunkHandle handle) override { strike("map"), inner_->map(range, handle); }
    void allow(Extent run) override { strike("allow"), inner_->allow(run); }
    void unmap(Extent run) override { strike("unmap"), inner_->unmap(run); }
    int export_descriptor(ChunkHandle handle) override {
        return strike("export_descriptor"), inner_->export_descriptor(handle);
    }
    ChunkHandle import_descriptor(int descriptor, uint64_t num_bytes) override {
        return strike("import_descriptor"), inner_->import_descriptor(descriptor, num_bytes);
    }
    void fill(Extent run, uint8_t value) override { strike("fill"), inner_->fill(run, value); }
    void synchronize() override { strike("synchronize"), inner_->synchronize(); }

  private:
    void strike(const char* call);

    std::shared_ptr<MemoryDriver> inner_;
    std::string armed_;
    uint64_t countdown_ = 0;
    uint64_t num_left_ = 0;
    FailureKind kind_ = FailureKind::kDevice;
};

}  // namespace reshard
