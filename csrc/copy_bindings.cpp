#include <pybind11/stl.h>

#include <stdexcept>
#include <string>

#include "bindings.h"
#include "copy_host.h"
#include "copy_table.h"

namespace py = pybind11;

namespace reshard {
namespace {

// A view of a COPY_RECORD array. The buffer keeps the array alive and unmoved while it exists.
class TableView {
  public:
    explicit TableView(const py::buffer& buffer) : info_(buffer.request()) {
        const bool fits = info_.ndim == 1 && info_.itemsize == sizeof(CopyRecord) &&
                          (info_.shape[0] < 2 || info_.strides[0] == static_cast<py::ssize_t>(sizeof(CopyRecord)));
        if (!fits)
            throw std::invalid_argument(
                "expected a contiguous 1-d array of 128-byte copy records (reshard.table.make_table), but got " +
                std::to_string(info_.ndim) + "-d data with items of " + std::to_string(info_.itemsize) + " bytes");
    }

    Table table() const {
        return {static_cast<const CopyRecord*>(info_.ptr), static_cast<std::size_t>(info_.shape[0])};
    }

  private:
    py::buffer_info info_;
};

void copy_host_of(const py::buffer& buffer, int num_threads) {
    const TableView view(buffer);
    py::gil_scoped_release release;
    copy_host(view.table(), num_threads);
}

std::vector<std::uint64_t> checksum_host_of(const py::buffer& buffer, bool of_destination, int num_threads) {
    const TableView view(buffer);
    py::gil_scoped_release release;
    return checksum_host(view.table(), of_destination, num_threads);
}

std::optional<py::tuple> find_overlap_of(const py::buffer& buffer) {
    const TableView view(buffer);
    const auto overlap = find_overlap(view.table());
    if (!overlap) return std::nullopt;
    return py::make_tuple(overlap->first, overlap->second, overlap->with_source);
}

}  // namespace

void bind_copy(py::module_& module) {
    module.def(
        "check_records", [](const py::buffer& buffer) { check_records(TableView(buffer).table()); }, py::arg("table"));
    module.def("find_overlap", &find_overlap_of, py::arg("table"));
    module.def("copy_host", &copy_host_of, py::arg("table"), py::arg("num_threads") = 0);
    module.def("checksum_host", &checksum_host_of, py::arg("table"), py::kw_only(), py::arg("of_destination"),
               py::arg("num_threads") = 0);
}

}  // namespace reshard
