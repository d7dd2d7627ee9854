// A code object in the device's memory.
#pragma once
#include "devices.h"

typedef struct {
  uint8_t *start;     // a block of MEMORY_CODE
  uint64_t bytes;
} image_t;

// The size of the ELF file at `data` as its own headers give it; 0 where it is none.
size_t code_object_size(const void *data);
uint32_t code_object_machine(const void *data);

// Loads the segments and applies the relocations. `file` has `code_object_size` bytes.
hipError_t image_load(const void *file, device_t *device, image_t *out, char *error, size_t error_size);
void image_free(image_t *image);

// The address and size of a global variable; NULL where the code object has none of that name.
void *image_symbol(const image_t *image, const void *file, const char *name, uint64_t *bytes);
