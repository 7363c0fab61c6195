#include <utility>

#include "arena_core.h"

namespace reshard {

ImportedCore::ImportedCore(std::shared_ptr<MemoryDriver> driver, const std::vector<int>& descriptors,
                           const std::vector<uint64_t>& chunk_bytes)
    : driver_(std::move(driver)) {
    const uint64_t unit = driver_->granularity_bytes();
    if (descriptors.empty() || descriptors.size() != chunk_bytes.size()) {
        throw Failure(FailureKind::kArgument, "expected one descriptor for each chunk and at least one, got " +
                                                  std::to_string(descriptors.size()) + " descriptors and " +
                                                  std::to_string(chunk_bytes.size()) + " sizes");
    }
    for (const uint64_t num_bytes : chunk_bytes) {
        if (num_bytes == 0 || num_bytes % unit != 0 || range_.num_bytes + num_bytes < num_bytes) {
            throw Failure(FailureKind::kArgument, "expected chunk sizes that are multiples of " + std::to_string(unit) +
                                                      " bytes, got " + std::to_string(num_bytes));
        }
        range_.num_bytes += num_bytes;
    }
    range_.address = driver_->reserve(range_.num_bytes);
    try {
        map_all(descriptors, chunk_bytes);
    } catch (const Failure&) {
        undo();
        throw;
    }
    open_ = true;
}

ImportedCore::~ImportedCore() {
    if (open_) undo();
}

void ImportedCore::map_all(const std::vector<int>& descriptors, const std::vector<uint64_t>& chunk_bytes) {
    for (size_t i = 0; i < descriptors.size(); ++i) {
        handles_.push_back(driver_->import_descriptor(descriptors[i], chunk_bytes[i]));
        driver_->map({range_.address + mapped_bytes_, chunk_bytes[i]}, handles_.back());
        mapped_bytes_ += chunk_bytes[i];
    }
    driver_->allow(range_);
}

void ImportedCore::undo() noexcept {
    const auto attempt = [](auto&& call) {
        try {
            call();
        } catch (const Failure&) {
            // The device is gone, and the mapping with it.
        }
    };
    if (mapped_bytes_ > 0) attempt([&] { driver_->unmap({range_.address, mapped_bytes_}); });
    for (const ChunkHandle handle : handles_) attempt([&] { driver_->destroy(handle); });
    attempt([&] { driver_->unreserve(range_); });
    handles_.clear();
    mapped_bytes_ = 0;
    open_ = false;
}

void ImportedCore::close() {
    if (!open_) return;
    if (views_->load() > 0) {
        throw Failure(FailureKind::kState, "the imported region still has " + std::to_string(views_->load()) +
                                               " views; drop them before closing it");
    }
    driver_->synchronize();
    undo();
}

}  // namespace reshard
