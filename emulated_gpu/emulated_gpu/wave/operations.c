// Finds operations by name in the tables of all files.
#include <stdlib.h>

#include "wave.h"

#define FOR_FILES(X) \
  X(atomics) \
  X(buffer_memory) \
  X(caches) \
  X(compare) \
  X(control) \
  X(convert) \
  X(cross_lane) \
  X(dot) \
  X(global_memory) \
  X(hardware_registers) \
  X(lds_memory) \
  X(mfma) \
  X(packed) \
  X(scalar) \
  X(scalar_float) \
  X(scratch_memory) \
  X(vector_bytes) \
  X(vector_double) \
  X(vector_float) \
  X(vector_half) \
  X(vector_integer) \
  X(vector_integer16) \
  X(vector_wide) \
  X(wmma)

#define DECLARE(file) \
  extern const named_operation_t file##_operations_32[], file##_operations_64[];
FOR_FILES(DECLARE)

#define ROW(file) {file##_operations_32, file##_operations_64},
static const named_operation_t *const tables[][2] = {FOR_FILES(ROW)};

// Each table ends with a row without a name.
operation_t operation_named(const char *name, int lanes) {
  for (size_t i = 0; i < sizeof tables / sizeof *tables; i++)
    for (const named_operation_t *o = tables[i][lanes == 64]; o->name; o++)
      if (!strcmp(o->name, name)) return o->run;
  return NULL;
}

static void unknown(wave_t *w, const instruction_t *i) { fail(w, i, UNKNOWN_INSTRUCTION, LAUNCH_UNKNOWN_INSTRUCTION); }
const operation_t unknown_operation = unknown;
