// The CUDA driver API by dlopen, for code that must load on machines without libcuda.
//
// Types and constants are declared here, so that no CUDA header is needed to compile; driver_abi.cu checks them
// against <cuda.h> wherever nvcc is there. Nothing is loaded before the first call of api() or available(), and
// nothing here initialises a device: callers call api().init(0) themselves when they mean to use one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace reshard::driver {

using Result = int;  // CUresult
using Device = int;
using DevicePtr = std::uint64_t;
using MemHandle = std::uint64_t;  // CUmemGenericAllocationHandle
struct ContextObject;
struct StreamObject;
struct EventObject;
using Context = ContextObject*;
using Stream = StreamObject*;
using Event = EventObject*;

inline constexpr Result kSuccess = 0;
inline constexpr Result kInvalidValue = 1;
inline constexpr Result kOutOfMemory = 2;
inline constexpr Result kNotInitialized = 3;
inline constexpr Result kNotReady = 600;

inline constexpr int kAttributeMultiprocessorCount = 16;
inline constexpr int kAttributeComputeCapabilityMajor = 75;
inline constexpr int kAttributeComputeCapabilityMinor = 76;
inline constexpr int kAttributeVirtualMemoryManagement = 102;
inline constexpr int kAttributePosixHandleSupported = 103;

inline constexpr int kAllocationPinned = 1;           // CU_MEM_ALLOCATION_TYPE_PINNED
inline constexpr int kHandleNone = 0;                 // CU_MEM_HANDLE_TYPE_NONE
inline constexpr int kHandlePosixFileDescriptor = 1;  // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
inline constexpr int kLocationDevice = 1;             // CU_MEM_LOCATION_TYPE_DEVICE
inline constexpr int kGranularityMinimum = 0;
inline constexpr int kGranularityRecommended = 1;
inline constexpr int kAccessNone = 0;
inline constexpr int kAccessRead = 1;
inline constexpr int kAccessReadWrite = 3;
inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr unsigned kHostAllocPortable = 1;
inline constexpr unsigned kHostRegisterPortable = 1;

inline constexpr unsigned kIpcLazyPeerAccess = 1;  // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
inline constexpr int kPointerMemoryType = 2;       // CU_POINTER_ATTRIBUTE_MEMORY_TYPE
inline constexpr int kPointerDeviceOrdinal = 9;    // CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
inline constexpr int kPointerRangeStart = 11;      // CU_POINTER_ATTRIBUTE_RANGE_START_ADDR
inline constexpr int kPointerRangeSize = 12;       // CU_POINTER_ATTRIBUTE_RANGE_SIZE
inline constexpr int kPointerIpcCapable = 10;      // CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
inline constexpr unsigned kMemoryTypeDevice = 2;   // CU_MEMORYTYPE_DEVICE

struct IpcMemHandle {
    char reserved[64];
};

struct MemLocation {
    int type;
    int id;
};

struct MemAllocationProp {
    int type;
    int requested_handle_types;
    MemLocation location;
    void* win32_handle_metadata;
    struct {
        unsigned char compression_type;
        unsigned char gpu_direct_rdma_capable;
        unsigned short usage;
        unsigned char reserved[4];
    } flags;
};

struct MemAccessDesc {
    MemLocation location;
    int flags;
};

struct Uuid {
    unsigned char bytes[16];
};

// One entry per driver function: member, exported symbol, parameters.
#define RESHARD_DRIVER_FUNCTIONS(X)                                                                                \
    X(init, cuInit, (unsigned flags))                                                                              \
    X(driver_get_version, cuDriverGetVersion, (int* version))                                                      \
    X(get_error_name, cuGetErrorName, (Result result, const char** name))                                          \
    X(get_error_string, cuGetErrorString, (Result result, const char** text))                                      \
    X(device_get_count, cuDeviceGetCount, (int* count))                                                            \
    X(device_get, cuDeviceGet, (Device * device, int ordinal))                                                     \
    X(device_get_name, cuDeviceGetName, (char* name, int length, Device device))                                   \
    X(device_get_uuid, cuDeviceGetUuid_v2, (Uuid * uuid, Device device))                                           \
    X(device_get_attribute, cuDeviceGetAttribute, (int* value, int attribute, Device device))                      \
    X(device_total_mem, cuDeviceTotalMem_v2, (std::size_t* bytes, Device device))                                  \
    X(device_can_access_peer, cuDeviceCanAccessPeer, (int* can_access, Device device, Device peer))                \
    X(primary_ctx_retain, cuDevicePrimaryCtxRetain, (Context * context, Device device))                            \
    X(primary_ctx_release, cuDevicePrimaryCtxRelease_v2, (Device device))                                          \
    X(ctx_get_current, cuCtxGetCurrent, (Context * context))                                                       \
    X(ctx_get_device, cuCtxGetDevice, (Device * device))                                                           \
    X(ctx_set_current, cuCtxSetCurrent, (Context context))                                                         \
    X(ctx_push_current, cuCtxPushCurrent_v2, (Context context))                                                    \
    X(ctx_pop_current, cuCtxPopCurrent_v2, (Context * context))                                                    \
    X(ctx_synchronize, cuCtxSynchronize, ())                                                                       \
    X(mem_get_info, cuMemGetInfo_v2, (std::size_t* free_bytes, std::size_t* total_bytes))                          \
    X(mem_get_address_range, cuMemGetAddressRange_v2, (DevicePtr * base, std::size_t* bytes, DevicePtr ptr))       \
    X(mem_address_reserve, cuMemAddressReserve,                                                                    \
      (DevicePtr * ptr, std::size_t bytes, std::size_t alignment, DevicePtr hint, unsigned long long flags))       \
    X(mem_address_free, cuMemAddressFree, (DevicePtr ptr, std::size_t bytes))                                      \
    X(mem_create, cuMemCreate,                                                                                     \
      (MemHandle * handle, std::size_t bytes, const MemAllocationProp* prop, unsigned long long flags))            \
    X(mem_release, cuMemRelease, (MemHandle handle))                                                               \
    X(mem_map, cuMemMap,                                                                                           \
      (DevicePtr ptr, std::size_t bytes, std::size_t offset, MemHandle handle, unsigned long long flags))          \
    X(mem_unmap, cuMemUnmap, (DevicePtr ptr, std::size_t bytes))                                                   \
    X(mem_set_access, cuMemSetAccess,                                                                              \
      (DevicePtr ptr, std::size_t bytes, const MemAccessDesc* desc, std::size_t count))                            \
    X(mem_get_allocation_granularity, cuMemGetAllocationGranularity,                                               \
      (std::size_t* granularity, const MemAllocationProp* prop, int option))                                       \
    X(mem_export_to_shareable_handle, cuMemExportToShareableHandle,                                                \
      (void* shareable, MemHandle handle, int handle_type, unsigned long long flags))                              \
    X(mem_import_from_shareable_handle, cuMemImportFromShareableHandle,                                            \
      (MemHandle * handle, void* shareable, int handle_type))                                                      \
    X(mem_retain_allocation_handle, cuMemRetainAllocationHandle, (MemHandle * handle, void* address))              \
    X(pointer_get_attribute, cuPointerGetAttribute, (void* data, int attribute, DevicePtr ptr))                    \
    X(ipc_get_mem_handle, cuIpcGetMemHandle, (IpcMemHandle * handle, DevicePtr ptr))                               \
    X(ipc_open_mem_handle, cuIpcOpenMemHandle_v2, (DevicePtr * ptr, IpcMemHandle handle, unsigned flags))          \
    X(ipc_close_mem_handle, cuIpcCloseMemHandle, (DevicePtr ptr))                                                  \
    X(mem_host_alloc, cuMemHostAlloc, (void** ptr, std::size_t bytes, unsigned flags))                             \
    X(mem_free_host, cuMemFreeHost, (void* ptr))                                                                   \
    X(mem_host_register, cuMemHostRegister_v2, (void* ptr, std::size_t bytes, unsigned flags))                     \
    X(mem_host_unregister, cuMemHostUnregister, (void* ptr))                                                       \
    X(memcpy_dtod_async, cuMemcpyDtoDAsync_v2, (DevicePtr dst, DevicePtr src, std::size_t bytes, Stream stream))   \
    X(memcpy_htod_async, cuMemcpyHtoDAsync_v2, (DevicePtr dst, const void* src, std::size_t bytes, Stream stream)) \
    X(memcpy_dtoh_async, cuMemcpyDtoHAsync_v2, (void* dst, DevicePtr src, std::size_t bytes, Stream stream))       \
    X(memset_d8_async, cuMemsetD8Async, (DevicePtr dst, unsigned char value, std::size_t bytes, Stream stream))    \
    X(memset_d32_async, cuMemsetD32Async, (DevicePtr dst, unsigned value, std::size_t words, Stream stream))       \
    X(stream_create, cuStreamCreate, (Stream * stream, unsigned flags))                                            \
    X(stream_destroy, cuStreamDestroy_v2, (Stream stream))                                                         \
    X(stream_synchronize, cuStreamSynchronize, (Stream stream))                                                    \
    X(stream_query, cuStreamQuery, (Stream stream))                                                                \
    X(stream_wait_event, cuStreamWaitEvent, (Stream stream, Event event, unsigned flags))                          \
    X(event_create, cuEventCreate, (Event * event, unsigned flags))                                                \
    X(event_destroy, cuEventDestroy_v2, (Event event))                                                             \
    X(event_record, cuEventRecord, (Event event, Stream stream))                                                   \
    X(event_query, cuEventQuery, (Event event))                                                                    \
    X(event_synchronize, cuEventSynchronize, (Event event))                                                        \
    X(event_elapsed_time, cuEventElapsedTime, (float* milliseconds, Event start, Event stop))

struct Api {
#define RESHARD_DRIVER_MEMBER(member, symbol, parameters) Result(*member) parameters;
    RESHARD_DRIVER_FUNCTIONS(RESHARD_DRIVER_MEMBER)
#undef RESHARD_DRIVER_MEMBER
};

// A failed driver call (code() is the CUresult), or libcuda.so.1 that can't be loaded (code() is kNotInitialized).
class DriverError : public std::runtime_error {
  public:
    DriverError(Result code, const std::string& message) : std::runtime_error(message), code_(code) {}
    Result code() const noexcept { return code_; }
    bool is_out_of_memory() const noexcept { return code_ == kOutOfMemory; }

  private:
    Result code_;
};

// Whether libcuda.so.1 loads and has every function above. Never throws, never initialises a device.
bool available() noexcept;

// The function table, loaded once; thread-safe. Throws DriverError, with the reason, where available() is false.
const Api& api();

// Throws DriverError("<what> failed: CUDA_ERROR_...: <text>") unless result is kSuccess.
void check(Result result, const char* what);

}  // namespace reshard::driver
