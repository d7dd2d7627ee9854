// Vector operations on f32.
#include "division.h"
#include "floating.h"

// Each row: an operation, and its result from the values a, b, c of sources 0, 1, 2; `ieee` is the result of
// is_ieee.
#define UNARY(X) \
  X(v_rcp_f32, reciprocal(a)) \
  X(v_rcp_iflag_f32, reciprocal(a)) \
  X(v_rsq_f32, reciprocal_root(a)) \
  X(v_sqrt_f32, root_of(a)) \
  X(v_exp_f32, exp2_of(a)) \
  X(v_log_f32, log2_of(a)) \
  X(v_sin_f32, is_past_range(w, a) ? 0 : sine_of_turns(a)) \
  X(v_cos_f32, is_past_range(w, a) ? 1 : cosine_of_turns(a)) \
  X(v_trunc_f32, truncf(a)) \
  X(v_ceil_f32, ceilf(a)) \
  X(v_floor_f32, floorf(a)) \
  X(v_rndne_f32, rintf(a)) \
  X(v_fract_f32, fract_f32(a)) \
  X(v_frexp_mant_f32, frexpf(a, &(int){0}))

#define BINARY(X) \
  X(v_add_f32, a + b) \
  X(v_sub_f32, a - b) \
  X(v_subrev_f32, b - a) \
  X(v_mul_f32, a * b) \
  X(v_mul_legacy_f32, multiply_legacy(a, b)) \
  X(v_max_f32, max_f32(a, b, ieee)) \
  X(v_min_f32, min_f32(a, b, ieee)) \
  X(v_maximum_f32, maximum_f32(a, b)) \
  X(v_minimum_f32, minimum_f32(a, b))

#define TERNARY(X) \
  X(v_fma_f32, fmaf(a, b, c)) \
  X(v_mad_f32, mad_f32(a, b, c)) \
  X(v_fma_legacy_f32, (a == 0) | (b == 0) ? 0 + c : fmaf(a, b, c)) \
  X(v_max3_f32, max_f32(max_f32(a, b, ieee), c, ieee)) \
  X(v_min3_f32, min_f32(min_f32(a, b, ieee), c, ieee)) \
  X(v_med3_f32, median_f32(a, b, c, ieee)) \
  X(v_maxmin_f32, min_f32(max_f32(a, b, ieee), c, ieee)) \
  X(v_minmax_f32, max_f32(min_f32(a, b, ieee), c, ieee)) \
  X(v_maximum3_f32, maximum_f32(maximum_f32(a, b), c)) \
  X(v_minimum3_f32, minimum_f32(minimum_f32(a, b), c)) \
  X(v_maximumminimum_f32, minimum_f32(maximum_f32(a, b), c)) \
  X(v_minimummaximum_f32, maximum_f32(minimum_f32(a, b), c)) \
  X(v_div_fixup_f32, div_fixup_f32(a, b, c))

// 0 times anything is 0, as in DirectX 9.
static inline float multiply_legacy(float a, float b) { return (a == 0) | (b == 0) ? 0 : a * b; }

// The product is rounded, and denormals are flushed whatever the mode (Vega ISA, V_MAD_F32; CDNA 3 lacks it).
static inline float mad_f32(float a, float b, float c) {
  const float product = without_denormal(without_denormal(a) * without_denormal(b));
  return without_denormal(product + without_denormal(c));
}

#define DEFINE(name, num_sources, expression) \
  DEFINE_FLOATING(name, num_sources, float, lanes_f32_t, read_f32, write_f32(w, i, &d), expression)
UNARY(DEFINE_UNARY)
BINARY(DEFINE_BINARY)
TERNARY(DEFINE_TERNARY)

static void v_ldexp_f32(wave_t *w, const instruction_t *i) {
  lanes_f32_t x, d;
  lanes32_t exponent;
  read_f32(w, i, 0, &x);
  read32(w, i, 1, &exponent);
  FOR_LANES(l) d.lane[l] = scale_f32(x.lane[l], (int32_t)exponent.lane[l]);
  write_f32(w, i, &d);
}

DEFINE_FREXP_EXP(v_frexp_exp_i32_f32, lanes_f32_t, read_f32, write32(w, i, &d))
DEFINE_DIVISION_STEPS(f32)

OPERATIONS(vector_float) = {
  UNARY(ROW)
  BINARY(ROW)
  TERNARY(ROW)
  ROW(v_ldexp_f32)
  ROW(v_frexp_exp_i32_f32)
  ROW(v_div_scale_f32)
  ROW(v_div_fmas_f32)
  {NULL, NULL},
};
