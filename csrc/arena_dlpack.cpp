#include "arena_dlpack.h"

#include <utility>

namespace py = pybind11;

namespace reshard {
namespace {

// The ABI of DLPack 1.0 (dmlc/dlpack, dlpack.h): names and order of its fields, the few constants used here.
struct DLDevice {
    int32_t device_type;
    int32_t device_id;
};
struct DLDataType {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
};
struct DLTensor {
    void* data;
    DLDevice device;
    int32_t ndim;
    DLDataType dtype;
    int64_t* shape;
    int64_t* strides;
    uint64_t byte_offset;
};
struct DLManagedTensor {
    DLTensor tensor;
    void* manager;
    void (*deleter)(DLManagedTensor*);
};
struct DLManagedTensorVersioned {
    uint32_t major;
    uint32_t minor;
    void* manager;
    void (*deleter)(DLManagedTensorVersioned*);
    uint64_t flags;
    DLTensor tensor;
};
constexpr int32_t kDeviceCpu = 1;
constexpr int32_t kDeviceCuda = 2;
constexpr uint8_t kCodeUnsigned = 1;

template <typename Managed>
struct View {
    Managed managed{};
    int64_t shape[1];
    int64_t strides[1] = {1};
    Views views;
    std::shared_ptr<void> owner;
};

template <typename Managed>
py::capsule make(Extent range, int device, Views views, std::shared_ptr<void> owner, const char* name,
                 PyCapsule_Destructor unused) {
    auto* view = new View<Managed>();
    view->shape[0] = static_cast<int64_t>(range.num_bytes);
    view->views = std::move(views);
    view->owner = std::move(owner);
    DLTensor& tensor = view->managed.tensor;
    tensor.data = reinterpret_cast<void*>(range.address);
    tensor.device = device < 0 ? DLDevice{kDeviceCpu, 0} : DLDevice{kDeviceCuda, device};
    tensor.ndim = 1;
    tensor.dtype = {kCodeUnsigned, 8, 1};
    tensor.shape = view->shape;
    tensor.strides = view->strides;
    if constexpr (std::is_same_v<Managed, DLManagedTensorVersioned>) view->managed.major = 1;
    view->managed.manager = view;
    view->managed.deleter = [](Managed* self) {
        auto* mine = static_cast<View<Managed>*>(self->manager);
        mine->views->fetch_sub(1);
        delete mine;
    };
    view->views->fetch_add(1);
    return py::reinterpret_steal<py::capsule>(PyCapsule_New(&view->managed, name, unused));
}

// A consumer renames the capsule and calls the deleter itself; this runs for capsules that nobody consumed.
template <typename Managed>
void drop_unused(PyObject* capsule, const char* name) {
    if (!PyCapsule_IsValid(capsule, name)) return;
    auto* managed = static_cast<Managed*>(PyCapsule_GetPointer(capsule, name));
    managed->deleter(managed);
}

constexpr const char* kName = "dltensor";
constexpr const char* kVersionedName = "dltensor_versioned";

}  // namespace

py::capsule make_dlpack(Extent range, int device, bool versioned, Views views, std::shared_ptr<void> owner) {
    if (versioned) {
        return make<DLManagedTensorVersioned>(
            range, device, std::move(views), std::move(owner), kVersionedName,
            [](PyObject* capsule) { drop_unused<DLManagedTensorVersioned>(capsule, kVersionedName); });
    }
    return make<DLManagedTensor>(range, device, std::move(views), std::move(owner), kName,
                                 [](PyObject* capsule) { drop_unused<DLManagedTensor>(capsule, kName); });
}

}  // namespace reshard
