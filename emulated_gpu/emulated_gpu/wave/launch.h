// Running a kernel over a grid, with its results: findings (errors of the kernel) and counters.
#pragma once
#include "program.h"

typedef struct {
  const uint8_t *image;  // the loaded code object; addresses in the program are relative to it
  uint64_t image_bytes;
  const void *kernarg;
  uint32_t grid[3], block[3];  // number of workgroups, and number of lanes in each
  uint32_t dynamic_lds_bytes;
  int device;
  uint32_t resident;  // how many workgroups the device runs at a time; 0: any number
} launch_t;

typedef struct {
  uint64_t instructions[NUM_CLASSES];  // executed, each counted once per wave
  uint64_t loaded_bytes, stored_bytes;  // of global memory, summed over lanes
  uint64_t loaded_lines, stored_lines;  // different 64-byte lines per instruction, summed over instructions
  uint64_t unique_loaded_bytes, unique_stored_bytes;  // different bytes; 0 without counts_unique_bytes
  uint64_t lds_bytes, lds_conflict_cycles;  // LDS accesses: bytes, and cycles added by bank conflicts
  uint64_t matrix_operations;  // multiply-adds of matrix instructions
} counters_t;

enum launch_status { LAUNCH_DONE = 0, LAUNCH_UNKNOWN_INSTRUCTION, LAUNCH_ENDLESS, LAUNCH_NO_MEMORY };

// Runs all workgroups of a launch, and adds what they count to `counters`. Thread-safe.
enum launch_status launch_run(const kernel_t *kernel, const launch_t *launch, counters_t *counters);

enum finding_kind {
  OUTSIDE_MEMORY, OUTSIDE_LDS, OUTSIDE_SCRATCH, UNDEFINED_ADDRESS, UNDEFINED_STORED, UNDEFINED_BRANCH, UNDEFINED_LDS,
  LDS_RACE, DIVERGENT_BARRIER, ENDLESS, UNKNOWN_INSTRUCTION, MISALIGNED, MISSING_WAIT, UNORDERED,
  NOT_RESIDENT, NUM_FINDING_KINDS,
};

typedef struct {
  int32_t kind;  // enum finding_kind
  char kernel[160], instruction[48];
  uint32_t workgroup[3], wave, other_wave;
  int32_t lane;  // -1: the whole wave
  // `code_address`: the instruction's, in the image. `address`: that was accessed; for missing_wait, the
  // register's number.
  uint64_t code_address, address;
  // Of unordered: the store, of another workgroup; `other_wave` is its wave. Empty for other kinds.
  char other_instruction[48];
  uint32_t other_workgroup[3];
  uint64_t other_code_address;
  uint64_t repetitions;  // further findings of this kind at this instruction
} finding_t;

// Copies up to `capacity` findings to `out`; returns the number of distinct findings.
size_t findings_read(finding_t *out, size_t capacity);
void findings_clear(void);
// Sets a function that is called after each new distinct finding, from any thread; NULL for none.
void findings_set_listener(void (*listener)(const finding_t *));
const char *finding_name(enum finding_kind kind);

// Callers must set these before the first launch.
extern struct launch_options {
  int threads;                 // host threads that share a launch's workgroups; 0: one per CPU
  uint64_t max_instructions;   // of one wave, or of a launch without effect, before it is reported as endless
  uint64_t seed;               // of the order in which workgroups run
  bool counts_unique_bytes;
} launch_options;

// Whether kernels may access this range of device memory; defined in hip/memory.c.
bool memory_is_live(uint64_t address, uint64_t bytes);
