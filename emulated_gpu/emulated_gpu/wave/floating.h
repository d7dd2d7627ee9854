// Arithmetic on f32 and f64 values that several files of operations share.
//
// Whether a result is a NaN is modelled; the bits of such a NaN are not.
#pragma once
#include "wave.h"

// Whether the IEEE bit of MODE is set. Minima and maxima of a signalling NaN and a number are then a quiet
// NaN, otherwise the number. GFX12 has no such bit and behaves as if it were not set.
static inline bool is_ieee(const wave_t *w) {
  return w->mode >> 9 & 1 && w->group->kernel->header.generation < 12;
}

static inline bool is_signalling_f32(float x) {
  return (f32_bits(x) & 0x7fc00000u) == 0x7f800000u && f32_bits(x) << 9;
}
static inline bool is_signalling_f64(double x) {
  return (f64_bits(x) & 0x7ff8000000000000u) == 0x7ff0000000000000u && f64_bits(x) << 12;
}

// Minima and maxima in which +0 is more than -0. max and min drop a NaN if the other is a number (IEEE 754-2008,
// maxNum); maximum and minimum keep it (IEEE 754-2019, maximum). The median is defined by ISA manuals,
// V_MED3_F32.
#define DEFINE_ORDER(real, suffix) \
  static inline real max_##suffix(real a, real b, bool ieee) { \
    const real larger = (a > b) | ((a == b) & !signbit(a)) ? a : b; \
    const real number = a != a ? b : b != b ? a : larger; \
    return ieee & (is_signalling_##suffix(a) | is_signalling_##suffix(b)) ? (real)NAN : number; \
  } \
  static inline real min_##suffix(real a, real b, bool ieee) { return -max_##suffix(-a, -b, ieee); } \
  static inline real maximum_##suffix(real a, real b) { \
    return (a != a) | (b != b) ? (real)NAN : max_##suffix(a, b, false); \
  } \
  static inline real minimum_##suffix(real a, real b) { return -maximum_##suffix(-a, -b); } \
  static inline real median_##suffix(real a, real b, real c, bool ieee) { \
    const real largest = max_##suffix(max_##suffix(a, b, ieee), c, ieee); \
    const real least = min_##suffix(min_##suffix(a, b, ieee), c, ieee); \
    const real one = largest == a ? b : a, other = largest == a || largest == b ? c : b; \
    const real middle = max_##suffix(one, other, ieee); \
    return (a != a) | (b != b) | (c != c) ? least : middle; \
  }
DEFINE_ORDER(float, f32)
DEFINE_ORDER(double, f64)

// The fraction. It is below 1 even if a - floor(a) rounds to 1 (LLVM, constant folding of llvm.amdgcn.fract).
static inline float fract_f32(float a) {
  const float fraction = a - floorf(a);
  return fraction >= 1 ? 0x1.fffffep-1f : fraction;
}
static inline double fract_f64(double a) {
  const double fraction = a - floor(a);
  return fraction >= 1 ? 0x1.fffffffffffffp-1 : fraction;
}

// Returns a * 2^n, rounded once, as the scaled value is exact in a double.
static inline float scale_f32(float a, int32_t n) {
  const int64_t exponent = n < -400 ? -400 : n > 400 ? 400 : n;
  return (float)(a * as_f64((uint64_t)(exponent + 1023) << 52));
}

// Returns a * b + c of f16 values, as an f32 that rounds to the f16 nearest to the exact result. The product
// is exact in f32. The sum is rounded to odd (Boldo, Melquiond 2008): its rounding error, which Knuth's
// two-sum computes exactly, decides the last bit.
static inline float fma_f16(float a, float b, float c) {
  const float product = a * b, sum = product + c, part = sum - product;
  const float error = (product - (sum - part)) + (c - part);
  const uint32_t bits = f32_bits(sum);
  const bool moves = (error != 0) & !(bits & 1) & (fabsf(sum) < INFINITY) & (error == error);
  const bool outwards = (error > 0) == (sum > 0);
  return as_f32(moves ? (outwards ? bits + 1 : bits - 1) : bits);
}

// The hardware's approximate functions on f32 flush denormals, whatever the mode (LLVM, AMDGPUISelLowering:
// lowerFEXP2, lowerFLOG2, lowerFSQRTF32), and have an error of up to 1 ulp. The ones here are correctly
// rounded, except in rare cases where the error of the intermediate double matters.
static inline float without_denormal(float a) { return fabsf(a) < 0x1p-126f ? copysignf(0, a) : a; }
static inline float exp2_of(float a) { return without_denormal((float)exp2(without_denormal(a))); }
static inline float log2_of(float a) { return (float)log2(without_denormal(a)); }
static inline float reciprocal(float a) { return without_denormal(1 / without_denormal(a)); }
static inline float root_of(float a) { return sqrtf(without_denormal(a)); }
static inline float reciprocal_root(float a) { return (float)(1 / sqrt((double)without_denormal(a))); }

// sin and cos of `a` full turns (2 pi). CDNA accepts turns from -256 to 256; beyond, sin is 0 and cos is 1
// (CDNA 3 ISA, V_SIN_F32; LLVM, FeatureTrigReducedRange).
static inline bool is_past_range(const wave_t *w, float a) {
  return w->group->kernel->header.generation == 9 && fabsf(a) > 256 && fabsf(a) < INFINITY;
}
static inline float sine_of_turns(float a) {
  const double x = without_denormal(a);
  return without_denormal((float)sin((x - rint(x)) * (2 * M_PI)));
}
static inline float cosine_of_turns(float a) {
  const double x = fabs((double)a);
  return (float)cos((x - rint(x)) * (2 * M_PI));
}

// Returns the exponent with which x = fraction * 2^exponent for a fraction from 0.5 to 1; 0 for zero,
// infinity, NaN.
static inline int exponent_of(double x) {
  int exponent = 0;
  frexp(x, &exponent);
  return isfinite(x) ? exponent : 0;
}

// Defines an operation with `num_sources` sources of type `real`, stored in `lanes`. `expression` is the
// result from the sources a, b and c, and may use `ieee`; `read` reads a source, and the statement `write`
// writes the result d.
#define DEFINE_FLOATING(name, num_sources, real, lanes, read, write, expression) \
  static void name(wave_t *w, const instruction_t *i) { \
    const bool ieee = is_ieee(w); \
    lanes x, y, z, d; \
    read(w, i, 0, &x); \
    if (num_sources > 1) read(w, i, 1, &y); \
    if (num_sources > 2) read(w, i, 2, &z); \
    FOR_LANES(l) { \
      const real a = x.lane[l], b = num_sources > 1 ? y.lane[l] : 0, c = num_sources > 2 ? z.lane[l] : 0; \
      d.lane[l] = (expression); \
      (void)b, (void)c; \
    } \
    write; \
    (void)ieee; \
  }

// For tables of operations in a file that defines DEFINE(name, num_sources, expression).
#define DEFINE_UNARY(name, expression) DEFINE(name, 1, expression)
#define DEFINE_BINARY(name, expression) DEFINE(name, 2, expression)
#define DEFINE_TERNARY(name, expression) DEFINE(name, 3, expression)

#define DEFINE_FREXP_EXP(name, lanes, read, write) \
  static void name(wave_t *w, const instruction_t *i) { \
    lanes x; \
    lanes32_t d; \
    read(w, i, 0, &x); \
    FOR_LANES(l) d.lane[l] = (uint32_t)exponent_of(x.lane[l]); \
    write; \
  }
