// Quantising copies on a CUDA device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

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
    int num_launches() const { return static_cast<int>(launches_.size()) + (num_groups_ > 0); }
    std::size_t device_bytes() const { return device_bytes_; }

  private:
    // Units of one size class: see quant_units.cuh.
    struct UnitLaunch {
        int threads;
        std::uint32_t shared_bytes;
        std::uint32_t first_unit, num_units;
    };

    int device_ = 0;
    std::vector<UnitLaunch> launches_;
    std::uint32_t num_others_ = 0;  // records that are quantised group by group
    std::uint32_t num_groups_ = 0;
    unsigned group_blocks_ = 0;
    std::size_t device_bytes_ = 0;
    std::unique_ptr<void, FreeOnDevice> memory_;  // records of units, each unit's, other records, their first groups
    std::size_t unit_records_at_ = 0, others_at_ = 0, first_groups_at_ = 0;
};

}  // namespace reshard
