// reshard._C's part for the arena. Every call that may wait or reach a driver runs without the GIL.
#include <pybind11/stl.h>

#include "arena_core.h"
#include "arena_dlpack.h"
#include "arena_torch.h"
#include "bindings.h"

namespace py = pybind11;

namespace reshard {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

void translate(std::exception_ptr pointer) {
    try {
        if (pointer) std::rethrow_exception(pointer);
    } catch (const Failure& failure) {
        if (failure.kind == FailureKind::kArgument) {
            PyErr_SetString(PyExc_ValueError, failure.what());
            return;
        }
        const char* name = failure.kind == FailureKind::kOutOfMemory ? "OutOfMemory"
                           : failure.kind == FailureKind::kState     ? "StateError"
                                                                     : "DeviceError";
        py::set_error(py::module_::import("reshard.errors").attr(name), failure.what());
    }
}

FailureKind parse_kind(const std::string& kind) {
    if (kind == "memory") return FailureKind::kOutOfMemory;
    if (kind == "device") return FailureKind::kDevice;
    throw Failure(FailureKind::kArgument, "expected kind 'memory' or 'device', got '" + kind + "'");
}

py::capsule view_region(const std::shared_ptr<ArenaCore>& arena, RegionId id, bool versioned) {
    const RegionInfo info = arena->info(id);
    return make_dlpack({info.address, info.num_bytes}, arena->driver().device(), versioned, arena->views(id), arena);
}

py::capsule view_imported(const std::shared_ptr<ImportedCore>& imported, bool versioned) {
    if (!imported->is_open()) throw Failure(FailureKind::kState, "the imported region is closed");
    return make_dlpack(imported->range(), imported->driver().device(), versioned, imported->views(), imported);
}

std::vector<std::pair<int, uint64_t>> export_region(ArenaCore& arena, RegionId id) {
    std::vector<uint64_t> sizes;
    const std::vector<int> descriptors = arena.export_region(id, &sizes);
    std::vector<std::pair<int, uint64_t>> pairs;
    for (size_t i = 0; i < sizes.size(); ++i) pairs.emplace_back(descriptors[i], sizes[i]);
    return pairs;
}

void bind_drivers(py::module_& module) {
    py::class_<MemoryDriver, std::shared_ptr<MemoryDriver>>(module, "MemoryDriver")
        .def_property_readonly("device", &MemoryDriver::device)
        .def_property_readonly("granularity_bytes", &MemoryDriver::granularity_bytes);
    py::class_<FaultInjector, MemoryDriver, std::shared_ptr<FaultInjector>>(module, "FaultInjector")
        .def(py::init<std::shared_ptr<MemoryDriver>>(), py::arg("inner"))
        .def(
            "arm",
            [](FaultInjector& self, const std::string& call, uint64_t countdown, const std::string& kind,
               uint64_t num_times) { self.arm(call, countdown, parse_kind(kind), num_times); },
            py::arg("call"), py::kw_only(), py::arg("countdown") = 1, py::arg("kind") = "device",
            py::arg("num_times") = 1);
    module.def("host_driver", &make_host_driver);
    module.def("cuda_driver", &make_cuda_driver, py::arg("device"), NoGil());
}

void bind_records(py::module_& module) {
    py::class_<RegionInfo>(module, "RegionInfo")
        .def_readonly("id", &RegionInfo::id)
        .def_readonly("name", &RegionInfo::name)
        .def_readonly("group", &RegionInfo::group)
        .def_readonly("address", &RegionInfo::address)
        .def_readonly("num_bytes", &RegionInfo::num_bytes)
        .def_property_readonly("state", [](const RegionInfo& info) { return region_state_label(info.state); })
        .def_readonly("num_chunks", &RegionInfo::num_chunks)
        .def_readonly("generation", &RegionInfo::generation)
        .def_readonly("num_views", &RegionInfo::num_views)
        .def_readonly("num_pins", &RegionInfo::num_pins);
    py::class_<ArenaCounters>(module, "ArenaCounters")
        .def_readonly("created_bytes", &ArenaCounters::created_bytes)
        .def_readonly("free_bytes", &ArenaCounters::free_bytes)
        .def_readonly("backed_bytes", &ArenaCounters::backed_bytes)
        .def_readonly("reserved_bytes", &ArenaCounters::reserved_bytes)
        .def_readonly("peak_created_bytes", &ArenaCounters::peak_created_bytes)
        .def_readonly("num_chunks", &ArenaCounters::num_chunks)
        .def_readonly("num_regions", &ArenaCounters::num_regions)
        .def_readonly("num_creates", &ArenaCounters::num_creates)
        .def_readonly("num_destroys", &ArenaCounters::num_destroys)
        .def_readonly("num_maps", &ArenaCounters::num_maps)
        .def_readonly("num_unmaps", &ArenaCounters::num_unmaps)
        .def_readonly("num_allows", &ArenaCounters::num_allows);
    py::class_<TransitionReport>(module, "TransitionReport")
        .def_readonly("released_bytes", &TransitionReport::released_bytes)
        .def_readonly("backed_bytes", &TransitionReport::backed_bytes)
        .def_readonly("num_creates", &TransitionReport::num_creates)
        .def_readonly("num_destroys", &TransitionReport::num_destroys)
        .def_readonly("num_maps", &TransitionReport::num_maps)
        .def_readonly("num_unmaps", &TransitionReport::num_unmaps)
        .def_readonly("elapsed_us", &TransitionReport::elapsed_us)
        .def_readonly("synchronize_us", &TransitionReport::synchronize_us)
        .def_readonly("create_us", &TransitionReport::create_us)
        .def_readonly("map_us", &TransitionReport::map_us)
        .def_readonly("allow_us", &TransitionReport::allow_us)
        .def_readonly("unmap_us", &TransitionReport::unmap_us);
    py::class_<TorchSlotInfo>(module, "TorchSlotInfo")
        .def_readonly("num_allocs", &TorchSlotInfo::num_allocs)
        .def_readonly("num_frees", &TorchSlotInfo::num_frees)
        .def_readonly("last_error", &TorchSlotInfo::last_error);
}

std::shared_ptr<ArenaCore> make_core(std::shared_ptr<MemoryDriver> driver, std::vector<uint64_t> chunk_classes,
                                     std::optional<uint64_t> budget_bytes, bool keep_mappings, bool poison) {
    return std::make_shared<ArenaCore>(
        std::move(driver),
        ArenaOptions{std::move(chunk_classes), budget_bytes.value_or(UINT64_MAX), keep_mappings, poison});
}

void bind_cores(py::module_& module) {
    py::class_<ArenaCore, std::shared_ptr<ArenaCore>>(module, "ArenaCore")
        .def(py::init(&make_core), py::arg("driver"), py::kw_only(), py::arg("chunk_classes"), py::arg("budget_bytes"),
             py::arg("keep_mappings"), py::arg("poison"))
        .def("reserve", &ArenaCore::reserve, py::arg("name"), py::arg("num_bytes"), py::arg("group"), NoGil())
        .def("free", &ArenaCore::free, py::arg("regions"), NoGil())
        .def_property_readonly("driver", &ArenaCore::shared_driver)
        .def("transition", &ArenaCore::transition, py::arg("release"), py::arg("back"), NoGil())
        .def("trim", &ArenaCore::trim, py::arg("keep_free_bytes"), NoGil())
        .def("close", &ArenaCore::close, NoGil())
        .def("export_region", &export_region, py::arg("region"), NoGil())
        .def("unpin", &ArenaCore::unpin, py::arg("region"), NoGil())
        .def("set_group_budget", &ArenaCore::set_group_budget, py::arg("group"), py::arg("num_bytes"), NoGil())
        .def("info", &ArenaCore::info, py::arg("region"), NoGil())
        .def("regions", &ArenaCore::regions, py::arg("group"), NoGil())
        .def("region_at", &ArenaCore::region_at, py::arg("address"), NoGil())
        .def("chunk_sizes", &ArenaCore::chunk_sizes, NoGil())
        .def("counters", &ArenaCore::counters, NoGil())
        .def("check", &ArenaCore::check, NoGil())
        .def("dlpack", &view_region, py::arg("region"), py::arg("versioned"));
    py::class_<ImportedCore, std::shared_ptr<ImportedCore>>(module, "ImportedCore")
        .def(py::init<std::shared_ptr<MemoryDriver>, const std::vector<int>&, const std::vector<uint64_t>&>(),
             py::arg("driver"), py::arg("descriptors"), py::arg("chunk_bytes"), NoGil())
        .def("close", &ImportedCore::close, NoGil())
        .def_property_readonly("address", [](const ImportedCore& self) { return self.range().address; })
        .def_property_readonly("num_bytes", [](const ImportedCore& self) { return self.range().num_bytes; })
        .def_property_readonly("is_open", &ImportedCore::is_open)
        .def_property_readonly("num_views", [](const ImportedCore& self) { return self.views()->load(); })
        .def("dlpack", &view_imported, py::arg("versioned"));
}

}  // namespace

void bind_arena(py::module_& module) {
    py::register_local_exception_translator(translate);
    bind_drivers(module);
    bind_records(module);
    bind_cores(module);
    module.def("claim_torch_slot", &claim_torch_slot, py::arg("arena"), py::arg("group"), NoGil());
    module.def("retire_torch_slot", &retire_torch_slot, py::arg("slot"), NoGil());
    module.def("torch_slot_info", &torch_slot_info, py::arg("slot"), NoGil());
    module.attr("NUM_TORCH_SLOTS") = kNumTorchSlots;
}

}  // namespace reshard
