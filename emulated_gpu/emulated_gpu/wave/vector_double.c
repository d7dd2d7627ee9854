// Vector operations on f64.
#include "division.h"
#include "floating.h"

// Each row: an operation, and its result from the values a, b, c of sources 0, 1, 2; `ieee` is the result of
// is_ieee. Reciprocals and roots are correctly rounded here. In hardware they are approximate, and compilers
// refine them.
#define UNARY(X) \
  X(v_rcp_f64, 1 / a) \
  X(v_rsq_f64, 1 / sqrt(a)) \
  X(v_sqrt_f64, sqrt(a)) \
  X(v_trunc_f64, trunc(a)) \
  X(v_ceil_f64, ceil(a)) \
  X(v_floor_f64, floor(a)) \
  X(v_rndne_f64, rint(a)) \
  X(v_fract_f64, fract_f64(a)) \
  X(v_frexp_mant_f64, frexp(a, &(int){0}))

#define BINARY(X) \
  X(v_add_f64, a + b) \
  X(v_mul_f64, a * b) \
  X(v_max_f64, max_f64(a, b, ieee)) \
  X(v_min_f64, min_f64(a, b, ieee)) \
  X(v_maximum_f64, maximum_f64(a, b)) \
  X(v_minimum_f64, minimum_f64(a, b))

#define TERNARY(X) \
  X(v_fma_f64, fma(a, b, c)) \
  X(v_div_fixup_f64, div_fixup_f64(a, b, c))

#define DEFINE(name, num_sources, expression) \
  DEFINE_FLOATING(name, num_sources, double, lanes_f64_t, read_f64, write_f64(w, i, &d), expression)
UNARY(DEFINE_UNARY)
BINARY(DEFINE_BINARY)
TERNARY(DEFINE_TERNARY)

static void v_ldexp_f64(wave_t *w, const instruction_t *i) {
  lanes_f64_t x, d;
  lanes32_t exponent;
  read_f64(w, i, 0, &x);
  read32(w, i, 1, &exponent);
  FOR_LANES(l) d.lane[l] = ldexp(x.lane[l], (int32_t)exponent.lane[l]);
  write_f64(w, i, &d);
}

DEFINE_FREXP_EXP(v_frexp_exp_i32_f64, lanes_f64_t, read_f64, write32(w, i, &d))
DEFINE_DIVISION_STEPS(f64)

OPERATIONS(vector_double) = {
  UNARY(ROW)
  BINARY(ROW)
  TERNARY(ROW)
  ROW(v_ldexp_f64)
  ROW(v_frexp_exp_i32_f64)
  ROW(v_div_scale_f64)
  ROW(v_div_fmas_f64)
  {NULL, NULL},
};
