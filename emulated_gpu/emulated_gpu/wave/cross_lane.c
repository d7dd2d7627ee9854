// Operations that take values from other lanes: reads and writes of one lane, permutations, swizzles.
//
// A lane's result is defined if the value was defined in the lane from which it was taken. Source: the ISA
// manuals of CDNA 3, RDNA 3 and RDNA 4; for inactive lanes (not in EXEC), LLVM's "User Guide for AMDGPU
// Backend" (llvm.amdgcn.permlane16).
#include "wave.h"

#define ZERO_INSTEAD (-1)  // in place of a lane's number: the value is 0

// Replaces each lane of `value` and `defined` by lane `from[l]`.
static void gather(wave_t *w, const int32_t from[], lanes32_t *value, uint64_t *defined) {
  const lanes32_t old = *value;
  uint64_t taken = 0;
  FOR_LANES(l) {
    const int j = from[l];
    value->lane[l] = j < 0 ? 0 : old.lane[j & (LANES - 1)];
    taken |= (j < 0 ? 1ull : *defined >> (j & (LANES - 1)) & 1) << l;
  }
  *defined = taken;
  w->undefined |= ~taken;
}
static void write_gathered(wave_t *w, const instruction_t *i, const operand_t *source, const int32_t from[]) {
  lanes32_t value;
  uint64_t defined;
  read_register(w, source, 0, &value, &defined);
  gather(w, from, &value, &defined);
  write32(w, i, &value);
}

// ---- one lane
static uint32_t read_lane(wave_t *w, const operand_t *o, int lane) {
  if (o->kind != VGPR) return read_scalar32(w, o);
  if (!has_lane(w->v_defined[o->index], lane)) w->undefined = ~0ull;
  return w->v[o->index][lane];
}
static void v_readlane_b32(wave_t *w, const instruction_t *i) {
  const int lane = (int)(read_scalar32(w, &i->operand[SRC1]) & (LANES - 1));
  write_scalar32(w, &i->operand[DST], read_lane(w, &i->operand[SRC0], lane));
}
static void v_readfirstlane_b32(wave_t *w, const instruction_t *i) {
  const uint64_t running = exec_lanes(w);
  const int lane = running ? __builtin_ctzll(running) : 0;
  write_scalar32(w, &i->operand[DST], read_lane(w, &i->operand[SRC0], lane));
}
static void v_writelane_b32(wave_t *w, const instruction_t *i) {  // also writes an inactive lane
  const uint32_t value = read_scalar32(w, &i->operand[SRC0]);
  const int lane = (int)(read_scalar32(w, &i->operand[SRC1]) & (LANES - 1));
  w->v[i->operand[DST].index][lane] = value;
  w->write_lanes = 1ull << lane;
  define(w, i->operand[DST].index);
}

// ---- within rows of 16 lanes. Bit 0 of opsel: inactive lanes are read, too. Otherwise, with bit 1, 0 is
// read instead of an inactive lane; without bit 1, the lane that would read it keeps its old value.
static void heed_lanes_that_do_not_run(wave_t *w, const instruction_t *i, int32_t from[]) {
  const uint64_t readable = i->opsel & 1 ? ~0ull : exec_lanes(w);
  FOR_LANES(l) {
    if (has_lane(readable, from[l])) continue;
    from[l] = ZERO_INSTEAD;
    if (!(i->opsel & 2)) w->write_lanes &= ~(1ull << l);
  }
}
static void permute_rows(wave_t *w, const instruction_t *i, int32_t from[]) {
  heed_lanes_that_do_not_run(w, i, from);
  write_gathered(w, i, &i->operand[SRC0], from);
}
// `flipped`: 0 to read from the lane's own row, 16 to read from the other row of a pair. The lane within the
// row is selected by 4 bits of the scalar sources 1 and 2.
static void permute_rows_by_scalars(wave_t *w, const instruction_t *i, int flipped) {
  int32_t from[LANES];
  const uint64_t low = read_scalar32(w, &i->operand[SRC1]), high = read_scalar32(w, &i->operand[SRC2]);
  FOR_LANES(l) from[l] = ((l & ~15) ^ flipped) | (int32_t)((low | high << 32) >> 4 * (l & 15) & 15);
  permute_rows(w, i, from);
}
// The same, but the lane within the row is selected by the lowest 4 bits of each lane of source 1.
static void permute_rows_by_lanes(wave_t *w, const instruction_t *i, int flipped) {
  int32_t from[LANES];
  lanes32_t selects;
  read32(w, i, 1, &selects);
  FOR_LANES(l) from[l] = ((l & ~15) ^ flipped) | (int32_t)(selects.lane[l] & 15);
  permute_rows(w, i, from);
}
static void v_permlane16_b32(wave_t *w, const instruction_t *i) { permute_rows_by_scalars(w, i, 0); }
static void v_permlanex16_b32(wave_t *w, const instruction_t *i) { permute_rows_by_scalars(w, i, 16); }
static void v_permlane16_var_b32(wave_t *w, const instruction_t *i) { permute_rows_by_lanes(w, i, 0); }
static void v_permlanex16_var_b32(wave_t *w, const instruction_t *i) { permute_rows_by_lanes(w, i, 16); }

static void v_permlane64_b32(wave_t *w, const instruction_t *i) {  // also reads inactive lanes
  int32_t from[LANES];
  if (LANES == 32) return;
  FOR_LANES(l) from[l] = l ^ 32;
  write_gathered(w, i, &i->operand[SRC0], from);
}

// Exchanges the destination's lanes with bit `distance` set in their number with source 0's lanes without
// this bit. EXEC and opsel have the same effect as for V_PERMLANE16 (the manual does not mention inactive
// lanes).
static void swap_halves(wave_t *w, const instruction_t *i, int distance) {
  const uint64_t upper = distance == 32 ? 0xffffffff00000000ull : 0xffff0000ffff0000ull;
  const operand_t *first = &i->operand[DST], *second = &i->operand[SRC0];
  int32_t from[LANES];
  lanes32_t x, y;
  uint64_t x_defined, y_defined;
  read_register(w, second, 0, &x, &x_defined);
  read_register(w, first, 0, &y, &y_defined);
  FOR_LANES(l) from[l] = l ^ distance;
  heed_lanes_that_do_not_run(w, i, from);
  gather(w, from, &x, &x_defined);
  gather(w, from, &y, &y_defined);
  const uint64_t written = w->write_lanes;
  w->write_lanes = written & upper, w->undefined = ~x_defined;
  write_register(w, first->index, x.lane);
  w->write_lanes = written & ~upper, w->undefined = ~y_defined;
  write_register(w, second->index, y.lane);
}
static void v_permlane16_swap_b32(wave_t *w, const instruction_t *i) { swap_halves(w, i, 16); }
static void v_permlane32_swap_b32(wave_t *w, const instruction_t *i) { swap_halves(w, i, 32); }

// ---- through the LDS unit, without an access to LDS. 0 is read from inactive lanes.
// Returns the lane that an address selects. RDNA 3 permutes each half of a wave of 64 lanes separately.
static int lane_at(const wave_t *w, int l, uint32_t address) {
  const int lanes = w->group->kernel->header.generation == 11 ? 32 : LANES;
  return (l & ~(lanes - 1)) | (int)(address >> 2 & (uint32_t)(lanes - 1));
}
static void read_addresses(wave_t *w, const instruction_t *i, lanes32_t *out) {
  read32(w, i, 0, out);
  FOR_LANES(l) out->lane[l] += (uint32_t)i->offset;
}
static void pull(wave_t *w, const instruction_t *i, uint64_t readable) {
  int32_t from[LANES];
  lanes32_t addresses;
  read_addresses(w, i, &addresses);
  FOR_LANES(l) {
    const int j = lane_at(w, l, addresses.lane[l]);
    from[l] = has_lane(readable, j) ? j : ZERO_INSTEAD;
  }
  write_gathered(w, i, &i->operand[SRC1], from);
}
static void ds_bpermute_b32(wave_t *w, const instruction_t *i) { pull(w, i, exec_lanes(w)); }
static void ds_bpermute_fi_b32(wave_t *w, const instruction_t *i) { pull(w, i, ~0ull); }
// Each lane sends its value to another lane. If several lanes send to the same lane, the highest one
// prevails.
static void ds_permute_b32(wave_t *w, const instruction_t *i) {
  int32_t from[LANES];
  lanes32_t addresses;
  read_addresses(w, i, &addresses);
  if (w->undefined) w->undefined = ~0ull;  // an undefined address may select any lane
  FOR_LANES(l) from[l] = ZERO_INSTEAD;
  FOR_LANES(l) if (has_lane(exec_lanes(w), l)) from[lane_at(w, l, addresses.lane[l])] = l;
  write_gathered(w, i, &i->operand[SRC1], from);
}

// Returns the lane, of 32, from which lane `l` takes its value. The 16-bit `offset` selects the permutation:
// from 0xe000 on, reversal of bits (for FFTs); from 0xc000 on, a rotation; from 0x8000 on, a permutation of
// each four lanes; below, and, or and xor masks for the lane's number.
static uint32_t swizzled(uint32_t l, uint32_t offset) {
  const uint32_t mask = offset & 31, or = offset >> 5 & 31, xor = offset >> 10 & 31;
  if (offset >= 0xe000) {
    uint32_t reversed = 0;
    for (int n = 0; n < 5; n++) reversed |= (l >> n & 1) << (4 - n);
    return (reversed >> __builtin_popcount(mask) | (l & mask)) & 31;
  }
  if (offset >= 0xc000) return (l & mask) | ((offset & 0x400 ? l - or : l + or) & ~mask & 31);
  if (offset >= 0x8000) return (l & ~3u) | (offset >> 2 * (l & 3) & 3);
  return ((l & mask) | or) ^ xor;
}
static void ds_swizzle_b32(wave_t *w, const instruction_t *i) {
  int32_t from[LANES];
  FOR_LANES(l) {
    const int j = (l & 32) | (int)swizzled((uint32_t)l & 31, (uint32_t)i->offset & 0xffff);
    from[l] = has_lane(exec_lanes(w), j) ? j : ZERO_INSTEAD;
  }
  write_gathered(w, i, &i->operand[SRC0], from);
}

OPERATIONS(cross_lane) = {
  {"v_readlane_b32", v_readlane_b32},
  {"v_readfirstlane_b32", v_readfirstlane_b32},
  {"v_writelane_b32", v_writelane_b32},
  {"v_permlane16_b32", v_permlane16_b32},
  {"v_permlanex16_b32", v_permlanex16_b32},
  {"v_permlane16_var_b32", v_permlane16_var_b32},
  {"v_permlanex16_var_b32", v_permlanex16_var_b32},
  {"v_permlane64_b32", v_permlane64_b32},
  {"v_permlane16_swap_b32", v_permlane16_swap_b32},
  {"v_permlane32_swap_b32", v_permlane32_swap_b32},
  {"ds_permute_b32", ds_permute_b32},
  {"ds_bpermute_b32", ds_bpermute_b32},
  {"ds_bpermute_fi_b32", ds_bpermute_fi_b32},
  {"ds_swizzle_b32", ds_swizzle_b32},
  {NULL, NULL},
};
