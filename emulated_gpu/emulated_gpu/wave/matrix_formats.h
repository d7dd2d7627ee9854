// Formats of matrix elements, and their conversion to f32, which represents all of their values exactly.
#pragma once
#include "small_floats.h"

enum format {
  F32, XF32, F16, BF16,
  F16_FLUSH, BF16_FLUSH,  // denormals read as zeros (CDNA 2)
  I8, U8, I4, U4,
  FP8, BF8,            // OCP: E4M3 and E5M2 (CDNA 4, RDNA 4)
  FP8_FNUZ, BF8_FNUZ,  // without infinities and -0 (CDNA 3)
  FP6, BF6, FP4,       // OCP microscaling: E2M3, E3M2, E2M1
};

static inline int format_bits(enum format format) {
  static const uint8_t bits[] = {
    [F32] = 32, [XF32] = 32, [F16] = 16, [BF16] = 16, [F16_FLUSH] = 16, [BF16_FLUSH] = 16,
    [I8] = 8, [U8] = 8, [I4] = 4, [U4] = 4,
    [FP8] = 8, [BF8] = 8, [FP8_FNUZ] = 8, [BF8_FNUZ] = 8, [FP6] = 6, [BF6] = 6, [FP4] = 4,
  };
  return bits[format];
}

// Reads the bits of an element from each lane's registers, which start at `first`. An element of 6 bits may
// be in two registers.
static inline void read_bits(const wave_t *w, unsigned first, int bits, int element, uint32_t *out) {
  const int shift = element * bits % 32;
  const uint32_t *low = w->v[first + (unsigned)(element * bits / 32)], *high = low + MAX_LANES;
  const uint32_t mask = ~0u >> (32 - bits);
  if (shift + bits <= 32) FOR_LANES(l) out[l] = low[l] >> shift & mask;
  else FOR_LANES(l) out[l] = (low[l] >> shift | high[l] << (32 - shift)) & mask;
}

// Zero with the sign of `x`, if none of the bits `exponent` is set.
static inline uint32_t flushed(uint32_t x, uint32_t exponent, uint32_t sign) { return x & exponent ? x : x & sign; }

#define CONVERT(expression) FOR_LANES(l) { const uint32_t x = bits[l]; out[l] = expression; } break
static inline void to_f32(enum format format, const uint32_t *bits, float *out) {
  switch (format) {
    case F32: CONVERT(as_f32(x));
    case XF32: CONVERT(as_f32(x & ~0x1fffu));  // truncated to 10 bits of mantissa (MMA-Sim, see matrix.h)
    case F16: CONVERT(f16_to_f32(x));
    case BF16: CONVERT(bf16_to_f32(x));
    case F16_FLUSH: CONVERT(f16_to_f32(flushed(x, 0x7c00, 0x8000)));
    case BF16_FLUSH: CONVERT(bf16_to_f32(flushed(x, 0x7f80, 0x8000)));
    case I8: CONVERT((int8_t)x);
    case U8: CONVERT((float)x);
    case I4: CONVERT((float)((int32_t)(x << 28) >> 28));
    case U4: CONVERT((float)x);
    case FP8: CONVERT(fp8_to_f32(x));
    case BF8: CONVERT(bf8_to_f32(x));
    case FP8_FNUZ: CONVERT(fp8_fnuz_to_f32(x));
    case BF8_FNUZ: CONVERT(bf8_fnuz_to_f32(x));
    case FP6: CONVERT(small_float(x, 2, 3, 1));
    case BF6: CONVERT(small_float(x, 3, 2, 3));
    case FP4: CONVERT(small_float(x, 2, 1, 1));
  }
}
#undef CONVERT
