// The types, handles and constants of HIP's C API, as far as this library implements it.
// Constants are from ROCm's hip_runtime_api.h (https://rocm.docs.amd.com/projects/HIP).
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define API __attribute__((visibility("default")))

#define HIP_ERRORS(X) \
  X(hipSuccess, 0, "no error") \
  X(hipErrorInvalidValue, 1, "invalid argument") \
  X(hipErrorOutOfMemory, 2, "out of memory") \
  X(hipErrorNotInitialized, 3, "initialization error") \
  X(hipErrorInvalidConfiguration, 9, "invalid configuration argument") \
  X(hipErrorInvalidDevicePointer, 17, "invalid device pointer") \
  X(hipErrorInvalidDeviceFunction, 98, "invalid device function") \
  X(hipErrorNoDevice, 100, "no ROCm-capable device is detected") \
  X(hipErrorInvalidDevice, 101, "invalid device ordinal") \
  X(hipErrorInvalidImage, 200, "device kernel image is invalid") \
  X(hipErrorInvalidContext, 201, "invalid device context") \
  X(hipErrorNoBinaryForGpu, 209, "no kernel image is available for execution on the device") \
  X(hipErrorInvalidHandle, 400, "invalid resource handle") \
  X(hipErrorNotFound, 500, "named symbol not found") \
  X(hipErrorNotReady, 600, "device not ready") \
  X(hipErrorIllegalAddress, 700, "an illegal memory access was encountered") \
  X(hipErrorPeerAccessAlreadyEnabled, 704, "peer access is already enabled") \
  X(hipErrorHostMemoryAlreadyRegistered, 712, "part or all of the requested memory range is already mapped") \
  X(hipErrorHostMemoryNotRegistered, 713, "pointer does not correspond to a registered memory region") \
  X(hipErrorLaunchFailure, 719, "unspecified launch failure") \
  X(hipErrorNotSupported, 801, "operation not supported") \
  X(hipErrorUnknown, 999, "unknown error")

#define X(name, number, text) name = number,
typedef enum { HIP_ERRORS(X) } hipError_t;
#undef X

API const char *hipGetErrorName(hipError_t error);

typedef struct device *hipCtx_t;
typedef struct stream *hipStream_t;
typedef struct event *hipEvent_t;
typedef struct module *hipModule_t;
typedef struct function *hipFunction_t;
typedef struct pool *hipMemPool_t;
typedef int hipDevice_t;
typedef void (*hipHostFn_t)(void *);
typedef struct { unsigned x, y, z; } dim3;
typedef struct { char bytes[16]; } hipUUID;

enum { hipStreamDefault = 0, hipStreamNonBlocking = 1 };
enum { hipEventDisableTiming = 2 };
enum {
  hipMemPoolAttrReleaseThreshold = 4, hipMemPoolAttrReservedMemCurrent = 5, hipMemPoolAttrReservedMemHigh = 6,
  hipMemPoolAttrUsedMemCurrent = 7, hipMemPoolAttrUsedMemHigh = 8,
};
enum {
  HIP_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK = 0, HIP_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES = 1,
  HIP_FUNC_ATTRIBUTE_CONST_SIZE_BYTES = 2, HIP_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES = 3,
  HIP_FUNC_ATTRIBUTE_NUM_REGS = 4, HIP_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8,
};
