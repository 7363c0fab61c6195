// Records in a Python buffer.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <span>
#include <stdexcept>
#include <string>

namespace reshard {

// A view of a contiguous 1-d array of records, which stays alive and unmoved while the view exists. Throws
// std::invalid_argument, naming what makes such arrays, for any other buffer.
template <typename Record>
class RecordView {
  public:
    RecordView(const pybind11::buffer& buffer, const char* maker) : info_(buffer.request()) {
        const bool fits = info_.ndim == 1 && info_.itemsize == sizeof(Record) &&
                          (info_.shape[0] < 2 || info_.strides[0] == static_cast<pybind11::ssize_t>(sizeof(Record)));
        if (!fits)
            throw std::invalid_argument("expected a contiguous 1-d array of " + std::to_string(sizeof(Record)) +
                                        "-byte copy records (" + maker + "), but got " + std::to_string(info_.ndim) +
                                        "-d data with items of " + std::to_string(info_.itemsize) + " bytes");
    }

    std::span<const Record> records() const {
        return {static_cast<const Record*>(info_.ptr), static_cast<std::size_t>(info_.shape[0])};
    }

  private:
    pybind11::buffer_info info_;
};

}  // namespace reshard
