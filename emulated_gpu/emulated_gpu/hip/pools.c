// Stream-ordered allocations, and memory pools. A pool only counts: it does not keep freed memory for reuse.
#include <stdlib.h>

#include "calls.h"
#include "memory.h"
#include "report.h"
#include "streams.h"

typedef struct pool {
  device_t *device;
  uint64_t release_threshold;
  uint64_t used_bytes;  // updated by memory.c
  uint64_t used_high;
} pool_t;

static hipError_t run_awake(void *payload) {
  memory_awake(*(void **)payload);
  return hipSuccess;
}

static hipError_t do_nothing(void *payload) {
  (void)payload;
  return hipSuccess;
}

static void release_block(void *payload) {
  void *start = *(void **)payload;
  if (!memory_free(start, MEMORY_DEVICE)) report_misuse("hipFreeAsync", start, "frees what has been freed");
}

static hipError_t allocate_in_order(void **out, size_t bytes, pool_t *pool, stream_t *stream) {
  *out = NULL;
  if (!stream) return hipErrorInvalidHandle;
  if (!bytes) return hipSuccess;
  void *start = memory_reserve(pool ? pool->device : stream->device, bytes, pool ? &pool->used_bytes : NULL);
  if (!start) return hipErrorOutOfMemory;
  const hipError_t error = stream_submit(stream, run_awake, NULL, &start, sizeof start);
  if (error != hipSuccess) {
    memory_free(start, MEMORY_DEVICE);
    return error;
  }
  *out = start;
  if (pool && pool->used_bytes > pool->used_high) pool->used_high = pool->used_bytes;
  return hipSuccess;
}

API hipError_t hipMallocAsync(void **out, size_t bytes, hipStream_t stream) {
  ENTER("%zu %p", bytes, (void *)stream);
  return call_leave(allocate_in_order(out, bytes, NULL, stream_of(stream)));
}
API hipError_t hipMallocFromPoolAsync(void **out, size_t bytes, hipMemPool_t pool, hipStream_t stream) {
  ENTER("%zu %p %p", bytes, (void *)pool, (void *)stream);
  if (!pool) return call_leave(hipErrorInvalidValue);
  return call_leave(allocate_in_order(out, bytes, pool, stream_of(stream)));
}
API hipError_t hipFreeAsync(void *start, hipStream_t handle) {
  ENTER("%p %p", start, (void *)handle);
  block_t block;
  stream_t *stream = stream_of(handle);
  if (!stream) return call_leave(hipErrorInvalidHandle);
  if (!start) return hipSuccess;
  if (!memory_find(start, &block) || block.kind != MEMORY_DEVICE || block.from != (uint64_t)start)
    return call_leave(hipErrorInvalidValue);
  return call_leave(stream_submit(stream, do_nothing, release_block, &start, sizeof start));
}

typedef struct {
  int allocation_type, handle_types;
  struct { int type, id; } location;
  void *security;
  char reserved[64];
} pool_properties_t;
_Static_assert(sizeof(pool_properties_t) == 88, "the size of hipMemPoolProps");

API hipError_t hipMemPoolCreate(hipMemPool_t *out, const pool_properties_t *properties) {
  ENTER("%d", properties->location.id);
  device_t *device = device_at(properties->location.id);
  if (!device) return call_leave(hipErrorInvalidValue);
  pool_t *pool = calloc(1, sizeof *pool);
  if (!pool) return call_leave(hipErrorOutOfMemory);
  pool->device = device;
  *out = pool;
  return hipSuccess;
}
API hipError_t hipMemPoolDestroy(hipMemPool_t pool) {
  ENTER_ANYWAY("%p", (void *)pool);
  // Never freed, as memory from the pool may still be in use, and memory.c updates `used_bytes`.
  return pool ? hipSuccess : call_leave(hipErrorInvalidValue);
}
API hipError_t hipMemPoolTrimTo(hipMemPool_t pool, size_t bytes) {
  ENTER("%p %zu", (void *)pool, bytes);  // nothing to do: a pool does not keep freed memory
  return pool ? hipSuccess : call_leave(hipErrorInvalidValue);
}
API hipError_t hipMemPoolGetAttribute(hipMemPool_t pool, int attribute, uint64_t *value) {
  ENTER("%p %d", (void *)pool, attribute);
  if (!pool) return call_leave(hipErrorInvalidValue);
  switch (attribute) {
    case hipMemPoolAttrReleaseThreshold: *value = pool->release_threshold; return hipSuccess;
    case hipMemPoolAttrReservedMemCurrent: case hipMemPoolAttrUsedMemCurrent:
      *value = pool->used_bytes;
      return hipSuccess;
    case hipMemPoolAttrReservedMemHigh: case hipMemPoolAttrUsedMemHigh:
      *value = pool->used_high;
      return hipSuccess;
    default: return call_leave(hipErrorInvalidValue);
  }
}
API hipError_t hipMemPoolSetAttribute(hipMemPool_t pool, int attribute, const uint64_t *value) {
  ENTER("%p %d", (void *)pool, attribute);
  if (!pool || attribute != hipMemPoolAttrReleaseThreshold) return call_leave(hipErrorInvalidValue);
  pool->release_threshold = *value;
  return hipSuccess;
}

