// Programs: kernels as sequences of operations, which emulated_gpu/translate creates from a code object.
//
// A program file is little-endian and packed:
//   char magic[8] = "WAVEPRG1"; u32 num_operations; each: u8 length, name
//   u32 num_kernels; each: u16 length, name; kernel_header_t; num_arguments x argument_t; num_instructions x record_t
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct wave;
struct instruction;
typedef void (*operation_t)(struct wave *, const struct instruction *);

enum operand_kind {
  NOTHING = 0,   // reads 0, writes are dropped
  SGPR = 1,      // 0..105, VCC 106, TTMP 108..123, M0 124, EXEC 126
  VGPR = 2,      // 0..255, accumulation registers 256..511, temporaries of the translator 512..519
  CONSTANT = 3,  // `value`, already in the width and format that the operation reads
  SCC = 4,
  VCCZ = 5,
  EXECZ = 6,
  APERTURE = 7,  // `value`: 0 shared base, 1 shared limit, 2 private base, 3 private limit
};

enum encoding { PLAIN = 0, DPP16 = 1, DPP8 = 2, SDWA = 3 };

enum instruction_class {
  CLASS_OTHER, CLASS_SCALAR, CLASS_SCALAR_MEMORY, CLASS_VECTOR, CLASS_TRANSCENDENTAL, CLASS_MATRIX, CLASS_LOAD, CLASS_STORE,
  CLASS_LDS, CLASS_SCRATCH, CLASS_BRANCH, CLASS_BARRIER, CLASS_WAIT, CLASS_ATOMIC, CLASS_MESSAGE, NUM_CLASSES,
};

// The hardware's counters of outstanding accesses. Before RDNA 4, scalar loads and LDS accesses have a common
// counter (lgkmcnt). On CDNA, stores have one with loads.
enum wait_counter {
  WAIT_LOADS, WAIT_LDS, WAIT_SCALAR, WAIT_STORES, NUM_WAIT_COUNTERS, WAIT_NONE = NUM_WAIT_COUNTERS,
};

enum memory_flag {
  MEMORY_OFFEN = 1, MEMORY_IDXEN = 2, MEMORY_TO_LDS = 4, MEMORY_RETURNS = 8, MEMORY_TFE = 16,
  MEMORY_FOR_DEVICE = 32,  // a load or store that no cache between compute units and device hides
};

// The source of a kernel argument's value, in the order of `translate/program.py`.
enum argument_kind {
  ARGUMENT_VALUE = 0,
  HIDDEN_BLOCK_COUNT_X, HIDDEN_BLOCK_COUNT_Y, HIDDEN_BLOCK_COUNT_Z,
  HIDDEN_GROUP_SIZE_X, HIDDEN_GROUP_SIZE_Y, HIDDEN_GROUP_SIZE_Z,
  HIDDEN_REMAINDER_X, HIDDEN_REMAINDER_Y, HIDDEN_REMAINDER_Z,
  HIDDEN_GLOBAL_OFFSET_X, HIDDEN_GLOBAL_OFFSET_Y, HIDDEN_GLOBAL_OFFSET_Z,
  HIDDEN_GRID_DIMS, HIDDEN_DYNAMIC_LDS_SIZE,
  HIDDEN_OTHER,  // filled with zeros
};

typedef struct {
  uint16_t offset, size;
  uint8_t kind;
} __attribute__((packed)) argument_t;

typedef struct {
  uint64_t entry;  // address of the first instruction in the image
  uint8_t lanes;   // 32 or 64
  uint8_t generation;  // 9 (CDNA), 11 (RDNA 3), 12 (RDNA 4)
  uint8_t writes_back;  // whether the device sees a store only after an L2 cache was written back
  uint16_t num_arguments;
  uint32_t kernarg_bytes, lds_bytes, scratch_bytes;  // scratch_bytes are per lane
  uint32_t rsrc1, rsrc2, rsrc3;
  uint16_t properties, preload;
  uint16_t num_vgprs, num_agprs, num_sgprs, vgpr_spills, sgpr_spills;  // from the metadata
  uint32_t max_workgroup;
  uint32_t num_instructions;
} __attribute__((packed)) kernel_header_t;

typedef struct {
  uint8_t kind, dwords;
  uint16_t index;
  uint64_t value;
} __attribute__((packed)) packed_operand_t;

enum { DST, DST2, SRC0, SRC1, SRC2, SRC3, NUM_OPERANDS };

#define INSTRUCTION_FIELDS \
  uint8_t neg, abs, neg_hi, opsel, opsel_hi, clamp, omod, encoding; \
  uint32_t lanes_modifier; \
  int32_t offset, offset1, target; \
  uint8_t bytes, sign, d16, memory; \
  uint8_t cbsz, abid, blgp, reserved; \
  uint32_t class;

typedef struct {
  uint32_t address;
  uint16_t operation;
  uint8_t words, flags;  // flags bit 0: counts as an instruction
  packed_operand_t operand[NUM_OPERANDS];
  INSTRUCTION_FIELDS
  uint8_t padding[128 - 8 - 12 * NUM_OPERANDS - 36];
} __attribute__((packed)) record_t;
_Static_assert(sizeof(record_t) == 128, "the translator writes 128 bytes");

typedef struct {
  uint8_t kind, dwords;
  uint16_t index;
  uint64_t value;
} operand_t;

// A record as the executor uses it, with its operation resolved to a function.
typedef struct instruction {
  operation_t run;
  const char *name;
  uint32_t address;
  uint8_t words, counted;
  uint8_t wait_counter;  // enum wait_counter
  operand_t operand[NUM_OPERANDS];
  struct { INSTRUCTION_FIELDS };
} instruction_t;

typedef struct kernel {
  char *name;
  kernel_header_t header;
  argument_t *arguments;
  instruction_t *code;
  uint32_t used_vgprs;  // highest VGPR in the code, plus 1
  bool may_spin;  // whether a loop has an atomic or a load that may wait for another workgroup
} kernel_t;

typedef struct program program_t;

// Loads a program file. Returns NULL on failure, with a message in `error`.
program_t *program_load(const char *path, char *error, size_t error_size);
void program_free(program_t *program);
const kernel_t *program_kernel(const program_t *program, const char *name);
const kernel_t *program_kernel_at(const program_t *program, uint32_t index);  // NULL if there are fewer
// Returns the index of the instruction at `address` in the image, or -1.
int64_t kernel_index_of(const kernel_t *kernel, uint64_t address);

// Returns an operation by its name, for waves of `lanes` (32 or 64); NULL if there is none.
operation_t operation_named(const char *name, int lanes);
// The operation of unsupported instructions: reports the instruction and stops the kernel.
extern const operation_t unknown_operation;
