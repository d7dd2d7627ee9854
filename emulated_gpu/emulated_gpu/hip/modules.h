// Loaded code objects and their kernels.
#pragma once
#include "../wave/launch.h"
#include "image.h"

// References: the handle's own, and one for each launch that has not ended.
typedef struct module {
  int references;
  device_t *device;
  void *file;          // the code object
  image_t image;
  program_t *program;
} module_t;

// Its few bytes stay when the module goes, so that a stale handle is known for one.
typedef struct function {
  module_t *module;    // NULL once it has been unloaded
  const kernel_t *kernel;
  struct function *next;
} function_t;

void module_hold(module_t *module);
void module_release(module_t *module);
