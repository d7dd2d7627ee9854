// From a code object to a program file, by emulated_gpu/translate in another process.
#pragma once
#include <stdbool.h>
#include <stddef.h>

// Writes the path of the code object's program to `path`. False with a message in `error`.
bool translation_of(const void *code_object, size_t bytes, char *path, size_t path_size, char *error,
                    size_t error_size);
