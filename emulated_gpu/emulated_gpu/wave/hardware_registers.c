// The MODE register, and moves with register numbers relative to M0.
#include "wave.h"

// The bits of a hardware register that a constant selects. The constant has the register's number in bits 0
// to 5, the first bit in bits 6 to 10, and the number of bits minus one in bits 11 to 15.
enum { MODE = 1 };
typedef struct { uint32_t number, shift, mask; } part_t;

static part_t part_of(const operand_t *constant) {
  const uint32_t simm16 = (uint32_t)constant->value, bits = (simm16 >> 11 & 31) + 1, shift = simm16 >> 6 & 31;
  return (part_t){simm16 & 63, shift, (uint32_t)(((1ull << bits) - 1) << shift)};
}

// Sets MODE. Only rounding to nearest even is supported: any other rounding mode stops the kernel.
static void set_mode(wave_t *w, const instruction_t *i, uint32_t mode) {
  if (mode & 15) fail(w, i, UNKNOWN_INSTRUCTION, LAUNCH_UNKNOWN_INSTRUCTION);
  else w->mode = mode;
}

static void s_getreg_b32(wave_t *w, const instruction_t *i) {
  const part_t part = part_of(&i->operand[SRC0]);
  if (part.number != MODE) fail(w, i, UNKNOWN_INSTRUCTION, LAUNCH_UNKNOWN_INSTRUCTION);
  else write_scalar32(w, &i->operand[DST], (w->mode & part.mask) >> part.shift);
}
static void s_setreg_b32(wave_t *w, const instruction_t *i) {
  const part_t part = part_of(&i->operand[SRC1]);
  const uint32_t value = read_scalar32(w, &i->operand[SRC0]) << part.shift & part.mask;
  if (part.number != MODE) fail(w, i, UNKNOWN_INSTRUCTION, LAUNCH_UNKNOWN_INSTRUCTION);
  else set_mode(w, i, (w->mode & ~part.mask) | value);
}
static void s_denorm_mode(wave_t *w, const instruction_t *i) {
  set_mode(w, i, (w->mode & ~0xf0u) | ((uint32_t)i->offset & 15) << 4);
}
static void s_round_mode(wave_t *w, const instruction_t *i) {
  set_mode(w, i, (w->mode & ~15u) | ((uint32_t)i->offset & 15));
}

// ---- moves whose source or destination is the register number plus M0 (RDNA). A sum that is no register's
// number stops the kernel.
static bool relative(wave_t *w, const instruction_t *i, int operand, uint32_t limit, operand_t *out) {
  static const operand_t m0 = {.kind = SGPR, .dwords = 1, .index = M0_INDEX};
  *out = i->operand[operand];
  const uint64_t index = (uint64_t)out->index + read_scalar32(w, &m0);
  out->index = (uint16_t)index;
  if (index + out->dwords <= limit) return true;
  fail(w, i, UNKNOWN_INSTRUCTION, LAUNCH_UNKNOWN_INSTRUCTION);
  return false;
}
enum { NUM_SGPRS = 106, NUM_ADDRESSED_VGPRS = 256 };

static void s_movrels_b32(wave_t *w, const instruction_t *i) {
  operand_t from;
  if (relative(w, i, SRC0, NUM_SGPRS, &from)) write_scalar32(w, &i->operand[DST], read_scalar32(w, &from));
}
static void s_movrels_b64(wave_t *w, const instruction_t *i) {
  operand_t from;
  if (relative(w, i, SRC0, NUM_SGPRS, &from)) write_scalar64(w, &i->operand[DST], read_scalar64(w, &from));
}
static void s_movreld_b32(wave_t *w, const instruction_t *i) {
  operand_t to;
  if (relative(w, i, DST, NUM_SGPRS, &to)) write_scalar32(w, &to, read_scalar32(w, &i->operand[SRC0]));
}
static void s_movreld_b64(wave_t *w, const instruction_t *i) {
  operand_t to;
  if (relative(w, i, DST, NUM_SGPRS, &to)) write_scalar64(w, &to, read_scalar64(w, &i->operand[SRC0]));
}
static void v_movrels_b32(wave_t *w, const instruction_t *i) {
  instruction_t moved = *i;
  lanes32_t x;
  if (!relative(w, i, SRC0, NUM_ADDRESSED_VGPRS, &moved.operand[SRC0])) return;
  read32(w, &moved, 0, &x);
  write32(w, &moved, &x);
}
static void v_movreld_b32(wave_t *w, const instruction_t *i) {
  instruction_t moved = *i;
  lanes32_t x;
  if (!relative(w, i, DST, NUM_ADDRESSED_VGPRS, &moved.operand[DST])) return;
  read32(w, &moved, 0, &x);
  write32(w, &moved, &x);
}

OPERATIONS(hardware_registers) = {
  {"s_getreg_b32", s_getreg_b32},
  {"s_setreg_b32", s_setreg_b32},
  {"s_denorm_mode", s_denorm_mode},
  {"s_round_mode", s_round_mode},
  {"s_movrels_b32", s_movrels_b32},
  {"s_movrels_b64", s_movrels_b64},
  {"s_movreld_b32", s_movreld_b32},
  {"s_movreld_b64", s_movreld_b64},
  {"v_movrels_b32", v_movrels_b32},
  {"v_movreld_b32", v_movreld_b32},
  {NULL, NULL},
};
