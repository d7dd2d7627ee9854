// Runs a program over a grid without HIP, for tests of the executor (emulated_gpu_tests/wave/single_grid.py).
#include "wave.h"

typedef struct {
  uint32_t grid[3], block[3];  // number of workgroups, and number of lanes in each
  uint64_t max_instructions;   // of one wave
  uint64_t seed;
  uint32_t counts_unique_bytes;
  uint32_t resident;  // as in launch_t
  uint32_t threads;  // as in launch_options
  uint32_t status;  // output: enum launch_status
  counters_t counters;  // output
} single_grid_t;

// Runs the program's first kernel. Returns false, with a message in `error`, if the program cannot be loaded.
__attribute__((visibility("default"))) bool single_grid_run(
    const char *path, single_grid_t *run, char *error, uint32_t error_size) {
  program_t *program = program_load(path, error, error_size);
  if (!program) return false;
  launch_t launch = {.resident = run->resident};
  memcpy(launch.grid, run->grid, sizeof launch.grid);
  memcpy(launch.block, run->block, sizeof launch.block);
  const struct launch_options before = launch_options;
  launch_options.max_instructions = run->max_instructions;
  launch_options.counts_unique_bytes = run->counts_unique_bytes;
  launch_options.seed = run->seed;
  launch_options.threads = (int)run->threads;
  run->counters = (counters_t){.loaded_bytes = 0};
  run->status = launch_run(program_kernel_at(program, 0), &launch, &run->counters);
  launch_options = before;
  program_free(program);
  return true;
}
