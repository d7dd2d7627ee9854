// The steps of a division as AMD's compilers expand it: scale numerator and denominator (scale), refine an
// approximate reciprocal with fused multiply-adds, scale back (fmas), and insert special values (fixup).
// Source: ISA manuals, V_DIV_SCALE_F32, V_DIV_FMAS_F32, V_DIV_FIXUP_F32 and the same for f64, with these
// errors of the manuals corrected: "== DENORM" means "is denormal", a huge denominator is scaled down instead
// of up, fmas scales up or down depending on the size of the quotient, and fixup handles overflow. With these
// corrections, the expanded division is correctly rounded, which the tests check.
#pragma once
#include "wave.h"

// real: the type; exponent_of_bits: the biased exponent of x; far: the difference of exponents from which on
// the quotient may overflow; by: the exponent of the scale factor; tiny: the largest biased exponent of
// numerators that are scaled up; normal: the smallest normal number.
#define DEFINE_DIVISION(real, suffix, exponent_of_bits, far, by, tiny, normal) \
  static inline int biased_exponent_##suffix(real x) { return (int)(exponent_of_bits); } \
  static inline bool is_denormal_##suffix(real x) { return x != 0 && fabs((double)x) < normal; } \
  static inline real div_scale_##suffix(real x, real denominator, real numerator, bool *scales_back) { \
    const real up = (real)0x1p##by, down = (real)0x1p-##by; \
    const bool is_inverse_denormal = is_denormal_##suffix(1 / denominator); \
    const bool is_quotient_denormal = is_denormal_##suffix(numerator / denominator); \
    if (numerator == 0 || denominator == 0) return (real)NAN; \
    if (biased_exponent_##suffix(numerator) - biased_exponent_##suffix(denominator) >= far) { \
      *scales_back = true; \
      return x == denominator ? x * up : x; \
    } \
    if (is_denormal_##suffix(denominator)) return x * up; \
    if (is_inverse_denormal) { \
      *scales_back = is_quotient_denormal; \
      return !is_quotient_denormal || x == denominator ? x * down : x; \
    } \
    if (is_quotient_denormal) { \
      *scales_back = true; \
      return x == numerator ? x * up : x; \
    } \
    return biased_exponent_##suffix(numerator) <= tiny ? x * up : x; \
  }

DEFINE_DIVISION(float, f32, f32_bits(x) >> 23 & 0xff, 96, 64, 23, 0x1p-126)
DEFINE_DIVISION(double, f64, f64_bits(x) >> 52 & 0x7ff, 768, 128, 53, 0x1p-1022)

// Returns a * b + c. If the division was scaled, the result is scaled back: up if the quotient c is large,
// else down. An f32 result is rounded only once, even if it is denormal: the sum is computed in f64 and
// rounded to odd, with the rounding error from Knuth's two-sum (Boldo and Melquiond, 2008). A denormal f64
// result may have an error of 1 ulp.
static inline float div_fmas_f32(float a, float b, float c, bool scales_back) {
  const double product = (double)a * b, sum = product + c, part = sum - product;
  const double error = (product - (sum - part)) + (c - part);
  const uint64_t bits = f64_bits(sum), towards_error = (error > 0) == (sum > 0) ? bits + 1 : bits - 1;
  const double odd = as_f64(error == 0 || error != error || bits & 1 ? bits : towards_error);
  return scales_back ? (float)(odd * (fabsf(c) >= 2 ? 0x1p64 : 0x1p-64)) : fmaf(a, b, c);
}
static inline double div_fmas_f64(double a, double b, double c, bool scales_back) {
  return fma(a, b, c) * (!scales_back ? 1 : fabs(c) >= 2 ? 0x1p128 : 0x1p-128);
}

// Returns the quotient c / b, of which `a` is the computed value, with the correct results for special
// values. `distance` is the exponent of c minus that of b. Below `least` the quotient is 0 and above `most`
// it is infinite, whatever `a` is.
#define DEFINE_DIV_FIXUP(real, suffix, distance, least, most) \
  static inline real div_fixup_##suffix(real a, real b, real c) { \
    const real sign = (real)copysign(1, (double)b) * (real)copysign(1, (double)c); \
    if (c != c || b != b || (b == 0 && c == 0) || (isinf(b) && isinf(c))) return (real)NAN; \
    if (b == 0 || isinf(c)) return sign * (real)INFINITY; \
    if (isinf(b) || c == 0 || distance < least) return sign * 0; \
    return sign * (distance > most ? (real)INFINITY : (real)fabs((double)a)); \
  }
DEFINE_DIV_FIXUP(float, f32, biased_exponent_f32(c) - biased_exponent_f32(b), -150, 128)
DEFINE_DIV_FIXUP(double, f64, biased_exponent_f64(c) - biased_exponent_f64(b), -1075, 1024)
DEFINE_DIV_FIXUP(float, f16, 0, 0, 0)

// v_div_scale: scales source 0, which is source 1 or 2, for the division of source 2 by source 1. Its second
// result is a lane mask that tells v_div_fmas in which lanes to scale back.
#define DEFINE_DIVISION_STEPS(suffix) \
  static void v_div_scale_##suffix(wave_t *w, const instruction_t *i) { \
    lanes_##suffix##_t x, denominator, numerator, d; \
    uint64_t scales_back = 0; \
    read_##suffix(w, i, 0, &x); \
    read_##suffix(w, i, 1, &denominator); \
    read_##suffix(w, i, 2, &numerator); \
    FOR_LANES(l) { \
      bool flag = false; \
      d.lane[l] = div_scale_##suffix(x.lane[l], denominator.lane[l], numerator.lane[l], &flag); \
      scales_back |= (uint64_t)flag << l; \
    } \
    write_##suffix(w, i, &d); \
    write_carry(w, &i->operand[DST2], scales_back); \
  } \
  static void v_div_fmas_##suffix(wave_t *w, const instruction_t *i) { \
    lanes_##suffix##_t x, y, z, d; \
    read_##suffix(w, i, 0, &x); \
    read_##suffix(w, i, 1, &y); \
    read_##suffix(w, i, 2, &z); \
    const uint64_t scales_back = read_mask(w, &i->operand[SRC3]); \
    FOR_LANES(l) d.lane[l] = div_fmas_##suffix(x.lane[l], y.lane[l], z.lane[l], has_lane(scales_back, l)); \
    write_##suffix(w, i, &d); \
  }
