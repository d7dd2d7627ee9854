// Packed operations, which compute the same on both 16-bit halves of 32 bits, or on both 32-bit words of 64
// bits.
#include "floating.h"

// A packed source: the half that the lower result uses (selected by opsel) and the half that the upper result
// uses (selected by opsel_hi).
typedef struct { lanes32_t low, high; } halves_t;

// Reads halves of 16 bits. A constant has its value in the lower half.
static void read_halves(wave_t *w, const instruction_t *i, int n, halves_t *out) {
  const int low = i->opsel >> n & 1 ? 16 : 0, high = i->opsel_hi >> n & 1 ? 16 : 0;
  lanes32_t x;
  read32(w, i, n, &x);
  FOR_LANES(l) {
    out->low.lane[l] = x.lane[l] >> low & 0xffff;
    out->high.lane[l] = x.lane[l] >> high & 0xffff;
  }
}
static void read_halves_f16(wave_t *w, const instruction_t *i, int n, halves_t *out) {
  const uint32_t low = (uint32_t)(i->neg >> n & 1) << 15, high = (uint32_t)(i->neg_hi >> n & 1) << 15;
  read_halves(w, i, n, out);
  FOR_LANES(l) {
    out->low.lane[l] ^= low;
    out->high.lane[l] ^= high;
  }
  if (w->mode & KEEPS_F16_F64_INPUT) return;
  FOR_LANES(l) {
    out->low.lane[l] = flush_f16(out->low.lane[l]);
    out->high.lane[l] = flush_f16(out->high.lane[l]);
  }
}
static void write_halves(wave_t *w, const instruction_t *i, const halves_t *x) {
  lanes32_t d;
  FOR_LANES(l) d.lane[l] = (x->low.lane[l] & 0xffff) | x->high.lane[l] << 16;
  write32(w, i, &d);
}

// ---- f16; a, b, c are the values of a half
#define HALVES(X) \
  X(v_pk_add_f16, 2, a + b) \
  X(v_pk_mul_f16, 2, a * b) \
  X(v_pk_max_f16, 2, max_f32(a, b, ieee)) \
  X(v_pk_min_f16, 2, min_f32(a, b, ieee)) \
  X(v_pk_maximum_f16, 2, maximum_f32(a, b)) \
  X(v_pk_minimum_f16, 2, minimum_f32(a, b)) \
  X(v_pk_fma_f16, 3, fma_f16(a, b, c)) \
  X(v_pk_maximum3_f16, 3, maximum_f32(maximum_f32(a, b), c)) \
  X(v_pk_minimum3_f16, 3, minimum_f32(minimum_f32(a, b), c))

static inline uint32_t half_result(const wave_t *w, const instruction_t *i, float x) {
  const uint32_t d = f32_to_f16(i->clamp ? clamp_f32(x) : x);
  return w->mode & KEEPS_F16_F64_OUTPUT ? d : flush_f16(d);
}
#define DEFINE_HALVES(name, num_sources, expression) \
  static inline float one_##name(uint32_t x, uint32_t y, uint32_t z, bool ieee) { \
    const float a = f16_to_f32(x), b = f16_to_f32(y), c = f16_to_f32(z); \
    (void)c, (void)ieee; \
    return (expression); \
  } \
  static void name(wave_t *w, const instruction_t *i) { \
    const bool ieee = is_ieee(w); \
    halves_t x, y, z = {0}, d; \
    read_halves_f16(w, i, 0, &x); \
    read_halves_f16(w, i, 1, &y); \
    if (num_sources > 2) read_halves_f16(w, i, 2, &z); \
    FOR_LANES(l) { \
      const float low = one_##name(x.low.lane[l], y.low.lane[l], z.low.lane[l], ieee); \
      const float high = one_##name(x.high.lane[l], y.high.lane[l], z.high.lane[l], ieee); \
      d.low.lane[l] = half_result(w, i, low); \
      d.high.lane[l] = half_result(w, i, high); \
    } \
    write_halves(w, i, &d); \
  }
HALVES(DEFINE_HALVES)

// ---- 16-bit integers; a, b, c are sign- or zero-extended halves, results wrap or are clamped
#define UNSIGNED(X) \
  X(v_pk_add_u16, a + b) \
  X(v_pk_sub_u16, a - b) \
  X(v_pk_mul_lo_u16, a * b) \
  X(v_pk_mad_u16, a * b + c) \
  X(v_pk_max_u16, a > b ? a : b) \
  X(v_pk_min_u16, a < b ? a : b) \
  X(v_pk_lshlrev_b16, (b << (a & 15)) & 0xffff) \
  X(v_pk_lshrrev_b16, b >> (a & 15))

#define SIGNED(X) \
  X(v_pk_add_i16, a + b) \
  X(v_pk_sub_i16, a - b) \
  X(v_pk_mad_i16, a * b + c) \
  X(v_pk_max_i16, a > b ? a : b) \
  X(v_pk_min_i16, a < b ? a : b) \
  X(v_pk_ashrrev_i16, b >> (a & 15))

static inline uint32_t clamped(const instruction_t *i, int64_t x, int64_t least, int64_t most) {
  return (uint32_t)(!i->clamp ? x : x < least ? least : x > most ? most : x);
}
#define DEFINE_INTEGERS(name, integer, least, most, expression) \
  static inline int64_t one_##name(uint32_t x, uint32_t y, uint32_t z) { \
    const int64_t a = (integer)x, b = (integer)y, c = (integer)z; \
    (void)c; \
    return (expression); \
  } \
  static void name(wave_t *w, const instruction_t *i) { \
    halves_t x, y, z; \
    read_halves(w, i, 0, &x); \
    read_halves(w, i, 1, &y); \
    read_halves(w, i, 2, &z); \
    FOR_LANES(l) { \
      const int64_t low = one_##name(x.low.lane[l], y.low.lane[l], z.low.lane[l]); \
      const int64_t high = one_##name(x.high.lane[l], y.high.lane[l], z.high.lane[l]); \
      x.low.lane[l] = clamped(i, low, least, most); \
      x.high.lane[l] = clamped(i, high, least, most); \
    } \
    write_halves(w, i, &x); \
  }
#define DEFINE_UNSIGNED(name, expression) DEFINE_INTEGERS(name, uint16_t, 0, 0xffff, expression)
#define DEFINE_SIGNED(name, expression) DEFINE_INTEGERS(name, int16_t, -0x8000, 0x7fff, expression)
UNSIGNED(DEFINE_UNSIGNED)
SIGNED(DEFINE_SIGNED)

// Packs the f16 of both sources into one register; only abs, neg and flushing of denormals change them.
static void v_pack_b32_f16(wave_t *w, const instruction_t *i) {
  halves_t d;
  read_f16_bits(w, i, 0, &d.low);
  read_f16_bits(w, i, 1, &d.high);
  write_halves(w, i, &d);
}

// ---- words of 64 bits
// Reads the word of source `n` that the lower or the upper result uses. The other word may be undefined.
static void read_word(wave_t *w, const instruction_t *i, int n, bool is_high, lanes32_t *out) {
  const operand_t *o = &i->operand[SRC0 + n];
  const unsigned part = (is_high ? i->opsel_hi : i->opsel) >> n & 1;
  operand_t word = *o;
  uint64_t defined;
  if (o->kind == SGPR) word = (operand_t){.kind = SGPR, .dwords = 1, .index = (uint16_t)(o->index + part)};
  read_register(w, &word, o->kind == SGPR ? 0 : part, out, &defined);
  w->undefined |= ~defined & exec_lanes(w);
}
static void read_word_f32(wave_t *w, const instruction_t *i, int n, bool is_high, lanes_f32_t *out) {
  const uint32_t sign = (uint32_t)((is_high ? i->neg_hi : i->neg) >> n & 1) << 31;
  lanes32_t x;
  read_word(w, i, n, is_high, &x);
  FOR_LANES(l) out->lane[l] = as_f32(x.lane[l] ^ sign);
  if (!(w->mode & KEEPS_F32_INPUT)) FOR_LANES(l) out->lane[l] = flush_f32(out->lane[l]);
}

// Both results must be computed before one is written, as the destination may also be a source.
typedef struct { lanes_f32_t value; uint64_t undefined; } word_t;
static void write_words(wave_t *w, const instruction_t *i, word_t word[2]) {
  for (unsigned part = 0; part < 2; part++) {
    instruction_t each = *i;
    each.operand[DST].index = (uint16_t)(i->operand[DST].index + part);
    w->undefined = word[part].undefined;
    write_f32(w, &each, &word[part].value);
  }
}

#define WORDS(X) \
  X(v_pk_add_f32, 2, a + b) \
  X(v_pk_mul_f32, 2, a * b) \
  X(v_pk_fma_f32, 3, fmaf(a, b, c))

#define DEFINE_WORDS(name, num_sources, expression) \
  static void name(wave_t *w, const instruction_t *i) { \
    word_t word[2]; \
    for (int part = 0; part < 2; part++) { \
      lanes_f32_t x, y, z; \
      w->undefined = 0; \
      read_word_f32(w, i, 0, part, &x); \
      read_word_f32(w, i, 1, part, &y); \
      if (num_sources > 2) read_word_f32(w, i, 2, part, &z); \
      FOR_LANES(l) { \
        const float a = x.lane[l], b = y.lane[l], c = num_sources > 2 ? z.lane[l] : 0; \
        word[part].value.lane[l] = (expression); \
        (void)c; \
      } \
      word[part].undefined = w->undefined; \
    } \
    write_words(w, i, word); \
  }
WORDS(DEFINE_WORDS)

// The result's lower word is a word of source 0, and its upper word is one of source 1; opsel selects them.
static void v_pk_mov_b32(wave_t *w, const instruction_t *i) {
  lanes32_t x[2];
  uint64_t undefined[2];
  for (int n = 0; n < 2; n++) {
    w->undefined = 0;
    read_word(w, i, n, false, &x[n]);
    undefined[n] = w->undefined;
  }
  for (unsigned part = 0; part < 2; part++) {
    w->undefined = undefined[part];
    write_register(w, i->operand[DST].index + part, x[part].lane);
  }
}

OPERATIONS(packed) = {
  HALVES(ROW)
  UNSIGNED(ROW)
  SIGNED(ROW)
  WORDS(ROW)
  ROW(v_pack_b32_f16)
  ROW(v_pk_mov_b32)
  {NULL, NULL},
};
