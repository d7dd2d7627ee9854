// Loaded code objects and their kernels.
#pragma once
#include "../wave/launch.h"
#include "image.h"

// A loaded code object. `references`: one for the handle, and one for each launch that has not ended.
typedef struct module {
  int references;
  device_t *device;
  void *file;          // the code object
  image_t image;
  program_t *program;
} module_t;

// A kernel's handle. It is never freed, so that a handle of an unloaded module is recognised.
typedef struct function {
  module_t *module;    // NULL once the module has been unloaded
  const kernel_t *kernel;
  struct function *next;
} function_t;

void module_hold(module_t *module);
void module_release(module_t *module);
