// Translates code objects to program files, with emulated_gpu/translate in another process.
#pragma once
#include <stdbool.h>
#include <stddef.h>

// Translates a code object unless the cache has its program; writes the program file's path to `path`.
// Returns false on failure, with a message in `error`.
bool translation_of(const void *code_object, size_t bytes, char *path, size_t path_size, char *error,
                    size_t error_size);
