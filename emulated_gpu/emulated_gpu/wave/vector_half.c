// Vector operations on f16, and the fused multiply-adds that mix f16 and f32.
//
// Values are converted to f32 for the computation. Rounding the f32 result to f16 is as exact as rounding
// once, as f32 has more than twice as many bits.
#include "division.h"
#include "floating.h"

// Each row: an operation, and its result from the values a, b, c of sources 0, 1, 2; `ieee` is the result of
// is_ieee.
#define UNARY(X) \
  X(v_rcp_f16, 1 / a) \
  X(v_rsq_f16, (float)(1 / sqrt((double)a))) \
  X(v_sqrt_f16, sqrtf(a)) \
  X(v_exp_f16, (float)exp2((double)a)) \
  X(v_log_f16, (float)log2((double)a)) \
  X(v_sin_f16, is_past_range(w, a) ? 0 : sine_of_turns(a)) \
  X(v_cos_f16, is_past_range(w, a) ? 1 : cosine_of_turns(a)) \
  X(v_trunc_f16, truncf(a)) \
  X(v_ceil_f16, ceilf(a)) \
  X(v_floor_f16, floorf(a)) \
  X(v_rndne_f16, rintf(a)) \
  X(v_fract_f16, fract_f16(a)) \
  X(v_frexp_mant_f16, frexpf(a, &(int){0}))

#define BINARY(X) \
  X(v_add_f16, a + b) \
  X(v_sub_f16, a - b) \
  X(v_subrev_f16, b - a) \
  X(v_mul_f16, a * b) \
  X(v_max_f16, max_f32(a, b, ieee)) \
  X(v_min_f16, min_f32(a, b, ieee)) \
  X(v_maximum_f16, maximum_f32(a, b)) \
  X(v_minimum_f16, minimum_f32(a, b))

#define TERNARY(X) \
  X(v_fma_f16, fma_f16(a, b, c)) \
  X(v_max3_f16, max_f32(max_f32(a, b, ieee), c, ieee)) \
  X(v_min3_f16, min_f32(min_f32(a, b, ieee), c, ieee)) \
  X(v_med3_f16, median_f32(a, b, c, ieee)) \
  X(v_maxmin_f16, min_f32(max_f32(a, b, ieee), c, ieee)) \
  X(v_minmax_f16, max_f32(min_f32(a, b, ieee), c, ieee)) \
  X(v_maximum3_f16, maximum_f32(maximum_f32(a, b), c)) \
  X(v_minimum3_f16, minimum_f32(minimum_f32(a, b), c)) \
  X(v_maximumminimum_f16, minimum_f32(maximum_f32(a, b), c)) \
  X(v_minimummaximum_f16, maximum_f32(minimum_f32(a, b), c)) \
  X(v_div_fixup_f16, div_fixup_f16(a, b, c))

static inline float fract_f16(float a) {
  const float fraction = a - floorf(a);
  return fraction > 0x1.ffcp-1f ? 0x1.ffcp-1f : fraction;
}

// Operations with three sources, which GFX9 introduced or changed, keep the other half of the destination.
#define DEFINE(name, num_sources, expression) \
  DEFINE_FLOATING(name, num_sources, float, lanes_f32_t, read_f16, write_f16(w, i, &d, num_sources < 3), expression)
UNARY(DEFINE_UNARY)
BINARY(DEFINE_BINARY)
TERNARY(DEFINE_TERNARY)

static void v_ldexp_f16(wave_t *w, const instruction_t *i) {
  lanes_f32_t x, d;
  lanes32_t exponent;
  read_f16(w, i, 0, &x);
  read16(w, i, 1, &exponent);
  FOR_LANES(l) d.lane[l] = scale_f32(x.lane[l], (int16_t)exponent.lane[l]);
  write_f16(w, i, &d, true);
}

DEFINE_FREXP_EXP(v_frexp_exp_i16_f16, lanes_f32_t, read_f16, write16(w, i, &d, true))

// Reads source `n`: an f16 in the half that opsel selects if the bit of opsel_hi is set, else an f32. CDNA's
// v_mad_mix does not round the product either: on GFX9.4, LLVM treats this opcode as a fused multiply-add.
static void read_mixed(wave_t *w, const instruction_t *i, int n, lanes_f32_t *out) {
  if (i->opsel_hi >> n & 1) read_f16(w, i, n, out);
  else read_f32(w, i, n, out);
}
static void mix(wave_t *w, const instruction_t *i, lanes_f32_t *d) {
  lanes_f32_t x, y, z;
  read_mixed(w, i, 0, &x);
  read_mixed(w, i, 1, &y);
  read_mixed(w, i, 2, &z);
  FOR_LANES(l) d->lane[l] = fmaf(x.lane[l], y.lane[l], z.lane[l]);
}
static void v_fma_mix_f32(wave_t *w, const instruction_t *i) {
  lanes_f32_t d;
  mix(w, i, &d);
  write_f32(w, i, &d);
}
// The f32 result is then rounded to f16. The operation, not bit 3 of opsel, selects the half of the
// destination.
static void write_mixed(wave_t *w, const instruction_t *i, bool is_high) {
  instruction_t half = *i;
  lanes_f32_t d;
  mix(w, i, &d);
  half.opsel = is_high ? 8 : 0;
  write_f16(w, &half, &d, false);
}
static void v_fma_mixlo_f16(wave_t *w, const instruction_t *i) { write_mixed(w, i, false); }
static void v_fma_mixhi_f16(wave_t *w, const instruction_t *i) { write_mixed(w, i, true); }

OPERATIONS(vector_half) = {
  UNARY(ROW)
  BINARY(ROW)
  TERNARY(ROW)
  ROW(v_ldexp_f16)
  ROW(v_frexp_exp_i16_f16)
  ROW(v_fma_mix_f32)
  ROW(v_fma_mixlo_f16)
  ROW(v_fma_mixhi_f16)
  {"v_mad_mix_f32", v_fma_mix_f32},
  {"v_mad_mixlo_f16", v_fma_mixlo_f16},
  {"v_mad_mixhi_f16", v_fma_mixhi_f16},
  {NULL, NULL},
};
