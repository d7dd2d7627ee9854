// Kernel launches: checks the launch, lays out the arguments, and runs the kernel in stream order.
#include <stdlib.h>
#include <string.h>

#include "calls.h"
#include "faults.h"
#include "memory.h"
#include "modules.h"
#include "occupancy.h"
#include "report.h"
#include "streams.h"

typedef struct { module_t *module; const kernel_t *kernel; launch_t launch; } pending_t;

// ---- arguments

// Whether the first `count` parameters point to consecutive words directly after the array of `words`
// parameters. IREE passes parameters like this. It reveals their number, which HIP's API does not pass.
static bool is_followed_by_values(void **parameters, int64_t words, int64_t count) {
  for (int64_t i = 0; i < count; i++)
    if (parameters[i] != (void *)(parameters + words + i)) return false;
  return count > 0;
}

static bool is_wrong_count(void **parameters, int64_t taken) {
  if (!taken) return false;
  const int64_t passed = ((intptr_t)parameters[0] - (intptr_t)parameters) / (int64_t)sizeof(void *);
  if (passed <= 0 || passed >= 256 || passed == taken) return false;
  return passed < taken || is_followed_by_values(parameters, passed, taken + 1);
}

static uint64_t hidden_value(const launch_t *l, int kind) {
  switch (kind) {
    case HIDDEN_BLOCK_COUNT_X: case HIDDEN_BLOCK_COUNT_Y: case HIDDEN_BLOCK_COUNT_Z:
      return l->grid[kind - HIDDEN_BLOCK_COUNT_X];
    case HIDDEN_GROUP_SIZE_X: case HIDDEN_GROUP_SIZE_Y: case HIDDEN_GROUP_SIZE_Z:
      return l->block[kind - HIDDEN_GROUP_SIZE_X];
    case HIDDEN_GRID_DIMS: return l->grid[2] > 1 ? 3 : l->grid[1] > 1 ? 2 : 1;
    case HIDDEN_DYNAMIC_LDS_SIZE: return l->dynamic_lds_bytes;
    default: return 0;  // remainders (grids are whole workgroups), offsets, buffers of printf and the like
  }
}

// Writes an argument's bytes: those of the caller, or the value of a hidden argument if `given` is NULL.
static void fill_argument(uint8_t *at, const argument_t *a, const launch_t *l, const void *given) {
  const uint64_t value = given ? 0 : hidden_value(l, a->kind);
  if (given) memcpy(at, given, a->size);
  else memcpy(at, &value, a->size < sizeof value ? a->size : sizeof value);
}

static void *make_kernarg(const kernel_t *kernel, const launch_t *l, void **parameters, device_t *device) {
  const kernel_header_t *h = &kernel->header;
  // Scalar loads may read beyond the arguments: the hardware's segment consists of whole 64-byte lines.
  const size_t bytes = (h->kernarg_bytes + 64u) & ~63u;
  uint8_t *kernarg = memory_allocate(MEMORY_KERNARG, device, bytes);
  if (!kernarg) return NULL;
  memset(kernarg, 0, bytes);
  int explicit = 0;
  for (int i = 0; i < h->num_arguments; i++) {
    const argument_t *a = &kernel->arguments[i];
    const void *given = a->kind == ARGUMENT_VALUE ? parameters[explicit++] : NULL;
    fill_argument(kernarg + a->offset, a, l, given);
  }
  return kernarg;
}

static int num_explicit(const kernel_t *kernel) {
  int count = 0;
  for (int i = 0; i < kernel->header.num_arguments; i++) count += kernel->arguments[i].kind == ARGUMENT_VALUE;
  return count;
}

// ---- checks

static hipError_t check_sizes(const kernel_t *kernel, const launch_t *l) {
  uint64_t lanes = 1;
  for (int i = 0; i < 3; i++) {
    if (!l->grid[i] || !l->block[i]) return hipErrorInvalidConfiguration;
    if ((uint64_t)l->grid[i] * l->block[i] > UINT32_MAX) return hipErrorInvalidConfiguration;
    lanes *= l->block[i];
  }
  const uint32_t most = kernel->header.max_workgroup ? kernel->header.max_workgroup : 1024;
  if (lanes > most) return hipErrorInvalidConfiguration;
  const uint64_t lds = (uint64_t)kernel->header.lds_bytes + l->dynamic_lds_bytes;
  return lds > settings.chip->lds_bytes ? hipErrorInvalidConfiguration : hipSuccess;
}

static hipError_t check_parameters(const kernel_t *kernel, void **parameters, void **extra) {
  const int taken = num_explicit(kernel);
  if (extra) return hipErrorNotSupported;
  if (taken && !parameters) return hipErrorInvalidValue;
  if (!parameters || !is_wrong_count(parameters, taken)) return hipSuccess;
  fprintf(stderr, "emulated_gpu: %s takes %d arguments and was given another number\n", kernel->name, taken);
  return hipErrorInvalidValue;
}

// ---- running

static hipError_t run_launch(void *payload) {
  const pending_t *p = payload;
  const hipError_t fault = fault_of_launch(p->kernel->name);
  if (fault != hipSuccess) return fault;
  counters_t counters = {0};
  const enum launch_status status = launch_run(p->kernel, &p->launch, &counters);
  report_launch(p->kernel, &counters);
  if (status == LAUNCH_NO_MEMORY) return hipErrorOutOfMemory;
  return status == LAUNCH_DONE ? hipSuccess : hipErrorLaunchFailure;
}

static void release_launch(void *payload) {
  const pending_t *p = payload;
  memory_free((void *)p->launch.kernarg, MEMORY_KERNARG);
  module_release(p->module);
}

static hipError_t launch(function_t *f, launch_t l, stream_t *stream, void **parameters, void **extra) {
  if (!stream) return hipErrorInvalidHandle;
  if (!f || !f->module) return hipErrorInvalidDeviceFunction;
  if (f->module->device != stream->device) return hipErrorInvalidHandle;
  hipError_t error = check_sizes(f->kernel, &l);
  if (error == hipSuccess) error = check_parameters(f->kernel, parameters, extra);
  if (error != hipSuccess) return error;
  l.image = f->module->image.start;
  l.image_bytes = f->module->image.bytes;
  l.device = stream->device->index;
  l.resident = resident_workgroups(settings.chip, &f->kernel->header, &l);
  l.kernarg = make_kernarg(f->kernel, &l, parameters, stream->device);
  if (!l.kernarg) return hipErrorOutOfMemory;
  module_hold(f->module);
  const pending_t pending = {f->module, f->kernel, l};
  return stream_submit(stream, run_launch, release_launch, &pending, sizeof pending);
}

API hipError_t hipModuleLaunchKernel(hipFunction_t f, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                     unsigned block_x, unsigned block_y, unsigned block_z, unsigned lds_bytes,
                                     hipStream_t stream, void **parameters, void **extra) {
  ENTER("%s %u,%u,%u of %u,%u,%u %p", f && f->module ? f->kernel->name : "?", grid_x, grid_y, grid_z, block_x,
        block_y, block_z, (void *)stream);
  const launch_t l = {
    .grid = {grid_x, grid_y, grid_z}, .block = {block_x, block_y, block_z}, .dynamic_lds_bytes = lds_bytes};
  return call_leave(launch(f, l, stream_of(stream), parameters, extra));
}

// Not supported: `f` is the address of a host function that the start-up code of hipcc would have registered.
API hipError_t hipLaunchKernel(const void *f, dim3 grid, dim3 block, void **parameters, size_t lds,
                               hipStream_t stream) {
  ENTER("%p", f);
  (void)grid, (void)block, (void)parameters, (void)lds, (void)stream;
  return call_leave(hipErrorInvalidDeviceFunction);
}
