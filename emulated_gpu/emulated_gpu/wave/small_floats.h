// Floats of at most 8 bits: conversion to f32 and from f32.
#pragma once
#include "wave.h"

// Converts a small float to f32; does not handle infinities and NaN. Exponent and mantissa are shifted to
// their place in an f32, and a multiplication corrects the exponent's bias. This is exact, also for
// denormals.
static inline float small_float(uint32_t x, int exponent_bits, int mantissa_bits, int bias) {
  const int bits = exponent_bits + mantissa_bits;
  const float shifted = as_f32((x & ((1u << bits) - 1)) << (23 - mantissa_bits));
  const float magnitude = shifted * as_f32((uint32_t)(254 - bias) << 23);
  return as_f32(f32_bits(magnitude) | (x >> bits & 1) << 31);
}
static inline float fp8_to_f32(uint32_t x) { return (x & 0x7f) == 0x7f ? NAN : small_float(x, 4, 3, 7); }
static inline float bf8_to_f32(uint32_t x) {
  const float special = (x & 0x7f) == 0x7c ? as_f32(0x7f800000 | x >> 7 << 31) : NAN;
  return (x & 0x7f) >= 0x7c ? special : small_float(x, 5, 2, 15);
}
static inline float fp8_fnuz_to_f32(uint32_t x) { return x == 0x80 ? NAN : small_float(x, 4, 3, 8); }
static inline float bf8_fnuz_to_f32(uint32_t x) { return x == 0x80 ? NAN : small_float(x, 5, 2, 16); }

// Limits of 8-bit floats: the largest number, and the codes of an overflow and of NaN.
typedef struct { int mantissa_bits, bias; uint32_t largest, overflow, nan; bool is_fnuz; } small_format_t;
static const small_format_t fp8 = {3, 7, 0x7e, 0x7f, 0x7f, false};
static const small_format_t bf8 = {2, 15, 0x7b, 0x7c, 0x7f, false};
static const small_format_t fp8_fnuz = {3, 8, 0x7f, 0x80, 0x80, true};
static const small_format_t bf8_fnuz = {2, 16, 0x7f, 0x80, 0x80, true};

// Converts f32 to 8 bits, rounded to nearest even. `saturates`: finite numbers above the largest become the
// largest.
static inline uint32_t f32_to_small(small_format_t format, float f, bool saturates) {
  const uint32_t x = f32_bits(f), magnitude = x & 0x7fffffffu, sign = x >> 24 & 0x80;
  const int dropped = 23 - format.mantissa_bits;
  const uint32_t half = (1u << (dropped - 1)) - 1, is_odd = magnitude >> dropped & 1;
  const uint32_t rebias = (uint32_t)(127 - format.bias) << format.mantissa_bits;
  const uint32_t normal = ((magnitude + half + is_odd) >> dropped) - rebias;
  const float unit = as_f32((uint32_t)(126 + format.bias + format.mantissa_bits) << 23);
  const bool is_denormal = magnitude < (uint32_t)(128 - format.bias) << 23;
  const uint32_t number = is_denormal ? (uint32_t)rintf(is_denormal ? as_f32(magnitude) * unit : 0) : normal;
  const bool is_over = magnitude >= 0x7f800000u || number > format.largest;
  const uint32_t over = saturates && magnitude < 0x7f800000u ? format.largest : format.overflow;
  const uint32_t code = magnitude > 0x7f800000u ? format.nan : is_over ? over : number;
  return format.is_fnuz ? (code == 0x80 || code == 0 ? code : code | sign) : code | sign;
}
