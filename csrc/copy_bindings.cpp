#include <pybind11/stl.h>

#include <memory>
#include <stdexcept>
#include <string>

#include "bindings.h"
#include "copy_builder.h"
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

// A contiguous 1-d array of 64-bit integers, which stays alive and unmoved while the view exists.
class IntegersView {
  public:
    explicit IntegersView(const py::buffer& buffer) : info_(buffer.request()) {
        if (info_.ndim != 1 || info_.itemsize != 8 || (info_.shape[0] > 1 && info_.strides[0] != 8))
            throw std::invalid_argument("expected contiguous 1-d arrays of int64");
    }
    std::span<const std::int64_t> values() const {
        return {static_cast<const std::int64_t*>(info_.ptr), static_cast<std::size_t>(info_.shape[0])};
    }

  private:
    py::buffer_info info_;
};

py::bytearray bytes_of(const void* data, std::size_t num_bytes) {
    return {static_cast<const char*>(data), num_bytes};
}

py::tuple build_table_of(const py::buffer& src, const py::buffer& dst, const py::buffer& first_dims,
                         const py::buffer& extents, const py::buffer& src_strides, const py::buffer& dst_strides,
                         const py::buffer& src_dtypes, const py::buffer& dst_dtypes, const py::buffer& itemsizes,
                         int max_targets) {
    const IntegersView views[] = {IntegersView(src),        IntegersView(dst),         IntegersView(first_dims),
                                  IntegersView(extents),    IntegersView(src_strides), IntegersView(dst_strides),
                                  IntegersView(src_dtypes), IntegersView(dst_dtypes),  IntegersView(itemsizes)};
    const CopyColumns columns{views[0].values(), views[1].values(), views[2].values(),
                              views[3].values(), views[4].values(), views[5].values(),
                              views[6].values(), views[7].values(), views[8].values()};
    const BuiltTable built = build_table(columns, max_targets);
    return py::make_tuple(bytes_of(built.records.data(), built.records.size() * sizeof(CopyRecord)),
                          bytes_of(built.owners.data(), built.owners.size() * sizeof(std::int64_t)));
}

TilePlan plan_of(Table table, const TileOptions& options) {
    check_records(table);
    TilePlan plan{{}, {}, {}, options};
    add_tiles(plan, table, fan_heads(table));
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
    module.def("build_table", &build_table_of, py::arg("src"), py::arg("dst"), py::arg("first_dims"),
               py::arg("extents"), py::arg("src_strides"), py::arg("dst_strides"), py::arg("src_dtypes"),
               py::arg("dst_dtypes"), py::arg("itemsizes"), py::kw_only(), py::arg("max_targets"));
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
