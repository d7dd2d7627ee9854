// Scalar integer operations: moves, arithmetic, logic, shifts, bit fields and comparisons, on 32 and 64 bits.
//
// Source: the CDNA 3, RDNA 3 and RDNA 4 ISA manuals ("SOP1", "SOP2", "SOPC" and "SOPK instructions").
#include "wave.h"

// ---- functions for several operations
static inline uint32_t reversed32(uint32_t x) {
  x = (x & 0x55555555) << 1 | (x >> 1 & 0x55555555);
  x = (x & 0x33333333) << 2 | (x >> 2 & 0x33333333);
  x = (x & 0x0f0f0f0f) << 4 | (x >> 4 & 0x0f0f0f0f);
  return __builtin_bswap32(x);
}
static inline uint64_t reversed64(uint64_t x) {
  return (uint64_t)reversed32((uint32_t)x) << 32 | reversed32((uint32_t)(x >> 32));
}

// The position of the first set bit, counted from bit 0 up or from the highest bit down; -1 if no bit is set.
static inline uint32_t first_set64(uint64_t x) { return x ? (uint32_t)__builtin_ctzll(x) : ~0u; }
static inline uint32_t zeros_above32(uint32_t x) { return x ? (uint32_t)__builtin_clz(x) : ~0u; }
static inline uint32_t zeros_above64(uint64_t x) { return x ? (uint32_t)__builtin_clzll(x) : ~0u; }
// Clears all bits that equal the sign bit, and sets the others.
static inline uint32_t without_sign32(int32_t x) { return (uint32_t)(x ^ (x >> 31)); }
static inline uint64_t without_sign64(int64_t x) { return (uint64_t)(x ^ (x >> 63)); }

static inline uint64_t low_bits(uint32_t count) { return count < 64 ? (1ull << count) - 1 : ~0ull; }
// Bit fields: `where` has the field's offset in its lowest bits and its width in bits 16 to 22.
static inline uint32_t width_of(uint32_t where) { return where >> 16 & 127; }
static inline uint64_t field_u64(uint64_t x, uint32_t where) {
  return x >> (where & 63) & low_bits(width_of(where));
}
static inline uint32_t field_u32(uint32_t x, uint32_t where) {
  return (uint32_t)(x >> (where & 31) & low_bits(width_of(where)));
}
static inline int64_t field_i64(int64_t x, uint32_t where) {
  const uint32_t width = width_of(where);
  const int64_t shifted = x >> (where & 63);
  if (width == 0) return 0;
  return width >= 64 ? shifted : (int64_t)((uint64_t)shifted << (64 - width)) >> (64 - width);
}
static inline int32_t field_i32(int32_t x, uint32_t where) {
  return (int32_t)field_i64(x, (where & 31) | (where & 0x7f0000));
}

static inline uint64_t any_of_four(uint64_t x) {  // bit 4n: whether any of the bits 4n to 4n + 3 is set
  x |= x >> 2;
  x |= x >> 1;
  return x & 0x1111111111111111ull;
}
static inline uint64_t quad_mask(uint64_t x) {  // bit n: whether any of the bits 4n to 4n + 3 is set
  uint64_t quads = 0;
  for (int n = 0; n < 16; n++) quads |= (any_of_four(x) >> 4 * n & 1) << n;
  return quads;
}
static inline uint64_t replicated(uint32_t x) {  // each bit twice
  uint64_t y = 0;
  for (int n = 0; n < 32; n++) y |= (x >> n & 1) * 3ull << 2 * n;
  return y;
}
static inline uint32_t absolute32(uint32_t x) { return (int32_t)x < 0 ? 0 - x : x; }
static inline bool overflows(int64_t exact) { return exact != (int32_t)exact; }
static inline uint32_t pack16(uint32_t low, uint32_t high) { return (low & 0xffff) | high << 16; }

// ---- one source: name, bits of the source, bits of the result, result
#define UNARY(X) \
  X(s_mov_b32, 32, 32, a) \
  X(s_mov_b64, 64, 64, a) \
  X(s_brev_b32, 32, 32, reversed32(a)) \
  X(s_brev_b64, 64, 64, reversed64(a)) \
  X(s_ff0_i32_b32, 32, 32, first_set64((uint32_t)~a)) \
  X(s_ff0_i32_b64, 64, 32, first_set64(~a)) \
  X(s_ff1_i32_b32, 32, 32, first_set64(a)) \
  X(s_ff1_i32_b64, 64, 32, first_set64(a)) \
  X(s_flbit_i32_b32, 32, 32, zeros_above32(a)) \
  X(s_flbit_i32_b64, 64, 32, zeros_above64(a)) \
  X(s_flbit_i32, 32, 32, zeros_above32(without_sign32((int32_t)a))) \
  X(s_flbit_i32_i64, 64, 32, zeros_above64(without_sign64((int64_t)a))) \
  X(s_sext_i32_i8, 32, 32, (uint32_t)(int8_t)a) \
  X(s_sext_i32_i16, 32, 32, (uint32_t)(int16_t)a) \
  X(s_bitreplicate_b64_b32, 32, 64, replicated(a))

// The same, for operations that set SCC to whether the result is not 0.
#define UNARY_TESTED(X) \
  X(s_not_b32, 32, 32, ~a) \
  X(s_not_b64, 64, 64, ~a) \
  X(s_abs_i32, 32, 32, absolute32(a)) \
  X(s_bcnt0_i32_b32, 32, 32, (uint32_t)__builtin_popcount(~a)) \
  X(s_bcnt0_i32_b64, 64, 32, (uint32_t)__builtin_popcountll(~a)) \
  X(s_bcnt1_i32_b32, 32, 32, (uint32_t)__builtin_popcount(a)) \
  X(s_bcnt1_i32_b64, 64, 32, (uint32_t)__builtin_popcountll(a)) \
  X(s_quadmask_b32, 32, 32, (uint32_t)quad_mask(a)) \
  X(s_quadmask_b64, 64, 64, quad_mask(a)) \
  X(s_wqm_b32, 32, 32, (uint32_t)(any_of_four(a) * 15)) \
  X(s_wqm_b64, 64, 64, any_of_four(a) * 15)

// ---- two sources: name, bits of each source and of the result, result
#define BINARY(X) \
  X(s_bfm_b32, 32, 32, 32, ((1u << (a & 31)) - 1) << (b & 31)) \
  X(s_bfm_b64, 32, 32, 64, ((1ull << (a & 63)) - 1) << (b & 63)) \
  X(s_mul_i32, 32, 32, 32, a * b) \
  X(s_mul_hi_u32, 32, 32, 32, (uint32_t)((uint64_t)a * b >> 32)) \
  X(s_mul_hi_i32, 32, 32, 32, (uint32_t)((int64_t)(int32_t)a * (int32_t)b >> 32)) \
  X(s_mul_u64, 64, 64, 64, a * b) \
  X(s_add_nc_u64, 64, 64, 64, a + b) \
  X(s_sub_nc_u64, 64, 64, 64, a - b) \
  X(s_pack_ll_b32_b16, 32, 32, 32, pack16(a, b)) \
  X(s_pack_lh_b32_b16, 32, 32, 32, pack16(a, b >> 16)) \
  X(s_pack_hl_b32_b16, 32, 32, 32, pack16(a >> 16, b)) \
  X(s_pack_hh_b32_b16, 32, 32, 32, pack16(a >> 16, b >> 16))

// The same, for operations that set SCC to whether the result is not 0.
#define BINARY_TESTED(X) \
  X(s_and_b32, 32, 32, 32, a & b) \
  X(s_and_b64, 64, 64, 64, a & b) \
  X(s_or_b32, 32, 32, 32, a | b) \
  X(s_or_b64, 64, 64, 64, a | b) \
  X(s_xor_b32, 32, 32, 32, a ^ b) \
  X(s_xor_b64, 64, 64, 64, a ^ b) \
  X(s_andn2_b32, 32, 32, 32, a & ~b) \
  X(s_andn2_b64, 64, 64, 64, a & ~b) \
  X(s_orn2_b32, 32, 32, 32, a | ~b) \
  X(s_orn2_b64, 64, 64, 64, a | ~b) \
  X(s_nand_b32, 32, 32, 32, ~(a & b)) \
  X(s_nand_b64, 64, 64, 64, ~(a & b)) \
  X(s_nor_b32, 32, 32, 32, ~(a | b)) \
  X(s_nor_b64, 64, 64, 64, ~(a | b)) \
  X(s_xnor_b32, 32, 32, 32, ~(a ^ b)) \
  X(s_xnor_b64, 64, 64, 64, ~(a ^ b)) \
  X(s_lshl_b32, 32, 32, 32, a << (b & 31)) \
  X(s_lshl_b64, 64, 32, 64, a << (b & 63)) \
  X(s_lshr_b32, 32, 32, 32, a >> (b & 31)) \
  X(s_lshr_b64, 64, 32, 64, a >> (b & 63)) \
  X(s_ashr_i32, 32, 32, 32, (uint32_t)((int32_t)a >> (b & 31))) \
  X(s_ashr_i64, 64, 32, 64, (uint64_t)((int64_t)a >> (b & 63))) \
  X(s_bfe_u32, 32, 32, 32, field_u32(a, b)) \
  X(s_bfe_i32, 32, 32, 32, (uint32_t)field_i32((int32_t)a, b)) \
  X(s_bfe_u64, 64, 32, 64, field_u64(a, b)) \
  X(s_bfe_i64, 64, 32, 64, (uint64_t)field_i64((int64_t)a, b)) \
  X(s_absdiff_i32, 32, 32, 32, absolute32(a - b))

// Two sources of 32 bits: name, result from sources `a` and `b`, new SCC from a, b and the result `d`.
#define BINARY_CARRY(X) \
  X(s_add_u32, a + b, d < a) \
  X(s_sub_u32, a - b, b > a) \
  X(s_add_i32, a + b, overflows((int64_t)(int32_t)a + (int32_t)b)) \
  X(s_sub_i32, a - b, overflows((int64_t)(int32_t)a - (int32_t)b)) \
  X(s_addc_u32, a + b + read_scc(w), (uint64_t)a + b + w->scc > UINT32_MAX) \
  X(s_subb_u32, a - b - read_scc(w), (uint64_t)b + w->scc > a) \
  X(s_min_i32, (int32_t)a < (int32_t)b ? a : b, (int32_t)a < (int32_t)b) \
  X(s_min_u32, a < b ? a : b, a < b) \
  X(s_max_i32, (int32_t)a >= (int32_t)b ? a : b, (int32_t)a >= (int32_t)b) \
  X(s_max_u32, a >= b ? a : b, a >= b) \
  X(s_lshl1_add_u32, (a << 1) + b, ((uint64_t)a << 1) + b > UINT32_MAX) \
  X(s_lshl2_add_u32, (a << 2) + b, ((uint64_t)a << 2) + b > UINT32_MAX) \
  X(s_lshl3_add_u32, (a << 3) + b, ((uint64_t)a << 3) + b > UINT32_MAX) \
  X(s_lshl4_add_u32, (a << 4) + b, ((uint64_t)a << 4) + b > UINT32_MAX)

// Comparisons: name, bits of each source, the new SCC.
#define COMPARISONS(X) \
  X(s_cmp_eq_i32, 32, 32, a == b) \
  X(s_cmp_lg_i32, 32, 32, a != b) \
  X(s_cmp_gt_i32, 32, 32, (int32_t)a > (int32_t)b) \
  X(s_cmp_ge_i32, 32, 32, (int32_t)a >= (int32_t)b) \
  X(s_cmp_lt_i32, 32, 32, (int32_t)a < (int32_t)b) \
  X(s_cmp_le_i32, 32, 32, (int32_t)a <= (int32_t)b) \
  X(s_cmp_eq_u32, 32, 32, a == b) \
  X(s_cmp_lg_u32, 32, 32, a != b) \
  X(s_cmp_gt_u32, 32, 32, a > b) \
  X(s_cmp_ge_u32, 32, 32, a >= b) \
  X(s_cmp_lt_u32, 32, 32, a < b) \
  X(s_cmp_le_u32, 32, 32, a <= b) \
  X(s_cmp_eq_u64, 64, 64, a == b) \
  X(s_cmp_lg_u64, 64, 64, a != b) \
  X(s_bitcmp0_b32, 32, 32, !(a >> (b & 31) & 1)) \
  X(s_bitcmp1_b32, 32, 32, a >> (b & 31) & 1) \
  X(s_bitcmp0_b64, 64, 32, !(a >> (b & 63) & 1)) \
  X(s_bitcmp1_b64, 64, 32, a >> (b & 63) & 1)

#define WORD(bits) JOIN_WORD_(bits)
#define JOIN_WORD_(bits) uint##bits##_t

#define DEFINE_UNARY_(name, bits, result_bits, result, test) \
  static void name(wave_t *w, const instruction_t *i) { \
    const WORD(bits) a = read_scalar##bits(w, &i->operand[SRC0]); \
    const WORD(result_bits) d = result; \
    write_scalar##result_bits(w, &i->operand[DST], d); \
    test; \
  }
#define DEFINE_UNARY(name, bits, result_bits, result) DEFINE_UNARY_(name, bits, result_bits, result, )
#define DEFINE_UNARY_TESTED(name, bits, result_bits, result) \
  DEFINE_UNARY_(name, bits, result_bits, result, set_scc(w, d != 0))
#define DEFINE_BINARY_(name, bits0, bits1, result_bits, result, test) \
  static void name(wave_t *w, const instruction_t *i) { \
    const WORD(bits0) a = read_scalar##bits0(w, &i->operand[SRC0]); \
    const WORD(bits1) b = read_scalar##bits1(w, &i->operand[SRC1]); \
    const WORD(result_bits) d = result; \
    write_scalar##result_bits(w, &i->operand[DST], d); \
    test; \
  }
#define DEFINE_BINARY(name, bits0, bits1, result_bits, result) \
  DEFINE_BINARY_(name, bits0, bits1, result_bits, result, )
#define DEFINE_BINARY_TESTED(name, bits0, bits1, result_bits, result) \
  DEFINE_BINARY_(name, bits0, bits1, result_bits, result, set_scc(w, d != 0))
#define DEFINE_BINARY_CARRY(name, result, carry) DEFINE_BINARY_(name, 32, 32, 32, result, set_scc(w, carry))
#define DEFINE_COMPARISON(name, bits0, bits1, result) \
  static void name(wave_t *w, const instruction_t *i) { \
    const WORD(bits0) a = read_scalar##bits0(w, &i->operand[SRC0]); \
    const WORD(bits1) b = read_scalar##bits1(w, &i->operand[SRC1]); \
    set_scc(w, result); \
  }
UNARY(DEFINE_UNARY)
UNARY_TESTED(DEFINE_UNARY_TESTED)
BINARY(DEFINE_BINARY)
BINARY_TESTED(DEFINE_BINARY_TESTED)
BINARY_CARRY(DEFINE_BINARY_CARRY)
COMPARISONS(DEFINE_COMPARISON)

// ---- selection by SCC: the source that is not selected may be undefined
static inline const operand_t *selected(wave_t *w, const instruction_t *i) {
  return &i->operand[read_scc(w) ? SRC0 : SRC1];
}
static void s_cselect_b32(wave_t *w, const instruction_t *i) {
  const operand_t *o = selected(w, i);
  write_scalar32(w, &i->operand[DST], read_scalar32(w, o));
}
static void s_cselect_b64(wave_t *w, const instruction_t *i) {
  const operand_t *o = selected(w, i);
  write_scalar64(w, &i->operand[DST], read_scalar64(w, o));
}
static void s_cmov_b32(wave_t *w, const instruction_t *i) {
  const operand_t *o = &i->operand[read_scc(w) ? SRC0 : DST];
  write_scalar32(w, &i->operand[DST], read_scalar32(w, o));
}
static void s_cmov_b64(wave_t *w, const instruction_t *i) {
  const operand_t *o = &i->operand[read_scc(w) ? SRC0 : DST];
  write_scalar64(w, &i->operand[DST], read_scalar64(w, o));
}

// ---- setting or clearing one bit of the destination
#define BIT_SETS(X) \
  X(s_bitset0_b32, 32, d & ~(1u << (a & 31))) \
  X(s_bitset0_b64, 64, d & ~(1ull << (a & 63))) \
  X(s_bitset1_b32, 32, d | 1u << (a & 31)) \
  X(s_bitset1_b64, 64, d | 1ull << (a & 63))
#define DEFINE_BIT_SET(name, bits, result) \
  static void name(wave_t *w, const instruction_t *i) { \
    const uint32_t a = read_scalar32(w, &i->operand[SRC0]); \
    const WORD(bits) d = read_scalar##bits(w, &i->operand[DST]); \
    write_scalar##bits(w, &i->operand[DST], result); \
  }
BIT_SETS(DEFINE_BIT_SET)

// ---- EXEC: name, new EXEC from the source `a` and the old EXEC `e`. The destination of `saveexec` gets the
// old EXEC, that of `wrexec` the new EXEC.
#define SAVES(X) \
  X(s_and_saveexec, a & e) \
  X(s_or_saveexec, a | e) \
  X(s_xor_saveexec, a ^ e) \
  X(s_andn2_saveexec, a & ~e) \
  X(s_orn2_saveexec, a | ~e) \
  X(s_nand_saveexec, ~(a & e)) \
  X(s_nor_saveexec, ~(a | e)) \
  X(s_xnor_saveexec, ~(a ^ e)) \
  X(s_andn1_saveexec, ~a & e) \
  X(s_orn1_saveexec, ~a | e)
#define WRITES(X) \
  X(s_andn1_wrexec, ~a & e) \
  X(s_andn2_wrexec, a & ~e)

static const operand_t exec = {.kind = SGPR, .dwords = 2, .index = EXEC_INDEX};

#define DEFINE_EXEC_(name, bits, result, yielded) \
  static void name##_b##bits(wave_t *w, const instruction_t *i) { \
    const WORD(bits) a = read_scalar##bits(w, &i->operand[SRC0]), e = read_scalar##bits(w, &exec); \
    const WORD(bits) d = result; \
    write_scalar##bits(w, &exec, d); \
    write_scalar##bits(w, &i->operand[DST], yielded); \
    set_scc(w, d != 0); \
  }
#define DEFINE_SAVE(name, result) DEFINE_EXEC_(name, 32, result, e) DEFINE_EXEC_(name, 64, result, e)
#define DEFINE_WRITE(name, result) DEFINE_EXEC_(name, 32, result, d) DEFINE_EXEC_(name, 64, result, d)
SAVES(DEFINE_SAVE)
WRITES(DEFINE_WRITE)

#define EXEC_ROWS(name, ...) {#name "_b32", name##_b32}, {#name "_b64", name##_b64},
OPERATIONS(scalar) = {
  UNARY(ROW)
  UNARY_TESTED(ROW)
  BINARY(ROW)
  BINARY_TESTED(ROW)
  BINARY_CARRY(ROW)
  COMPARISONS(ROW)
  BIT_SETS(ROW)
  SAVES(EXEC_ROWS)
  WRITES(EXEC_ROWS)
  {"s_cselect_b32", s_cselect_b32},
  {"s_cselect_b64", s_cselect_b64},
  {"s_cmov_b32", s_cmov_b32},
  {"s_cmov_b64", s_cmov_b64},
  {NULL, NULL},
};
