// Running a kernel over a grid, and what is learned on the way: findings and counters.
#pragma once
#include "program.h"

typedef struct {
  const uint8_t *image;  // the loaded code object; addresses in the program are relative to it
  uint64_t image_bytes;
  const void *kernarg;
  uint32_t grid[3], block[3];  // workgroups, and lanes of a workgroup
  uint32_t dynamic_lds_bytes;
  int device;
} launch_t;

typedef struct {
  uint64_t instructions[NUM_CLASSES];  // wave-instructions
  uint64_t loaded_bytes, stored_bytes;  // of global memory, as lanes asked for them
  uint64_t loaded_lines, stored_lines;  // 64-byte lines that the accesses of an instruction touched, summed
  uint64_t unique_loaded_bytes, unique_stored_bytes;  // in the launch; 0 without counts_unique_bytes
  uint64_t lds_bytes, lds_conflict_cycles;  // cycles beyond the first that accesses to banks cost
  uint64_t matrix_operations;  // multiply-adds of matrix instructions
} counters_t;

enum launch_status { LAUNCH_DONE = 0, LAUNCH_UNKNOWN_INSTRUCTION, LAUNCH_ENDLESS, LAUNCH_NO_MEMORY };

// Runs all workgroups; adds to `counters`. Thread-safe.
enum launch_status launch_run(const kernel_t *kernel, const launch_t *launch, counters_t *counters);

enum finding_kind {
  OUTSIDE_MEMORY, OUTSIDE_LDS, OUTSIDE_SCRATCH, UNDEFINED_ADDRESS, UNDEFINED_STORED, UNDEFINED_BRANCH, UNDEFINED_LDS,
  LDS_RACE, DIVERGENT_BARRIER, ENDLESS, UNKNOWN_INSTRUCTION, MISALIGNED, MISSING_WAIT, NUM_FINDING_KINDS,
};

typedef struct {
  int32_t kind;  // enum finding_kind
  char kernel[160], instruction[48];
  uint32_t workgroup[3], wave, other_wave;
  int32_t lane;  // -1: the whole wave
  uint64_t code_address, address;  // the instruction's, in the image; the access's (missing_wait: the register)
  uint64_t repetitions;  // of the same kind at the same instruction
} finding_t;

// Copies up to `capacity` findings; returns how many distinct ones there are.
size_t findings_read(finding_t *out, size_t capacity);
void findings_clear(void);
// Called after each new distinct finding, from any thread; NULL for none.
void findings_set_listener(void (*listener)(const finding_t *));
const char *finding_name(enum finding_kind kind);

// Set before the first launch.
extern struct launch_options {
  int threads;                 // that share the workgroups of a launch; 0: one a CPU
  uint64_t max_instructions;   // of one wave
  bool counts_unique_bytes;
} launch_options;

// Whether device memory is live; owned by hip/memory.c.
bool memory_is_live(uint64_t address, uint64_t bytes);
