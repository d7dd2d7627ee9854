// The API's functions that allocate device and host memory, and that register host memory. Stream-ordered
// allocations are in pools.c.
#include "calls.h"
#include "memory.h"
#include "streams.h"

// ---- device memory

API hipError_t hipMalloc(void **out, size_t bytes) {
  ENTER("%zu", bytes);
  *out = NULL;
  if (!bytes) return hipSuccess;
  *out = memory_allocate(MEMORY_DEVICE, current_device(), bytes);
  return *out ? hipSuccess : call_leave(hipErrorOutOfMemory);
}

// Waits for all work of the device first, as HIP's documentation says.
API hipError_t hipFree(void *start) {
  ENTER_ANYWAY("%p", start);
  block_t block;
  if (!start) return hipSuccess;
  if (!memory_find(start, &block) || block.kind != MEMORY_DEVICE) return call_leave(hipErrorInvalidValue);
  const hipError_t error = device_synchronise(&devices[block.device]);
  if (!memory_free(start, MEMORY_DEVICE)) return call_leave(hipErrorInvalidValue);
  return call_leave(error);
}

API hipError_t hipMallocManaged(void **out, size_t bytes, unsigned flags) {
  (void)out;
  ENTER("%zu %u", bytes, flags);
  return call_leave(hipErrorNotSupported);  // as hipDeviceAttributeManagedMemory says
}

API hipError_t hipMemGetInfo(size_t *free_bytes, size_t *total) {
  ENTER(" ");
  const device_t *device = current_device();
  *total = device->memory_bytes;
  *free_bytes = device->memory_bytes - device->used_bytes;
  return hipSuccess;
}

// ---- host memory

API hipError_t hipHostMalloc(void **out, size_t bytes, unsigned flags) {
  ENTER("%zu %u", bytes, flags);
  *out = NULL;
  if (!bytes) return hipSuccess;
  *out = memory_allocate(MEMORY_HOST, current_device(), bytes);
  return *out ? hipSuccess : call_leave(hipErrorOutOfMemory);
}

// Waits for all work of the device first, as hipFree does.
API hipError_t hipHostFree(void *start) {
  ENTER_ANYWAY("%p", start);
  block_t block;
  if (!start) return hipSuccess;
  if (!memory_find(start, &block) || block.kind != MEMORY_HOST) return call_leave(hipErrorInvalidValue);
  const hipError_t error = device_synchronise(&devices[block.device]);
  if (!memory_free(start, MEMORY_HOST)) return call_leave(hipErrorInvalidValue);
  return call_leave(error);
}

API hipError_t hipHostRegister(void *start, size_t bytes, unsigned flags) {
  ENTER("%p %zu %u", start, bytes, flags);
  if (!start || !bytes) return call_leave(hipErrorInvalidValue);
  return call_leave(memory_register(start, bytes, current_device()));
}
API hipError_t hipHostUnregister(void *start) {
  ENTER_ANYWAY("%p", start);
  return memory_unregister(start) ? hipSuccess : call_leave(hipErrorHostMemoryNotRegistered);
}
API hipError_t hipHostGetDevicePointer(void **out, void *start, unsigned flags) {
  ENTER("%p", start);
  block_t block;
  const bool is_found = memory_find(start, &block);
  if (flags || !is_found || (block.kind != MEMORY_HOST && block.kind != MEMORY_REGISTERED))
    return call_leave(hipErrorInvalidValue);
  *out = start;
  return hipSuccess;
}
