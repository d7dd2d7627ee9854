// Scalar floating-point operations of RDNA 4, and its transcendental functions with scalar results.
//
// Source: the RDNA 4 ISA manual. Results are correctly rounded. Transcendental functions have an error of up
// to 1 ulp in hardware; here they are computed in f64 and rounded.
#include "floating.h"

// ---- reading and writing
static float scalar_f32(wave_t *w, const instruction_t *i, int n) {
  const uint32_t x = read_scalar32(w, &i->operand[SRC0 + n]);
  const uint32_t magnitude = i->abs >> n & 1 ? x & 0x7fffffff : x;
  const float value = as_f32(magnitude ^ (uint32_t)(i->neg >> n & 1) << 31);
  return w->mode & KEEPS_F32_INPUT ? value : flush_f32(value);
}
static float scalar_f16(wave_t *w, const instruction_t *i, int n) {
  const uint32_t x = read_scalar32(w, &i->operand[SRC0 + n]);
  const uint32_t magnitude = i->abs >> n & 1 ? x & 0x7fff : x & 0xffff, bits = magnitude ^ (uint32_t)(i->neg >> n & 1) << 15;
  return f16_to_f32(w->mode & KEEPS_F16_F64_INPUT ? bits : flush_f16(bits));
}
static void write_scalar_f32(wave_t *w, const instruction_t *i, float x) {
  const float scaled = x * (float)omod_factor(w, i, KEEPS_F32_OUTPUT), value = i->clamp ? clamp_f32(scaled) : scaled;
  write_scalar32(w, &i->operand[DST], f32_bits(w->mode & KEEPS_F32_OUTPUT ? value : flush_f32(value)));
}
static uint32_t f64_to_f16(double x) {
  const _Float16 half = (_Float16)x;
  uint16_t bits;
  memcpy(&bits, &half, 2);
  return bits;
}
static void write_scalar_f16(wave_t *w, const instruction_t *i, double x) {  // sets the upper half to 0
  static const double factor[] = {1, 2, 4, 0.5};
  double y = x * factor[i->omod & 3];
  if (i->clamp) y = y > 0 ? (y < 1 ? y : 1) : 0;
  const uint32_t bits = f64_to_f16(y);
  write_scalar32(w, &i->operand[DST], w->mode & KEEPS_F16_F64_OUTPUT ? bits : flush_f16(bits));
}

// ---- minima and maxima, for which -0 is less than +0
static uint32_t quieted(float x) { return f32_bits(x) | 0x400000; }
static bool is_less(float a, float b) { return a < b || (a == b && signbit(a) && !signbit(b)); }
// If one operand is a NaN, the result is the other operand.
static float min_num(float a, float b) {
  if (isnan(a)) return isnan(b) ? as_f32(quieted(a)) : b;
  return isnan(b) || is_less(a, b) ? a : b;
}
static float max_num(float a, float b) {
  if (isnan(a)) return isnan(b) ? as_f32(quieted(a)) : b;
  return isnan(b) || is_less(b, a) ? a : b;
}
// Returns the NaN among a and b, made quiet. If both are NaN, a signalling one takes precedence over a quiet
// one.
static float nan_of(float a, float b) {
  const bool takes_b = !isnan(a) || (isnan(b) && f32_bits(a) & 0x400000 && !(f32_bits(b) & 0x400000));
  return as_f32(quieted(takes_b ? b : a));
}
static float minimum(float a, float b) { return isnan(a) || isnan(b) ? nan_of(a, b) : is_less(a, b) ? a : b; }
static float maximum(float a, float b) { return isnan(a) || isnan(b) ? nan_of(a, b) : is_less(b, a) ? a : b; }

// ---- conversions to integers: toward zero; NaN becomes 0, values out of range the nearest integer in range
static uint32_t to_u32(float x) { return !(x > 0) ? 0 : x >= 4294967296.0f ? UINT32_MAX : (uint32_t)x; }
static uint32_t to_i32(float x) {
  if (isnan(x)) return 0;
  return (uint32_t)(x >= 2147483648.0f ? INT32_MAX : x < -2147483648.0f ? INT32_MIN : (int32_t)x);
}
// Converts f32 to f16, rounded toward zero.
static uint32_t truncated_f16(float x) {
  const uint32_t bits = f32_to_f16(x);
  return fabsf(f16_to_f32(bits)) > fabsf(x) ? bits - 1 : bits;
}

// ---- operations: name, result from the sources `a` and `b`, which are f32
#define UNARY_F32(X) \
  X(s_ceil_f32, ceilf(a)) \
  X(s_floor_f32, floorf(a)) \
  X(s_trunc_f32, truncf(a)) \
  X(s_rndne_f32, rintf(a)) \
  X(v_s_exp_f32, exp2_of(a)) \
  X(v_s_log_f32, log2_of(a)) \
  X(v_s_rcp_f32, reciprocal(a)) \
  X(v_s_rsq_f32, reciprocal_root(a)) \
  X(v_s_sqrt_f32, root_of(a))
#define BINARY_F32(X) \
  X(s_add_f32, a + b) \
  X(s_sub_f32, a - b) \
  X(s_mul_f32, a * b) \
  X(s_min_f32, min_num(a, b)) \
  X(s_max_f32, max_num(a, b)) \
  X(s_minimum_f32, minimum(a, b)) \
  X(s_maximum_f32, maximum(a, b))
// The same, but `a` and `b` are f16 values, exact in f32. The result is f64 and rounded once to f16.
#define UNARY_F16(X) \
  X(s_ceil_f16, ceilf(a)) \
  X(s_floor_f16, floorf(a)) \
  X(s_trunc_f16, truncf(a)) \
  X(s_rndne_f16, rintf(a)) \
  X(v_s_exp_f16, exp2(a)) \
  X(v_s_log_f16, log2(a)) \
  X(v_s_rcp_f16, 1 / (double)a) \
  X(v_s_rsq_f16, 1 / sqrt(a)) \
  X(v_s_sqrt_f16, sqrt(a))
#define BINARY_F16(X) \
  X(s_add_f16, (double)a + b) \
  X(s_sub_f16, (double)a - b) \
  X(s_mul_f16, (double)a * b) \
  X(s_min_f16, min_num(a, b)) \
  X(s_max_f16, max_num(a, b)) \
  X(s_minimum_f16, minimum(a, b)) \
  X(s_maximum_f16, maximum(a, b))
// name, type of the sources, relation
#define COMPARISONS(X, type) \
  X(s_cmp_lt_##type, type, a < b) \
  X(s_cmp_eq_##type, type, a == b) \
  X(s_cmp_le_##type, type, a <= b) \
  X(s_cmp_gt_##type, type, a > b) \
  X(s_cmp_lg_##type, type, a < b || a > b) \
  X(s_cmp_ge_##type, type, a >= b) \
  X(s_cmp_o_##type, type, a == a && b == b) \
  X(s_cmp_u_##type, type, a != a || b != b) \
  X(s_cmp_nge_##type, type, !(a >= b)) \
  X(s_cmp_nlg_##type, type, !(a < b || a > b)) \
  X(s_cmp_ngt_##type, type, !(a > b)) \
  X(s_cmp_nle_##type, type, !(a <= b)) \
  X(s_cmp_neq_##type, type, a != b) \
  X(s_cmp_nlt_##type, type, !(a < b))
// name, bits of the result from the source `a`, function that reads the source
#define CONVERSIONS(X) \
  X(s_cvt_f32_i32, f32_bits((float)(int32_t)a), scalar_word) \
  X(s_cvt_f32_u32, f32_bits((float)a), scalar_word) \
  X(s_cvt_i32_f32, to_i32(a), scalar_f32) \
  X(s_cvt_u32_f32, to_u32(a), scalar_f32) \
  X(s_cvt_f16_f32, f32_to_f16(a), scalar_f32) \
  X(s_cvt_f32_f16, f32_bits(a), scalar_f16) \
  X(s_cvt_hi_f32_f16, f32_bits(f16_to_f32(a >> 16)), scalar_word)
static uint32_t scalar_word(wave_t *w, const instruction_t *i, int n) {
  return read_scalar32(w, &i->operand[SRC0 + n]);
}

#define DEFINE_UNARY_(name, result, type) \
  static void name(wave_t *w, const instruction_t *i) { \
    const float a = scalar_##type(w, i, 0); \
    write_scalar_##type(w, i, result); \
  }
#define DEFINE_BINARY_(name, result, type) \
  static void name(wave_t *w, const instruction_t *i) { \
    const float a = scalar_##type(w, i, 0), b = scalar_##type(w, i, 1); \
    write_scalar_##type(w, i, result); \
  }
#define DEFINE_UNARY_F32(name, result) DEFINE_UNARY_(name, result, f32)
#define DEFINE_BINARY_F32(name, result) DEFINE_BINARY_(name, result, f32)
#define DEFINE_UNARY_F16(name, result) DEFINE_UNARY_(name, result, f16)
#define DEFINE_BINARY_F16(name, result) DEFINE_BINARY_(name, result, f16)
#define DEFINE_COMPARISON(name, type, relation) \
  static void name(wave_t *w, const instruction_t *i) { \
    const float a = scalar_##type(w, i, 0), b = scalar_##type(w, i, 1); \
    set_scc(w, relation); \
  }
#define DEFINE_CONVERSION(name, result, read) \
  static void name(wave_t *w, const instruction_t *i) { \
    const typeof(read(w, i, 0)) a = read(w, i, 0); \
    write_scalar32(w, &i->operand[DST], result); \
  }
UNARY_F32(DEFINE_UNARY_F32)
BINARY_F32(DEFINE_BINARY_F32)
UNARY_F16(DEFINE_UNARY_F16)
BINARY_F16(DEFINE_BINARY_F16)
COMPARISONS(DEFINE_COMPARISON, f32)
COMPARISONS(DEFINE_COMPARISON, f16)
CONVERSIONS(DEFINE_CONVERSION)

static void s_fma_f32(wave_t *w, const instruction_t *i) {
  write_scalar_f32(w, i, fmaf(scalar_f32(w, i, 0), scalar_f32(w, i, 1), scalar_f32(w, i, 2)));
}
// The sum in f64 is exact or far from a tie of two f16, so it is effectively rounded once.
static void s_fma_f16(wave_t *w, const instruction_t *i) {
  write_scalar_f16(w, i, (double)scalar_f16(w, i, 0) * scalar_f16(w, i, 1) + scalar_f16(w, i, 2));
}
static void s_cvt_pk_rtz_f16_f32(wave_t *w, const instruction_t *i) {
  const uint32_t low = truncated_f16(scalar_f32(w, i, 0)), high = truncated_f16(scalar_f32(w, i, 1));
  write_scalar32(w, &i->operand[DST], low | high << 16);
}

OPERATIONS(scalar_float) = {
  UNARY_F32(ROW)
  BINARY_F32(ROW)
  UNARY_F16(ROW)
  BINARY_F16(ROW)
  COMPARISONS(ROW, f32)
  COMPARISONS(ROW, f16)
  CONVERSIONS(ROW)
  {"s_fma_f32", s_fma_f32},
  {"s_fma_f16", s_fma_f16},
  {"s_cvt_pk_rtz_f16_f32", s_cvt_pk_rtz_f16_f32},
  {NULL, NULL},
};
