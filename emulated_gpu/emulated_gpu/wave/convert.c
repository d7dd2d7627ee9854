// Conversions between types.
//
// Conversions of floats to integers truncate toward zero. A value out of the integer's range becomes the
// nearest integer of the range, and a NaN becomes 0 (ISA manuals, V_CVT_I32_F32).
#include "floating.h"
#include "small_floats.h"

static inline int64_t integer_of(double x, double least, double most) {
  const double inside = x < least ? least : x > most ? most : x;
  return x != x ? 0 : (int64_t)inside;
}
static inline uint32_t i32_of(double x) { return (uint32_t)integer_of(x, INT32_MIN, INT32_MAX); }
static inline uint32_t u32_of(double x) { return (uint32_t)integer_of(x, 0, UINT32_MAX); }
static inline uint32_t i16_of(double x) { return (uint32_t)integer_of(x, INT16_MIN, INT16_MAX) & 0xffff; }
static inline uint32_t u16_of(double x) { return (uint32_t)integer_of(x, 0, UINT16_MAX); }
static inline uint32_t u8_of(double x) { return (uint32_t)integer_of(x, 0, UINT8_MAX); }
// Multiply a float by the largest integer and round to nearest even.
static inline uint32_t norm_i16_of(double x) { return i16_of(rint((x < -1 ? -1 : x) * INT16_MAX)); }
static inline uint32_t norm_u16_of(double x) { return u16_of(rint(x * UINT16_MAX)); }
static inline int64_t within(int64_t x, int64_t least, int64_t most) {
  return x < least ? least : x > most ? most : x;
}
static inline uint32_t i16_within(uint32_t x) { return (uint32_t)within((int32_t)x, INT16_MIN, INT16_MAX); }
static inline uint32_t u16_within(uint32_t x) { return (uint32_t)within(x, 0, UINT16_MAX); }
static inline uint32_t two_halves(uint32_t low, uint32_t high) { return (low & 0xffff) | high << 16; }

// Converts to f16, rounded toward zero.
static inline uint32_t f32_to_f16_cut(float f) {
  const uint32_t x = f32_bits(f), magnitude = x & 0x7fffffffu, sign = x >> 16 & 0x8000;
  const uint32_t normal = (magnitude >> 13) - (112 << 10), most = normal < 0x7bff ? normal : 0x7bff;
  const uint32_t denormal = (uint32_t)(as_f32(magnitude < 0x38800000u ? magnitude : 0) * 0x1p24f);
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00 : 0x7c00;
  return sign | (magnitude >= 0x7f800000u ? special : magnitude < 0x38800000u ? denormal : most);
}

// Each row: an operation, function and type with which its source is read, and its result from the source
// `a`.
#define TO_BITS(X) \
  X(v_cvt_i32_f32, read_f32, lanes_f32_t, i32_of(a)) \
  X(v_cvt_u32_f32, read_f32, lanes_f32_t, u32_of(a)) \
  X(v_cvt_rpi_i32_f32, read_f32, lanes_f32_t, i32_of(floorf(a + 0.5f))) \
  X(v_cvt_flr_i32_f32, read_f32, lanes_f32_t, i32_of(floorf(a))) \
  X(v_cvt_i32_f64, read_f64, lanes_f64_t, i32_of(a)) \
  X(v_cvt_u32_f64, read_f64, lanes_f64_t, u32_of(a)) \
  X(v_cvt_i32_i16, read16, lanes32_t, (uint32_t)(int16_t)a) \
  X(v_cvt_u32_u16, read16, lanes32_t, a)

#define TO_HALF_BITS(X) \
  X(v_cvt_i16_f16, read_f16, lanes_f32_t, i16_of(a)) \
  X(v_cvt_u16_f16, read_f16, lanes_f32_t, u16_of(a)) \
  X(v_cvt_norm_i16_f16, read_f16, lanes_f32_t, norm_i16_of(a)) \
  X(v_cvt_norm_u16_f16, read_f16, lanes_f32_t, norm_u16_of(a))

#define TO_F32(X) \
  X(v_cvt_f32_i32, read32, lanes32_t, (float)(int32_t)a) \
  X(v_cvt_f32_u32, read32, lanes32_t, (float)a) \
  X(v_cvt_f32_ubyte0, read32, lanes32_t, (float)(a & 255)) \
  X(v_cvt_f32_ubyte1, read32, lanes32_t, (float)(a >> 8 & 255)) \
  X(v_cvt_f32_ubyte2, read32, lanes32_t, (float)(a >> 16 & 255)) \
  X(v_cvt_f32_ubyte3, read32, lanes32_t, (float)(a >> 24)) \
  X(v_cvt_off_f32_i4, read32, lanes32_t, (float)((int32_t)(a << 28) >> 28) / 16) \
  X(v_cvt_f32_f16, read_f16, lanes_f32_t, a) \
  X(v_cvt_f32_bf16, read16, lanes32_t, bf16_to_f32(a)) \
  X(v_cvt_f32_f64, read_f64, lanes_f64_t, (float)a) \
  X(v_cvt_f32_fp8, read_byte, lanes32_t, fp8_to_f32(a)) \
  X(v_cvt_f32_bf8, read_byte, lanes32_t, bf8_to_f32(a)) \
  X(v_cvt_f32_fp8_fnuz, read_byte, lanes32_t, fp8_fnuz_to_f32(a)) \
  X(v_cvt_f32_bf8_fnuz, read_byte, lanes32_t, bf8_fnuz_to_f32(a))

#define TO_F16(X) \
  X(v_cvt_f16_f32, read_f32, lanes_f32_t, a) \
  X(v_cvt_f16_i16, read16, lanes32_t, (int16_t)a) \
  X(v_cvt_f16_u16, read16, lanes32_t, (float)a)

#define TO_F64(X) \
  X(v_cvt_f64_f32, read_f32, lanes_f32_t, a) \
  X(v_cvt_f64_i32, read32, lanes32_t, (int32_t)a) \
  X(v_cvt_f64_u32, read32, lanes32_t, a)

// Two bytes to two f32. The bytes are the lower half of the source, or the upper half if opsel is set.
#define TO_TWO_F32(X) \
  X(v_cvt_pk_f32_fp8, fp8_to_f32) \
  X(v_cvt_pk_f32_bf8, bf8_to_f32) \
  X(v_cvt_pk_f32_fp8_fnuz, fp8_fnuz_to_f32) \
  X(v_cvt_pk_f32_bf8_fnuz, bf8_fnuz_to_f32)

// Each row: an operation on two sources, function and type with which they are read, and its result from a
// and b.
#define TWO_TO_BITS(X) \
  X(v_cvt_pkrtz_f16_f32, read_f32, lanes_f32_t, two_halves(f32_to_f16_cut(a), f32_to_f16_cut(b))) \
  X(v_cvt_pk_f16_f32, read_f32, lanes_f32_t, two_halves(f32_to_f16(a), f32_to_f16(b))) \
  X(v_cvt_pk_bf16_f32, read_f32, lanes_f32_t, two_halves(f32_to_bf16(a), f32_to_bf16(b))) \
  X(v_cvt_pknorm_i16_f32, read_f32, lanes_f32_t, two_halves(norm_i16_of(a), norm_i16_of(b))) \
  X(v_cvt_pknorm_u16_f32, read_f32, lanes_f32_t, two_halves(norm_u16_of(a), norm_u16_of(b))) \
  X(v_cvt_pknorm_i16_f16, read_f16, lanes_f32_t, two_halves(norm_i16_of(a), norm_i16_of(b))) \
  X(v_cvt_pknorm_u16_f16, read_f16, lanes_f32_t, two_halves(norm_u16_of(a), norm_u16_of(b))) \
  X(v_cvt_pk_i16_f32, read_f32, lanes_f32_t, two_halves(i16_of(a), i16_of(b))) \
  X(v_cvt_pk_u16_f32, read_f32, lanes_f32_t, two_halves(u16_of(a), u16_of(b))) \
  X(v_cvt_pk_i16_i32, read32, lanes32_t, two_halves(i16_within(a), i16_within(b))) \
  X(v_cvt_pk_u16_u32, read32, lanes32_t, two_halves(u16_within(a), u16_within(b)))

// Two f32 to two bytes, in the half of the destination that bit 3 of opsel selects. They saturate if bit 23
// of MODE (FP16_OVFL) is set.
#define TWO_TO_HALF(X) \
  X(v_cvt_pk_fp8_f32, fp8) \
  X(v_cvt_pk_bf8_f32, bf8) \
  X(v_cvt_pk_fp8_f32_fnuz, fp8_fnuz) \
  X(v_cvt_pk_bf8_f32_fnuz, bf8_fnuz)

// The same, after the sources have been divided by 2 to the power of source 2's exponent.
#define TWO_SCALED_TO_HALF(X) \
  X(v_cvt_scalef32_pk_fp8_f32, fp8) \
  X(v_cvt_scalef32_pk_bf8_f32, bf8)

// Reads a byte of each lane of a source. CDNA selects the byte by SDWA. RDNA selects it by two bits of opsel,
// which are the two bits of the byte's number in reverse order.
static void read_byte(wave_t *w, const instruction_t *i, int n, lanes32_t *out) {
  const int byte = (i->opsel << 1 & 2) | (i->opsel >> 1 & 1);
  read32(w, i, n, out);
  FOR_LANES(l) out->lane[l] = out->lane[l] >> 8 * byte & 255;
}

#define DEFINE(name, read, sources, results, write, expression) \
  static void name(wave_t *w, const instruction_t *i) { \
    sources x; \
    results d; \
    read(w, i, 0, &x); \
    FOR_LANES(l) { \
      const __typeof__(x.lane[0]) a = x.lane[l]; \
      d.lane[l] = (expression); \
    } \
    write; \
  }
#define DEFINE_TO_BITS(name, read, sources, result) \
  DEFINE(name, read, sources, lanes32_t, write32(w, i, &d), result)
#define DEFINE_TO_HALF_BITS(name, read, sources, result) \
  DEFINE(name, read, sources, lanes32_t, write16(w, i, &d, true), result)
#define DEFINE_TO_F32(name, read, sources, result) \
  DEFINE(name, read, sources, lanes_f32_t, write_f32(w, i, &d), result)
#define DEFINE_TO_F16(name, read, sources, result) \
  DEFINE(name, read, sources, lanes_f32_t, write_f16(w, i, &d, true), result)
#define DEFINE_TO_F64(name, read, sources, result) \
  DEFINE(name, read, sources, lanes_f64_t, write_f64(w, i, &d), result)
TO_BITS(DEFINE_TO_BITS)
TO_HALF_BITS(DEFINE_TO_HALF_BITS)
TO_F32(DEFINE_TO_F32)
TO_F16(DEFINE_TO_F16)
TO_F64(DEFINE_TO_F64)

#define DEFINE_TO_TWO_F32(name, convert) \
  static void name(wave_t *w, const instruction_t *i) { \
    lanes32_t x; \
    lanes64_t d; \
    read16(w, i, 0, &x); \
    FOR_LANES(l) { \
      const uint32_t low = f32_bits(convert(x.lane[l] & 255)), high = f32_bits(convert(x.lane[l] >> 8)); \
      d.lane[l] = low | (uint64_t)high << 32; \
    } \
    write64(w, i, &d); \
  }
TO_TWO_F32(DEFINE_TO_TWO_F32)

#define DEFINE_TWO_TO_BITS(name, read, sources, expression) \
  static void name(wave_t *w, const instruction_t *i) { \
    sources x, y; \
    lanes32_t d; \
    read(w, i, 0, &x); \
    read(w, i, 1, &y); \
    FOR_LANES(l) { \
      const __typeof__(x.lane[0]) a = x.lane[l], b = y.lane[l]; \
      d.lane[l] = (expression); \
    } \
    write32(w, i, &d); \
  }
TWO_TO_BITS(DEFINE_TWO_TO_BITS)

static void divide_by_power(wave_t *w, const instruction_t *i, lanes_f32_t *x, lanes_f32_t *y) {
  lanes_f32_t scale;
  read_f32(w, i, 2, &scale);
  FOR_LANES(l) {
    const int power = (int)(f32_bits(scale.lane[l]) >> 23 & 255) - 127;
    x->lane[l] = ldexpf(x->lane[l], -power);
    y->lane[l] = ldexpf(y->lane[l], -power);
  }
}

#define DEFINE_TWO_TO_HALF(name, format) DEFINE_TWO(name, format, )
#define DEFINE_TWO_SCALED_TO_HALF(name, format) DEFINE_TWO(name, format, divide_by_power(w, i, &x, &y))
#define DEFINE_TWO(name, format, scaling) \
  static void name(wave_t *w, const instruction_t *i) { \
    const bool saturates = w->mode >> 23 & 1; \
    lanes_f32_t x, y; \
    lanes32_t d; \
    read_f32(w, i, 0, &x); \
    read_f32(w, i, 1, &y); \
    scaling; \
    FOR_LANES(l) { \
      const uint32_t low = f32_to_small(format, x.lane[l], saturates); \
      d.lane[l] = low | f32_to_small(format, y.lane[l], saturates) << 8; \
    } \
    write16(w, i, &d, false); \
  }
TWO_TO_HALF(DEFINE_TWO_TO_HALF)
TWO_SCALED_TO_HALF(DEFINE_TWO_SCALED_TO_HALF)

// Source 2 with one byte replaced by source 0, converted to an unsigned byte. Source 1 is the number of the
// byte.
static void v_cvt_pk_u8_f32(wave_t *w, const instruction_t *i) {
  lanes_f32_t x;
  lanes32_t number, d;
  read_f32(w, i, 0, &x);
  read32(w, i, 1, &number);
  read32(w, i, 2, &d);
  FOR_LANES(l) {
    const uint32_t shift = 8 * (number.lane[l] & 3);
    d.lane[l] = (d.lane[l] & ~(255u << shift)) | u8_of(x.lane[l]) << shift;
  }
  write32(w, i, &d);
}

OPERATIONS(convert) = {
  TO_BITS(ROW)
  TO_HALF_BITS(ROW)
  TO_F32(ROW)
  TO_F16(ROW)
  TO_F64(ROW)
  TO_TWO_F32(ROW)
  TWO_TO_BITS(ROW)
  TWO_TO_HALF(ROW)
  TWO_SCALED_TO_HALF(ROW)
  ROW(v_cvt_pk_u8_f32)
  {NULL, NULL},
};
