// Vector operations on 16-bit integers.
#include "wave.h"

// Each row: an operation, its number of sources, whether it clears the other half of the destination on CDNA,
// and its exact result from sources a, b and c. The result wraps, or is clamped if the instruction's clamp
// bit is set. Signed and unsigned operations differ in the extension of sources and the range of clamping.
#define UNSIGNED(X) \
  X(v_add_u16, 2, true, a + b) \
  X(v_sub_u16, 2, true, a - b) \
  X(v_subrev_u16, 2, true, b - a) \
  X(v_mul_lo_u16, 2, true, a * b) \
  X(v_max_u16, 2, true, a > b ? a : b) \
  X(v_min_u16, 2, true, a < b ? a : b) \
  X(v_lshlrev_b16, 2, true, (b << (a & 15)) & 0xffff) \
  X(v_lshrrev_b16, 2, true, b >> (a & 15)) \
  X(v_and_b16, 2, false, a & b) \
  X(v_or_b16, 2, false, a | b) \
  X(v_xor_b16, 2, false, a ^ b) \
  X(v_mov_b16, 1, false, a) \
  X(v_not_b16, 1, false, a ^ 0xffff) \
  X(v_mad_u16, 3, false, a * b + c) \
  X(v_max3_u16, 3, false, largest(a, b, c)) \
  X(v_min3_u16, 3, false, -largest(-a, -b, -c)) \
  X(v_med3_u16, 3, false, middle(a, b, c)) \
  X(v_bitop3_b16, 3, false, by_table(i->cbsz, a, b, c))

#define SIGNED(X) \
  X(v_add_i16, 2, false, a + b) \
  X(v_sub_i16, 2, false, a - b) \
  X(v_max_i16, 2, true, a > b ? a : b) \
  X(v_min_i16, 2, true, a < b ? a : b) \
  X(v_ashrrev_i16, 2, true, b >> (a & 15)) \
  X(v_mad_i16, 3, false, a * b + c) \
  X(v_max3_i16, 3, false, largest(a, b, c)) \
  X(v_min3_i16, 3, false, -largest(-a, -b, -c)) \
  X(v_med3_i16, 3, false, middle(a, b, c))

static inline int64_t largest(int64_t a, int64_t b, int64_t c) {
  const int64_t larger = a > b ? a : b;
  return larger > c ? larger : c;
}
static inline int64_t middle(int64_t a, int64_t b, int64_t c) {
  return a + b + c - largest(a, b, c) + largest(-a, -b, -c);
}

// CDNA 4's v_bitop3. For each bit of the sources: bit number 4a + 2b + c of `table`.
static inline int64_t by_table(unsigned table, int64_t a, int64_t b, int64_t c) {
  int64_t d = 0;
  for (unsigned n = 0; n < 8; n++)
    if (table >> n & 1) d |= (n & 4 ? a : ~a) & (n & 2 ? b : ~b) & (n & 1 ? c : ~c);
  return d;
}

static inline int64_t clamped(const instruction_t *i, int64_t x, int64_t least, int64_t most) {
  return !i->clamp ? x : x < least ? least : x > most ? most : x;
}

#define DEFINE(name, num_sources, zeroes_high, integer, least, most, expression) \
  static void name(wave_t *w, const instruction_t *i) { \
    lanes32_t x, y = {{0}}, z = {{0}}; \
    read16(w, i, 0, &x); \
    if (num_sources > 1) read16(w, i, 1, &y); \
    if (num_sources > 2) read16(w, i, 2, &z); \
    FOR_LANES(l) { \
      const int64_t a = (integer)x.lane[l], b = (integer)y.lane[l], c = (integer)z.lane[l]; \
      x.lane[l] = (uint32_t)clamped(i, (expression), least, most); \
      (void)b, (void)c; \
    } \
    write16(w, i, &x, zeroes_high); \
  }
#define DEFINE_UNSIGNED(name, n, zeroes_high, expression) \
  DEFINE(name, n, zeroes_high, uint16_t, 0, 0xffff, expression)
#define DEFINE_SIGNED(name, n, zeroes_high, expression) \
  DEFINE(name, n, zeroes_high, int16_t, -0x8000, 0x7fff, expression)
UNSIGNED(DEFINE_UNSIGNED)
SIGNED(DEFINE_SIGNED)

// Exchanges two halves: `dst` gets source 0, and `dst2` gets source 1, which is the old value of `dst`.
static void v_swap_b16(wave_t *w, const instruction_t *i) {
  instruction_t back = *i;
  lanes32_t x, y;
  back.opsel = (uint8_t)(i->opsel >> 3 & 1);
  back.operand[SRC0] = i->operand[SRC1];
  read16(w, i, 0, &x);
  read16(w, &back, 0, &y);
  write16(w, i, &x, false);
  back.opsel = (uint8_t)(i->opsel << 3 & 8);
  back.operand[DST] = i->operand[DST2];
  write16(w, &back, &y, false);
}

OPERATIONS(vector_integer16) = {
  UNSIGNED(ROW)
  SIGNED(ROW)
  ROW(v_swap_b16)
  {NULL, NULL},
};
