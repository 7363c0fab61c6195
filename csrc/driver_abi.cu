// Compiles to nothing: checks driver.h's declarations against the toolkit's own header.
#include <cuda.h>

#include <cstddef>

#include "driver.h"

namespace reshard::driver {

static_assert(kSuccess == CUDA_SUCCESS && kInvalidValue == CUDA_ERROR_INVALID_VALUE);
static_assert(kOutOfMemory == CUDA_ERROR_OUT_OF_MEMORY && kNotInitialized == CUDA_ERROR_NOT_INITIALIZED);
static_assert(kNotReady == CUDA_ERROR_NOT_READY);
static_assert(kAttributeMultiprocessorCount == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
static_assert(kAttributeComputeCapabilityMajor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
static_assert(kAttributeComputeCapabilityMinor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
static_assert(kAttributeVirtualMemoryManagement == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
static_assert(kAttributePosixHandleSupported == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
static_assert(kAllocationPinned == CU_MEM_ALLOCATION_TYPE_PINNED && kHandleNone == CU_MEM_HANDLE_TYPE_NONE);
static_assert(kHandlePosixFileDescriptor == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
static_assert(kLocationDevice == CU_MEM_LOCATION_TYPE_DEVICE);
static_assert(kGranularityMinimum == CU_MEM_ALLOC_GRANULARITY_MINIMUM);
static_assert(kGranularityRecommended == CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
static_assert(kAccessNone == CU_MEM_ACCESS_FLAGS_PROT_NONE && kAccessRead == CU_MEM_ACCESS_FLAGS_PROT_READ);
static_assert(kAccessReadWrite == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
static_assert(kStreamNonBlocking == CU_STREAM_NON_BLOCKING && kEventDisableTiming == CU_EVENT_DISABLE_TIMING);
static_assert(kHostAllocPortable == CU_MEMHOSTALLOC_PORTABLE && kHostRegisterPortable == CU_MEMHOSTREGISTER_PORTABLE);
static_assert(kIpcLazyPeerAccess == CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS && kMemoryTypeDevice == CU_MEMORYTYPE_DEVICE);
static_assert(kPointerMemoryType == CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
static_assert(kPointerDeviceOrdinal == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
static_assert(kPointerRangeStart == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR);
static_assert(kPointerRangeSize == CU_POINTER_ATTRIBUTE_RANGE_SIZE);
static_assert(kPointerIpcCapable == CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE);
static_assert(sizeof(IpcMemHandle) == sizeof(CUipcMemHandle) && alignof(IpcMemHandle) == alignof(CUipcMemHandle));
static_assert(sizeof(DevicePtr) == sizeof(CUdeviceptr) && sizeof(Device) == sizeof(CUdevice));
static_assert(sizeof(MemHandle) == sizeof(CUmemGenericAllocationHandle) && sizeof(Uuid) == sizeof(CUuuid));
static_assert(sizeof(MemLocation) == sizeof(CUmemLocation));
static_assert(sizeof(MemAllocationProp) == sizeof(CUmemAllocationProp));
static_assert(offsetof(MemAllocationProp, location) == offsetof(CUmemAllocationProp, location));
static_assert(offsetof(MemAllocationProp, flags) == offsetof(CUmemAllocationProp, allocFlags));
static_assert(sizeof(MemAccessDesc) == sizeof(CUmemAccessDesc));
static_assert(offsetof(MemAccessDesc, flags) == offsetof(CUmemAccessDesc, flags));

}  // namespace reshard::driver
