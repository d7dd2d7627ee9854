// Runs a program on one wave with given registers, for tests of operations
// (emulated_gpu_tests/wave/single_wave.py).
#include <stdlib.h>

#include "wave.h"

// The state of a wave before and after: all registers, which of them are defined, and LDS.
typedef struct {
  uint32_t v[NUM_VGPRS][MAX_LANES];
  uint64_t v_defined[NUM_VGPRS];
  uint32_t s[128];
  uint8_t s_defined[128];
  uint32_t scc, mode, status, reserved;
  uint64_t executed;
} single_wave_t;

static void load(wave_t *w, const single_wave_t *from) {
  memcpy(w->v, from->v, sizeof w->v);
  memcpy(w->v_defined, from->v_defined, sizeof w->v_defined);
  memcpy(w->s, from->s, sizeof w->s);
  memcpy(w->s_defined, from->s_defined, sizeof w->s_defined);
  w->scc = from->scc;
  w->scc_defined = 1;
  w->mode = from->mode;
}

static void store(const wave_t *w, single_wave_t *to) {
  memcpy(to->v, w->v, sizeof w->v);
  memcpy(to->v_defined, w->v_defined, sizeof w->v_defined);
  memcpy(to->s, w->s, sizeof w->s);
  memcpy(to->s_defined, w->s_defined, sizeof w->s_defined);
  to->scc = w->scc;
  to->mode = w->mode;
  to->executed = w->executed;
  to->status = w->group->status;
}

// Runs the program's first kernel until it ends. Returns false, with a message in `error`, if the program
// cannot be loaded.
__attribute__((visibility("default"))) bool single_wave_run(
    const char *path, single_wave_t *registers, uint8_t *lds, uint32_t lds_bytes, char *error, uint32_t error_size) {
  program_t *program = program_load(path, error, error_size);
  if (!program) return false;
  const kernel_t *kernel = program_kernel_at(program, 0);
  const launch_t launch = {.grid = {1, 1, 1}, .block = {kernel->header.lanes, 1, 1}};
  group_t group = {.kernel = kernel, .launch = &launch, .num_waves = 1, .epoch = 1, .lds = lds, .lds_bytes = lds_bytes};
  group.lds_words = calloc(lds_bytes / 4 + 1, sizeof *group.lds_words);
  for (uint32_t n = 0; n < lds_bytes / 4; n++) group.lds_words[n].defined = group.lds_words[n].written = 15;
  wave_t *w = aligned_alloc(64, sizeof *w);
  memset(w, 0, sizeof *w);
  w->group = &group;
  w->scratch_bytes = kernel->header.scratch_bytes;
  w->scratch = calloc(kernel->header.lanes, kernel->header.scratch_bytes + 4u);
  w->scratch_defined = calloc(kernel->header.scratch_bytes + 4u, sizeof *w->scratch_defined);
  load(w, registers);
  wave_run(w, UINT64_MAX);
  store(w, registers);
  free(w->scratch);
  free(w->scratch_defined);
  free(w);
  free(group.lds_words);
  program_free(program);
  return true;
}
