#include <pybind11/stl.h>

#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>

#include "bindings.h"
#include "copy_host.h"
#include "copy_table.h"
#include "copy_tiles.h"
#include "record_view.h"
#ifdef RESHARD_CUDA_KERNELS
#include "copy_device.h"
#endif

namespace py = pybind11;

namespace reshard {
namespace {

constexpr char kTableMaker[] = "reshard.table.make_table";

void copy_host_of(const py::buffer& buffer, int num_threads) {
    const RecordView<CopyRecord> view(buffer, kTableMaker);
    py::gil_scoped_release release;
    copy_host(view.records(), num_threads);
}

std::vector<std::uint64_t> checksum_host_of(const py::buffer& buffer, bool of_destination, int num_threads) {
    const RecordView<CopyRecord> view(buffer, kTableMaker);
    py::gil_scoped_release release;
    return checksum_host(view.records(), of_destination, num_threads);
}

std::optional<py::tuple> find_overlap_of(const py::buffer& buffer) {
    const RecordView<CopyRecord> view(buffer, kTableMaker);
    const auto overlap = find_overlap(view.records());
    if (!overlap) return std::nullopt;
    return py::make_tuple(overlap->first, overlap->second, overlap->with_source);
}

TilePlan plan_of(Table table, const TileOptions& options) {
    check_records(table);
    std::vector<std::uint32_t> order(table.size());
    std::iota(order.begin(), order.end(), 0u);
    TilePlan plan{{}, {}, options};
    add_tiles(plan, table, order);
    return plan;
}

void run_tiles_on_host_of(const py::buffer& buffer, std::uint32_t tile_vectors, bool wide_casts,
                          std::uint32_t max_vectors) {
    const RecordView<CopyRecord> view(buffer, kTableMaker);
    run_tiles_on_host(plan_of(view.records(), {tile_vectors, wide_casts, max_vectors}));
}

std::vector<std::uint64_t> checksum_tiles_on_host_of(const py::buffer& buffer, bool of_destination,
                                                     std::uint32_t max_vectors) {
    const RecordView<CopyRecord> view(buffer, kTableMaker);
    TileOptions options;
    options.max_vectors = max_vectors;
    return checksum_tiles_on_host(plan_of(view.records(), options), view.records().size(), of_destination);
}

#ifdef RESHARD_CUDA_KERNELS
std::unique_ptr<DeviceTable> make_device_table(const py::buffer& buffer, int device, std::uint32_t tile_vectors,
                                               bool wide_casts, int vectors_in_flight, int blocks_per_sm,
                                               std::uint64_t copy_engine_min_bytes) {
    const RecordView<CopyRecord> view(buffer, kTableMaker);
    py::gil_scoped_release release;
    const DeviceOptions options{
        device, {tile_vectors, wide_casts}, vectors_in_flight, blocks_per_sm, copy_engine_min_bytes};
    return std::make_unique<DeviceTable>(view.records(), options);
}

void bind_device_table(py::module_& module) {
    const DeviceOptions defaults;
    py::class_<DeviceTable>(module, "DeviceTable")
        .def(py::init(&make_device_table), py::arg("table"), py::kw_only(), py::arg("device") = defaults.device,
             py::arg("tile_vectors") = defaults.tiles.tile_vectors, py::arg("wide_casts") = defaults.tiles.wide_casts,
             py::arg("vectors_in_flight") = defaults.vectors_in_flight,
             py::arg("blocks_per_sm") = defaults.blocks_per_sm,
             py::arg("copy_engine_min_bytes") = defaults.copy_engine_min_bytes)
        .def("launch", &DeviceTable::launch, py::arg("stream"), py::call_guard<py::gil_scoped_release>())
        .def("launch_checksum", &DeviceTable::launch_checksum, py::arg("stream"), py::arg("sums"), py::kw_only(),
             py::arg("of_destination"), py::call_guard<py::gil_scoped_release>())
        .def_property_readonly("device", &DeviceTable::device)
        .def_property_readonly("num_records", &DeviceTable::num_records)
        .def_property_readonly("num_tiles", &DeviceTable::num_tiles)
        .def_property_readonly("num_launches", &DeviceTable::num_launches)
        .def_property_readonly("device_bytes", &DeviceTable::device_bytes);
}
#endif

}  // namespace

void bind_copy(py::module_& module) {
    module.def(
        "check_records",
        [](const py::buffer& buffer) { check_records(RecordView<CopyRecord>(buffer, kTableMaker).records()); },
        py::arg("table"));
    module.def("find_overlap", &find_overlap_of, py::arg("table"));
    module.def("copy_host", &copy_host_of, py::arg("table"), py::arg("num_threads") = 0);
    module.def("checksum_host", &checksum_host_of, py::arg("table"), py::kw_only(), py::arg("of_destination"),
               py::arg("num_threads") = 0);
    const TileOptions defaults;
    module.def("_run_tiles_on_host", &run_tiles_on_host_of, py::arg("table"), py::kw_only(),
               py::arg("tile_vectors") = defaults.tile_vectors, py::arg("wide_casts") = defaults.wide_casts,
               py::arg("max_vectors") = defaults.max_vectors);
    module.def("_checksum_tiles_on_host", &checksum_tiles_on_host_of, py::arg("table"), py::kw_only(),
               py::arg("of_destination"), py::arg("max_vectors") = defaults.max_vectors);
#ifdef RESHARD_CUDA_KERNELS
    bind_device_table(module);
#endif
}

}  // namespace reshard
