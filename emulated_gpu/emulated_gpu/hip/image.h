// Code objects loaded to a device's memory (images).
#pragma once
#include "devices.h"

typedef struct {
  uint8_t *start;     // a block of MEMORY_CODE
  uint64_t bytes;
} image_t;

// Returns the size of the code object at `data`, from its ELF headers; 0 if it is not an AMD code object.
size_t code_object_size(const void *data);
uint32_t code_object_machine(const void *data);

// Loads a code object. `file` must have `code_object_size(file)` bytes. Writes a message to `error` on
// failure.
hipError_t image_load(const void *file, device_t *device, image_t *out, char *error, size_t error_size);
void image_free(image_t *image);

// Returns the address of a global variable and writes its size to `bytes`; NULL if there is none of this
// name.
void *image_symbol(const image_t *image, const void *file, const char *name, uint64_t *bytes);
