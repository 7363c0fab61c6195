#include "bindings.h"
#include "quant_table.h"
#include "record_view.h"
#ifdef RESHARD_CUDA_KERNELS
#include "quant_device.h"
#endif

namespace py = pybind11;

namespace reshard {
namespace {

constexpr char kTableMaker[] = "reshard.quant.make_quant_table";

void quantize_host_of(const py::buffer& buffer, int num_threads) {
    const RecordView<QuantRecord> view(buffer, kTableMaker);
    py::gil_scoped_release release;
    quantize_host(view.records(), num_threads);
}

#ifdef RESHARD_CUDA_KERNELS
std::unique_ptr<QuantDeviceTable> make_quant_device_table(const py::buffer& buffer, int device) {
    const RecordView<QuantRecord> view(buffer, kTableMaker);
    py::gil_scoped_release release;
    return std::make_unique<QuantDeviceTable>(view.records(), device);
}
#endif

}  // namespace

void bind_quant(py::module_& module) {
    module.def("quantize_host", &quantize_host_of, py::arg("table"), py::arg("num_threads") = 0);
#ifdef RESHARD_CUDA_KERNELS
    py::class_<QuantDeviceTable>(module, "QuantDeviceTable")
        .def(py::init(&make_quant_device_table), py::arg("table"), py::kw_only(), py::arg("device") = -1)
        .def("launch", &QuantDeviceTable::launch, py::arg("stream"), py::call_guard<py::gil_scoped_release>())
        .def_property_readonly("device", &QuantDeviceTable::device)
        .def_property_readonly("num_launches", &QuantDeviceTable::num_launches)
        .def_property_readonly("device_bytes", &QuantDeviceTable::device_bytes);
#endif
}

}  // namespace reshard
