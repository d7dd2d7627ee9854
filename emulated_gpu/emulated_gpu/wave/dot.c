// Dot products of packed elements, added to source 2.
#include "floating.h"
#include "small_floats.h"

// The lower and upper elements of a source, as f32. Their products are exact in f32, so each sum rounds once.
typedef struct { lanes_f32_t low, high; } pairs_t;
static void read_pairs(wave_t *w, const instruction_t *i, int n, float (*value)(uint32_t), pairs_t *out) {
  const int low = i->opsel >> n & 1 ? 16 : 0, high = i->opsel_hi >> n & 1 ? 16 : 0;
  const uint32_t low_sign = i->neg >> n & 1 ? 0x8000 : 0, high_sign = i->neg_hi >> n & 1 ? 0x8000 : 0;
  const uint32_t mask = i->abs >> n & 1 ? 0x7fff : 0xffff;
  lanes32_t x;
  read32(w, i, n, &x);
  FOR_LANES(l) {
    out->low.lane[l] = value((x.lane[l] >> low & mask) ^ low_sign);
    out->high.lane[l] = value((x.lane[l] >> high & mask) ^ high_sign);
  }
}
static float f16_value(uint32_t x) { return f16_to_f32(x); }
static float bf16_value(uint32_t x) { return bf16_to_f32(x); }

// By the manuals, CDNA adds source 2 after the products for bf16 and before them for f16, and RDNA always
// before them.
static inline float dot2(float a0, float b0, float a1, float b1, float c, bool adds_last) {
  return adds_last ? fmaf(a1, b1, a0 * b0) + c : fmaf(a1, b1, fmaf(a0, b0, c));
}
static void dot2_f32(wave_t *w, const instruction_t *i, float (*value)(uint32_t), bool adds_last) {
  pairs_t x, y;
  lanes_f32_t z, d;
  read_pairs(w, i, 0, value, &x);
  read_pairs(w, i, 1, value, &y);
  read_f32(w, i, 2, &z);
  FOR_LANES(l)
    d.lane[l] = dot2(x.low.lane[l], y.low.lane[l], x.high.lane[l], y.high.lane[l], z.lane[l], adds_last);
  write_f32(w, i, &d);
}
static void v_dot2_f32_f16(wave_t *w, const instruction_t *i) { dot2_f32(w, i, f16_value, false); }
static void v_dot2_f32_bf16(wave_t *w, const instruction_t *i) {
  dot2_f32(w, i, bf16_value, w->group->kernel->header.generation == 9);
}

// RDNA's dot products with an f16 or bf16 sum, which is rounded after each product. Their format is VOP3
// instead of VOP3P: opsel only selects a half of source 2 and of the result, and neg applies to both halves
// of a source.
static instruction_t of_both_halves(const instruction_t *i) {
  instruction_t whole = *i;
  whole.opsel = 0;
  whole.opsel_hi = 3;
  whole.neg_hi = i->neg;
  return whole;
}
static void v_dot2_f16_f16(wave_t *w, const instruction_t *i) {
  const instruction_t whole = of_both_halves(i);
  pairs_t x, y;
  lanes_f32_t z, d;
  read_pairs(w, &whole, 0, f16_value, &x);
  read_pairs(w, &whole, 1, f16_value, &y);
  read_f16(w, i, 2, &z);
  FOR_LANES(l) {
    const float first = f16_to_f32(f32_to_f16(fma_f16(x.low.lane[l], y.low.lane[l], z.lane[l])));
    d.lane[l] = fma_f16(x.high.lane[l], y.high.lane[l], first);
  }
  write_f16(w, i, &d, false);
}
static void v_dot2_bf16_bf16(wave_t *w, const instruction_t *i) {
  const instruction_t whole = of_both_halves(i);
  const uint32_t sign = (uint32_t)(i->neg >> 2 & 1) << 15, mask = i->abs >> 2 & 1 ? 0x7fff : 0xffff;
  pairs_t x, y;
  lanes32_t z;
  read_pairs(w, &whole, 0, bf16_value, &x);
  read_pairs(w, &whole, 1, bf16_value, &y);
  read16(w, i, 2, &z);
  FOR_LANES(l) {
    const float c = bf16_to_f32((z.lane[l] & mask) ^ sign), first = fmaf(x.low.lane[l], y.low.lane[l], c);
    z.lane[l] = f32_to_bf16(fmaf(x.high.lane[l], y.high.lane[l], bf16_to_f32(f32_to_bf16(first))));
  }
  write16(w, i, &z, false);
}

// Each row: a dot product of integers, their bits, and whether source 0, source 1 and the sum are signed. In
// the iu forms, the instruction's neg bits tell which sources are signed.
#define INTEGERS(X) \
  X(v_dot2_i32_i16, 16, true, true, true) \
  X(v_dot2_u32_u16, 16, false, false, false) \
  X(v_dot4_i32_i8, 8, true, true, true) \
  X(v_dot4_u32_u8, 8, false, false, false) \
  X(v_dot8_i32_i4, 4, true, true, true) \
  X(v_dot8_u32_u4, 4, false, false, false) \
  X(v_dot4_i32_iu8, 8, i->neg & 1, i->neg >> 1 & 1, true) \
  X(v_dot8_i32_iu4, 4, i->neg & 1, i->neg >> 1 & 1, true)

static inline int64_t element(uint32_t x, int number, int bits, bool is_signed) {
  const uint32_t above = x << (32 - bits * (number + 1));
  return is_signed ? (int32_t)above >> (32 - bits) : (int64_t)(above >> (32 - bits));
}
static inline int64_t clamped(const instruction_t *i, int64_t x, bool is_signed) {
  const int64_t least = is_signed ? INT32_MIN : 0, most = is_signed ? INT32_MAX : UINT32_MAX;
  return !i->clamp ? x : x < least ? least : x > most ? most : x;
}
// Reads the 16-bit halves that opsel and opsel_hi select; smaller elements are always read in order.
static void read_elements(wave_t *w, const instruction_t *i, int n, int bits, lanes32_t *out) {
  const int low = i->opsel >> n & 1 ? 16 : 0, high = i->opsel_hi >> n & 1 ? 16 : 0;
  read32(w, i, n, out);
  if (bits == 16) FOR_LANES(l) out->lane[l] = (out->lane[l] >> low & 0xffff) | out->lane[l] >> high << 16;
}
#define DEFINE_INTEGERS(name, bits, signed0, signed1, signed_sum) \
  static void name(wave_t *w, const instruction_t *i) { \
    lanes32_t x, y, z; \
    read_elements(w, i, 0, bits, &x); \
    read_elements(w, i, 1, bits, &y); \
    read32(w, i, 2, &z); \
    FOR_LANES(l) { \
      int64_t sum = signed_sum ? (int32_t)z.lane[l] : (int64_t)z.lane[l]; \
      for (int n = 0; n < 32 / bits; n++) \
        sum += element(x.lane[l], n, bits, signed0) * element(y.lane[l], n, bits, signed1); \
      z.lane[l] = (uint32_t)clamped(i, sum, signed_sum); \
    } \
    write32(w, i, &z); \
  }
INTEGERS(DEFINE_INTEGERS)

// RDNA 4: dot products of four 8-bit floats.
#define FLOATS(X) \
  X(v_dot4_f32_fp8_fp8, fp8_to_f32, fp8_to_f32) \
  X(v_dot4_f32_fp8_bf8, fp8_to_f32, bf8_to_f32) \
  X(v_dot4_f32_bf8_fp8, bf8_to_f32, fp8_to_f32) \
  X(v_dot4_f32_bf8_bf8, bf8_to_f32, bf8_to_f32)

#define DEFINE_FLOATS(name, value0, value1) \
  static void name(wave_t *w, const instruction_t *i) { \
    lanes32_t x, y; \
    lanes_f32_t z; \
    read32(w, i, 0, &x); \
    read32(w, i, 1, &y); \
    read_f32(w, i, 2, &z); \
    FOR_LANES(l) \
      for (int n = 0; n < 4; n++) \
        z.lane[l] = fmaf(value0(x.lane[l] >> 8 * n & 255), value1(y.lane[l] >> 8 * n & 255), z.lane[l]); \
    write_f32(w, i, &z); \
  }
FLOATS(DEFINE_FLOATS)

OPERATIONS(dot) = {
  ROW(v_dot2_f32_f16)
  ROW(v_dot2_f32_bf16)
  ROW(v_dot2_f16_f16)
  ROW(v_dot2_bf16_bf16)
  INTEGERS(ROW)
  FLOATS(ROW)
  {NULL, NULL},
};
