// Vector operations on 32-bit integers: moves, arithmetic, logic, shifts and bit fields.
//
// Source: the CDNA 3, RDNA 3 and RDNA 4 ISA manuals ("VOP1", "VOP2" and "VOP3 instructions"). Operations on
// 64-bit integers are in vector_wide.c, on bytes in vector_bytes.c, on 16-bit integers in vector_integer16.c.
#include "wave.h"

// ---- functions for several operations
static inline uint32_t reversed(uint32_t x) {
  x = (x & 0x55555555) << 1 | (x >> 1 & 0x55555555);
  x = (x & 0x33333333) << 2 | (x >> 2 & 0x33333333);
  x = (x & 0x0f0f0f0f) << 4 | (x >> 4 & 0x0f0f0f0f);
  return x << 24 | (x & 0xff00) << 8 | (x >> 8 & 0xff00) | x >> 24;
}
static inline uint32_t zeros_above(uint32_t x) { return x ? (uint32_t)__builtin_clz(x) : ~0u; }
static inline uint32_t zeros_below(uint32_t x) { return x ? (uint32_t)__builtin_ctz(x) : ~0u; }
static inline uint32_t without_sign(uint32_t x) { return x ^ (uint32_t)((int32_t)x >> 31); }
// The next state of V_PRNG_B32's random generator, a linear-feedback shift register.
static inline uint32_t next_random(uint32_t x) { return x << 1 ^ (x >> 31 ? 197u : 0u); }

static inline uint32_t u24(uint32_t x) { return x & 0xffffff; }
static inline int32_t i24(uint32_t x) { return (int32_t)(x << 8) >> 8; }
static inline uint32_t high_u(uint64_t product) { return (uint32_t)(product >> 32); }
static inline uint32_t high_i(int64_t product) { return (uint32_t)(product >> 32); }

static inline uint32_t min_u(uint32_t a, uint32_t b) { return a < b ? a : b; }
static inline uint32_t max_u(uint32_t a, uint32_t b) { return a > b ? a : b; }
static inline uint32_t min_i(uint32_t a, uint32_t b) { return (int32_t)a < (int32_t)b ? a : b; }
static inline uint32_t max_i(uint32_t a, uint32_t b) { return (int32_t)a > (int32_t)b ? a : b; }

// The field of `width` bits that starts at bit `offset`; 0 if the width is 0.
static inline uint32_t field_u(uint32_t x, uint32_t offset, uint32_t width) {
  return x >> (offset & 31) & ((1u << (width & 31)) - 1);
}
static inline uint32_t field_i(uint32_t x, uint32_t offset, uint32_t width) {
  const uint32_t above = 32 - (width & 31);
  const int32_t shifted = (int32_t)x >> (offset & 31);
  return above == 32 ? 0 : (uint32_t)((int32_t)((uint32_t)shifted << (above & 31)) >> (above & 31));
}
static inline uint32_t from_pair(uint32_t high, uint32_t low, uint32_t shift) {
  return (uint32_t)(((uint64_t)high << 32 | low) >> shift);
}
// For each bit of the sources: bit number 4a + 2b + c of `table`.
static inline uint32_t looked_up(uint32_t table, uint32_t a, uint32_t b, uint32_t c) {
  uint32_t x = 0;
  for (int n = 0; n < 8; n++)
    if (table >> n & 1) x |= (n & 4 ? a : ~a) & (n & 2 ? b : ~b) & (n & 1 ? c : ~c);
  return x;
}

static inline uint32_t lanes_below_low(int l) { return l < 32 ? (1u << (l & 31)) - 1 : ~0u; }
static inline uint32_t lanes_below_high(int l) { return l < 32 ? 0 : (1u << (l & 31)) - 1; }

// ---- one source `a`: name, result
#define UNARY(X) \
  X(v_mov_b32, a) \
  X(v_not_b32, ~a) \
  X(v_bfrev_b32, reversed(a)) \
  X(v_ffbh_u32, zeros_above(a)) \
  X(v_ffbl_b32, zeros_below(a)) \
  X(v_ffbh_i32, zeros_above(without_sign(a))) \
  X(v_prng_b32, next_random(a))

// ---- two sources `a` and `b`, in lane `l`
#define BINARY(X) \
  X(v_and_b32, a & b) \
  X(v_or_b32, a | b) \
  X(v_xor_b32, a ^ b) \
  X(v_xnor_b32, ~(a ^ b)) \
  X(v_lshlrev_b32, b << (a & 31)) \
  X(v_lshrrev_b32, b >> (a & 31)) \
  X(v_ashrrev_i32, (uint32_t)((int32_t)b >> (a & 31))) \
  X(v_mul_lo_u32, a * b) \
  X(v_mul_hi_u32, high_u((uint64_t)a * b)) \
  X(v_mul_hi_i32, high_i((int64_t)(int32_t)a * (int32_t)b)) \
  X(v_mul_u32_u24, u24(a) * u24(b)) \
  X(v_mul_hi_u32_u24, high_u((uint64_t)u24(a) * u24(b))) \
  X(v_mul_i32_i24, (uint32_t)i24(a) * (uint32_t)i24(b)) \
  X(v_mul_hi_i32_i24, high_i((int64_t)i24(a) * i24(b))) \
  X(v_min_u32, min_u(a, b)) \
  X(v_max_u32, max_u(a, b)) \
  X(v_min_i32, min_i(a, b)) \
  X(v_max_i32, max_i(a, b)) \
  X(v_bfm_b32, ((1u << (a & 31)) - 1) << (b & 31)) \
  X(v_bcnt_u32_b32, (uint32_t)__builtin_popcount(a) + b) \
  X(v_mbcnt_lo_u32_b32, (uint32_t)__builtin_popcount(a & lanes_below_low(l)) + b) \
  X(v_mbcnt_hi_u32_b32, (uint32_t)__builtin_popcount(a & lanes_below_high(l)) + b)

// ---- three sources `a`, `b` and `c`
#define TERNARY(X) \
  X(v_add3_u32, a + b + c) \
  X(v_lshl_add_u32, (a << (b & 31)) + c) \
  X(v_add_lshl_u32, (a + b) << (c & 31)) \
  X(v_lshl_or_b32, a << (b & 31) | c) \
  X(v_and_or_b32, (a & b) | c) \
  X(v_or3_b32, a | b | c) \
  X(v_xor3_b32, a ^ b ^ c) \
  X(v_xad_u32, (a ^ b) + c) \
  X(v_bfi_b32, (a & b) | (~a & c)) \
  X(v_bfe_u32, field_u(a, b, c)) \
  X(v_bfe_i32, field_i(a, b, c)) \
  X(v_alignbit_b32, from_pair(a, b, c & 31)) \
  X(v_alignbyte_b32, from_pair(a, b, (c & 3) * 8)) \
  X(v_bitop3_b32, looked_up(i->cbsz, a, b, c)) \
  X(v_min3_u32, min_u(min_u(a, b), c)) \
  X(v_max3_u32, max_u(max_u(a, b), c)) \
  X(v_med3_u32, max_u(min_u(a, b), min_u(max_u(a, b), c))) \
  X(v_minmax_u32, max_u(min_u(a, b), c)) \
  X(v_maxmin_u32, min_u(max_u(a, b), c)) \
  X(v_min3_i32, min_i(min_i(a, b), c)) \
  X(v_max3_i32, max_i(max_i(a, b), c)) \
  X(v_med3_i32, max_i(min_i(a, b), min_i(max_i(a, b), c))) \
  X(v_minmax_i32, max_i(min_i(a, b), c)) \
  X(v_maxmin_i32, min_i(max_i(a, b), c))

// ---- operations that can clamp an exact result to the range of its type: name, type of sources and result,
// exact result
#define CLAMPED_BINARY(X) \
  X(v_add_u32, uint32_t, (int64_t)a + b) \
  X(v_sub_u32, uint32_t, (int64_t)a - b) \
  X(v_subrev_u32, uint32_t, (int64_t)b - a) \
  X(v_add_i32, int32_t, (int64_t)a + b) \
  X(v_sub_i32, int32_t, (int64_t)a - b)
#define CLAMPED_TERNARY(X) \
  X(v_mad_u32_u24, uint32_t, (int64_t)u24(a) * u24(b) + c) \
  X(v_mad_i32_i24, int32_t, (int64_t)i24((uint32_t)a) * i24((uint32_t)b) + c)
// The same, but the first two sources have 16 bits.
#define CLAMPED_HALVES(X) \
  X(v_mad_u32_u16, uint32_t, (int64_t)(uint16_t)a * (uint16_t)b + c) \
  X(v_mad_i32_i16, int32_t, (int64_t)(int16_t)a * (int16_t)b + c)
static inline uint32_t clamped_uint32_t(int64_t x) {
  return x < 0 ? 0 : x > UINT32_MAX ? UINT32_MAX : (uint32_t)x;
}
static inline uint32_t clamped_int32_t(int64_t x) {
  return (uint32_t)(x < INT32_MIN ? INT32_MIN : x > INT32_MAX ? INT32_MAX : x);
}

#define DEFINE_UNARY(name, result) \
  static void name(wave_t *w, const instruction_t *i) { \
    lanes32_t x; \
    read32(w, i, 0, &x); \
    FOR_LANES(l) { const uint32_t a = x.lane[l]; x.lane[l] = result; } \
    write32(w, i, &x); \
  }
#define DEFINE_BINARY(name, result) \
  static void name(wave_t *w, const instruction_t *i) { \
    lanes32_t x, y; \
    read32(w, i, 0, &x); \
    read32(w, i, 1, &y); \
    FOR_LANES(l) { const uint32_t a = x.lane[l], b = y.lane[l]; x.lane[l] = result; } \
    write32(w, i, &x); \
  }
#define DEFINE_TERNARY(name, result) \
  static void name(wave_t *w, const instruction_t *i) { \
    lanes32_t x, y, z; \
    read32(w, i, 0, &x); \
    read32(w, i, 1, &y); \
    read32(w, i, 2, &z); \
    FOR_LANES(l) { const uint32_t a = x.lane[l], b = y.lane[l], c = z.lane[l]; x.lane[l] = result; } \
    write32(w, i, &x); \
  }
#define DEFINE_CLAMPED_BINARY(name, type, exact) \
  static void name(wave_t *w, const instruction_t *i) { \
    lanes32_t x, y; \
    read32(w, i, 0, &x); \
    read32(w, i, 1, &y); \
    FOR_LANES(l) { \
      const type a = (type)x.lane[l], b = (type)y.lane[l]; \
      const int64_t d = exact; \
      x.lane[l] = i->clamp ? clamped_##type(d) : (uint32_t)d; \
    } \
    write32(w, i, &x); \
  }
#define DEFINE_CLAMPED_TERNARY_(name, type, exact, read) \
  static void name(wave_t *w, const instruction_t *i) { \
    lanes32_t x, y, z; \
    read(w, i, 0, &x); \
    read(w, i, 1, &y); \
    read32(w, i, 2, &z); \
    FOR_LANES(l) { \
      const type a = (type)x.lane[l], b = (type)y.lane[l], c = (type)z.lane[l]; \
      const int64_t d = exact; \
      x.lane[l] = i->clamp ? clamped_##type(d) : (uint32_t)d; \
    } \
    write32(w, i, &x); \
  }
#define DEFINE_CLAMPED_TERNARY(name, type, exact) DEFINE_CLAMPED_TERNARY_(name, type, exact, read32)
#define DEFINE_CLAMPED_HALVES(name, type, exact) DEFINE_CLAMPED_TERNARY_(name, type, exact, read16)
UNARY(DEFINE_UNARY)
BINARY(DEFINE_BINARY)
TERNARY(DEFINE_TERNARY)
CLAMPED_BINARY(DEFINE_CLAMPED_BINARY)
CLAMPED_TERNARY(DEFINE_CLAMPED_TERNARY)
CLAMPED_HALVES(DEFINE_CLAMPED_HALVES)

// ---- operations with a carry: name, exact result with the carry-in `c` (0 or 1). The carry-out is bit 32 of
// it.
#define CARRYING(X) \
  X(v_add_co_u32, (int64_t)a + b) \
  X(v_sub_co_u32, (int64_t)a - b) \
  X(v_subrev_co_u32, (int64_t)b - a) \
  X(v_addc_co_u32, (int64_t)a + b + c) \
  X(v_subb_co_u32, (int64_t)a - b - c) \
  X(v_subbrev_co_u32, (int64_t)b - a - c)
#define DEFINE_CARRYING(name, exact) \
  static void name(wave_t *w, const instruction_t *i) { \
    lanes32_t x, y; \
    const uint64_t carry = read_mask(w, &i->operand[SRC2]); \
    read32(w, i, 0, &x); \
    read32(w, i, 1, &y); \
    FOR_LANES(l) { \
      const uint32_t a = x.lane[l], b = y.lane[l], c = carry >> l & 1; \
      const int64_t d = exact; \
      (void)c; \
      x.lane[l] = i->clamp ? clamped_uint32_t(d) : (uint32_t)d; \
      y.lane[l] = d >> 32 & 1; \
    } \
    write32(w, i, &x); \
    write_carry(w, &i->operand[DST2], odd_lanes(&y)); \
  }
CARRYING(DEFINE_CARRYING)

// Exchanges two registers in the active lanes, including whether they are defined.
static void v_swap_b32(wave_t *w, const instruction_t *i) {
  const unsigned a = i->operand[DST].index, b = i->operand[SRC0].index;
  const uint64_t lanes = w->write_lanes, changes = (w->v_defined[a] ^ w->v_defined[b]) & lanes;
  FOR_LANES(l) {
    const uint32_t x = w->v[a][l], y = w->v[b][l];
    w->v[a][l] = has_lane(lanes, l) ? y : x;
    w->v[b][l] = has_lane(lanes, l) ? x : y;
  }
  w->v_defined[a] ^= changes;
  w->v_defined[b] ^= changes;
}

OPERATIONS(vector_integer) = {
  UNARY(ROW)
  BINARY(ROW)
  TERNARY(ROW)
  CLAMPED_BINARY(ROW)
  CLAMPED_TERNARY(ROW)
  CLAMPED_HALVES(ROW)
  CARRYING(ROW)
  {"v_swap_b32", v_swap_b32},
  {NULL, NULL},
};
