// Quantising copies on a CUDA device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "copy_device.h"
#include "quant_table.h"

namespace reshard {

// A quantising table in device memory: uploaded by the constructor, launched any number of times.
class QuantDeviceTable {
  public:
    // device: CUDA ordinal, -1 for that of the thread's current context. Throws as DeviceTable does.
    QuantDeviceTable(QuantTable table, int device);

    // Queues one run; neither allocates nor synchronises, and can be captured in a graph.
    void launch(std::uint64_t stream) const;

    int device() const { return device_; }
    int num_launches() const { return num_groups_ > 0 ? 1 : 0; }
    std::size_t device_bytes() const { return device_bytes_; }

  private:
    int device_ = 0;
    std::uint32_t num_groups_ = 0;
    std::size_t num_records_ = 0;
    std::size_t device_bytes_ = 0;
    unsigned blocks_ = 0;
    std::unique_ptr<void, FreeOnDevice> memory_;  // the records, then each one's first group
};

}  // namespace reshard
