// The API's functions for modules and kernels.
#include "modules.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "calls.h"
#include "translation.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static function_t *functions;

// ---- loading

// The caller's buffer for error messages (hipJitOptionErrorLogBuffer and its size).
typedef struct { char *text; size_t size; } log_t;

static log_t log_of(unsigned count, const int *options, void **values) {
  enum { ERROR_LOG_BUFFER = 5, ERROR_LOG_BUFFER_SIZE = 6 };
  log_t log = {NULL, 0};
  for (unsigned i = 0; i < count; i++) {
    if (options[i] == ERROR_LOG_BUFFER) log.text = values[i];
    if (options[i] == ERROR_LOG_BUFFER_SIZE) log.size = (uint32_t)(uintptr_t)values[i];
  }
  return log;
}

static hipError_t load_program(module_t *m, size_t bytes, char *error, size_t error_size) {
  char path[4096];
  if (!translation_of(m->file, bytes, path, sizeof path, error, error_size)) return hipErrorInvalidImage;
  m->program = program_load(path, error, error_size);
  return m->program ? hipSuccess : hipErrorInvalidImage;
}

static void free_module(module_t *m) {
  if (m->image.start) image_free(&m->image);
  if (m->program) program_free(m->program);
  free(m->file);
  free(m);
}

static hipError_t load(const void *data, module_t **out, char *error, size_t error_size) {
  const size_t bytes = code_object_size(data);
  if (!bytes) {
    snprintf(error, error_size, "not an AMD code object");
    return hipErrorInvalidImage;
  }
  if (code_object_machine(data) != settings.chip->machine) {
    snprintf(error, error_size, "the code object is for machine 0x%x, the device is %s (0x%x)",
             code_object_machine(data), settings.chip->name, settings.chip->machine);
    return hipErrorNoBinaryForGpu;
  }
  module_t *m = calloc(1, sizeof *m);
  if (!m) return hipErrorOutOfMemory;
  *m = (module_t){.references = 1, .device = current_device(), .file = malloc(bytes)};
  hipError_t status = m->file ? hipSuccess : hipErrorOutOfMemory;
  if (status == hipSuccess) memcpy(m->file, data, bytes);
  if (status == hipSuccess) status = image_load(m->file, m->device, &m->image, error, error_size);
  if (status == hipSuccess) status = load_program(m, bytes, error, error_size);
  if (status == hipSuccess) *out = m;
  else free_module(m);
  return status;
}

static hipError_t load_or_say_why(const void *data, module_t **out, log_t log) {
  char error[512] = "";
  const hipError_t status = load(data, out, error, sizeof error);
  if (status == hipSuccess) return hipSuccess;
  if (log.text && log.size) snprintf(log.text, log.size, "emulated_gpu: %s", error);
  else fprintf(stderr, "emulated_gpu: %s\n", error);
  return call_leave(status);
}

API hipError_t hipModuleLoadDataEx(hipModule_t *out, const void *data, unsigned count, int *options,
                                   void **values) {
  ENTER("%p", data);
  return load_or_say_why(data, out, log_of(count, options, values));
}
API hipError_t hipModuleLoadData(hipModule_t *out, const void *data) {
  ENTER("%p", data);
  return load_or_say_why(data, out, (log_t){NULL, 0});
}

void module_hold(module_t *module) { __atomic_add_fetch(&module->references, 1, __ATOMIC_RELAXED); }

void module_release(module_t *module) {
  if (!__atomic_sub_fetch(&module->references, 1, __ATOMIC_ACQ_REL)) free_module(module);
}

// Launches that were submitted still run: each holds a reference to the module.
API hipError_t hipModuleUnload(hipModule_t module) {
  ENTER_ANYWAY("%p", (void *)module);
  if (!module) return call_leave(hipErrorInvalidHandle);
  pthread_mutex_lock(&lock);
  for (function_t *f = functions; f; f = f->next)
    if (f->module == module) f->module = NULL;
  pthread_mutex_unlock(&lock);
  module_release(module);
  return hipSuccess;
}

API hipError_t hipModuleGetGlobal(void **out, size_t *bytes, hipModule_t module, const char *name) {
  ENTER("%p %s", (void *)module, name);
  uint64_t size = 0;
  void *start = module ? image_symbol(&module->image, module->file, name, &size) : NULL;
  if (!start) return call_leave(hipErrorNotFound);
  if (out) *out = start;
  if (bytes) *bytes = size;
  return hipSuccess;
}

// ---- functions

API hipError_t hipModuleGetFunction(hipFunction_t *out, hipModule_t module, const char *name) {
  ENTER("%p %s", (void *)module, name);
  const kernel_t *kernel = module ? program_kernel(module->program, name) : NULL;
  if (!kernel) return call_leave(hipErrorNotFound);
  function_t *f = calloc(1, sizeof *f);
  if (!f) return call_leave(hipErrorOutOfMemory);
  pthread_mutex_lock(&lock);
  *f = (function_t){module, kernel, functions};
  functions = f;
  pthread_mutex_unlock(&lock);
  *out = f;
  return hipSuccess;
}

API hipError_t hipFuncGetAttribute(int *value, int attribute, const struct function *f) {
  ENTER("%p %d", (const void *)f, attribute);
  if (!f || !f->module) return call_leave(hipErrorInvalidDeviceFunction);
  const kernel_header_t *header = &f->kernel->header;
  switch (attribute) {
    case HIP_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = (int)header->max_workgroup; break;
    case HIP_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: *value = (int)header->lds_bytes; break;
    case HIP_FUNC_ATTRIBUTE_CONST_SIZE_BYTES: *value = 0; break;
    case HIP_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES: *value = (int)header->scratch_bytes; break;
    case HIP_FUNC_ATTRIBUTE_NUM_REGS: *value = header->num_vgprs; break;
    case HIP_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
      *value = (int)(settings.chip->lds_bytes - header->lds_bytes);
      break;
    default: return call_leave(hipErrorInvalidValue);
  }
  return hipSuccess;
}

// Only checks the value: kernels may always use as much dynamic LDS as the chip has.
API hipError_t hipFuncSetAttribute(const struct function *f, int attribute, int value) {
  ENTER("%p %d %d", (const void *)f, attribute, value);
  if (!f || !f->module) return call_leave(hipErrorInvalidDeviceFunction);
  if (attribute != HIP_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return call_leave(hipErrorInvalidValue);
  const uint32_t most = settings.chip->lds_bytes - f->kernel->header.lds_bytes;
  return value >= 0 && (uint32_t)value <= most ? hipSuccess : call_leave(hipErrorInvalidValue);
}
