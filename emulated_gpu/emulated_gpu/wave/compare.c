// Vector comparisons, whose result is a lane mask (one bit per lane), and selections between two vectors by a
// lane mask.
//
// V_CMPX writes EXEC (operand DST) and, on CDNA, the register that V_CMP would write (DST2).
// Source: the CDNA 3, RDNA 3 and RDNA 4 ISA manuals ("VOPC instructions").
#include "wave.h"

typedef int16_t element_i16;
typedef uint16_t element_u16;
typedef int32_t element_i32;
typedef uint32_t element_u32;
typedef int64_t element_i64;
typedef uint64_t element_u64;
typedef float element_f16;
typedef float element_f32;
typedef double element_f64;
typedef lanes32_t lanes_i16, lanes_u16, lanes_i32, lanes_u32;
typedef lanes64_t lanes_i64, lanes_u64;
typedef lanes_f32_t lanes_f16, lanes_f32;
typedef lanes_f64_t lanes_f64;
#define read_i16 read16
#define read_u16 read16
#define read_i32 read32
#define read_u32 read32
#define read_i64 read64
#define read_u64 read64

static void write_comparison(wave_t *w, const instruction_t *i, const lanes32_t *results) {
  const uint64_t lanes = odd_lanes(results);
  write_carry(w, &i->operand[DST], lanes);
  write_carry(w, &i->operand[DST2], lanes);
}

// ---- name of the relation, type, relation of the elements `a` and `b`
#define INTEGER_RELATIONS(X, type) \
  X(f, type, 0) \
  X(lt, type, a < b) \
  X(eq, type, a == b) \
  X(le, type, a <= b) \
  X(gt, type, a > b) \
  X(ne, type, a != b) \
  X(ge, type, a >= b) \
  X(t, type, 1)
// If an element is a NaN, all relations are false except `u`, `tru` and the negated ones (`nge` to `nlt`).
#define FLOAT_RELATIONS(X, type) \
  X(f, type, 0) \
  X(lt, type, a < b) \
  X(eq, type, a == b) \
  X(le, type, a <= b) \
  X(gt, type, a > b) \
  X(lg, type, a < b || a > b) \
  X(ge, type, a >= b) \
  X(o, type, a == a && b == b) \
  X(u, type, a != a || b != b) \
  X(nge, type, !(a >= b)) \
  X(nlg, type, !(a < b || a > b)) \
  X(ngt, type, !(a > b)) \
  X(nle, type, !(a <= b)) \
  X(neq, type, a != b) \
  X(nlt, type, !(a < b)) \
  X(tru, type, 1)
#define ALL_RELATIONS(X) \
  INTEGER_RELATIONS(X, i16) \
  INTEGER_RELATIONS(X, u16) \
  INTEGER_RELATIONS(X, i32) \
  INTEGER_RELATIONS(X, u32) \
  INTEGER_RELATIONS(X, i64) \
  INTEGER_RELATIONS(X, u64) \
  FLOAT_RELATIONS(X, f16) \
  FLOAT_RELATIONS(X, f32) \
  FLOAT_RELATIONS(X, f64)

#define DEFINE_COMPARISON(name, type, relation) \
  static void name##_##type(wave_t *w, const instruction_t *i) { \
    lanes_##type x, y; \
    lanes32_t results; \
    read_##type(w, i, 0, &x); \
    read_##type(w, i, 1, &y); \
    FOR_LANES(l) { \
      const element_##type a = (element_##type)x.lane[l], b = (element_##type)y.lane[l]; \
      (void)a, (void)b; \
      results.lane[l] = relation; \
    } \
    write_comparison(w, i, &results); \
  }
ALL_RELATIONS(DEFINE_COMPARISON)

// ---- V_CMP_CLASS: whether source 1 has the bit for the class of the float in source 0
enum { SIGNALING_NAN, QUIET_NAN, INFINITY_, NORMAL, SUBNORMAL, ZERO };  // bit numbers for negative values
// Returns the number of the bit for the class of a float with `exponent_bits` and `mantissa_bits`.
static inline uint32_t class_of(uint64_t bits, int exponent_bits, int mantissa_bits) {
  const uint64_t largest = (1ull << exponent_bits) - 1, exponent = bits >> mantissa_bits & largest;
  const uint64_t mantissa = bits & ((1ull << mantissa_bits) - 1);
  const bool negative = bits >> (exponent_bits + mantissa_bits) & 1;
  if (exponent == largest && mantissa) return mantissa >> (mantissa_bits - 1) ? QUIET_NAN : SIGNALING_NAN;
  const uint32_t kind = exponent == largest ? INFINITY_ : exponent ? NORMAL : mantissa ? SUBNORMAL : ZERO;
  return negative ? kind : 11 - kind;  // bits 6 to 9 are for positive values, in reverse order
}
// Applies absolute value and negation. Denormals are not flushed, whatever the mode.
static inline uint64_t with_modifiers(const instruction_t *i, uint64_t bits, int sign_bit) {
  const uint64_t sign = 1ull << sign_bit, magnitude = i->abs & 1 ? bits & ~sign : bits;
  return i->neg & 1 ? magnitude ^ sign : magnitude;
}
#define CLASSES(X) \
  X(class_f16, lanes32_t, read16, read16, 5, 10) \
  X(class_f32, lanes32_t, read32, read32, 8, 23) \
  X(class_f64, lanes64_t, read64, read32, 11, 52)
#define DEFINE_CLASS(name, lanes_type, read_float, read_classes, exponent_bits, mantissa_bits) \
  static void name(wave_t *w, const instruction_t *i) { \
    lanes_type x; \
    lanes32_t classes; \
    read_float(w, i, 0, &x); \
    read_classes(w, i, 1, &classes); \
    FOR_LANES(l) { \
      const uint64_t bits = with_modifiers(i, x.lane[l], exponent_bits + mantissa_bits); \
      classes.lane[l] >>= class_of(bits, exponent_bits, mantissa_bits); \
    } \
    write_comparison(w, i, &classes); \
  }
CLASSES(DEFINE_CLASS)

// ---- selection by the lane mask in source 2. A lane's result is defined if the selected value is.
static inline uint32_t with_float_modifiers(const instruction_t *i, int n, uint32_t bits, uint32_t sign) {
  const uint32_t magnitude = i->abs >> n & 1 ? bits & ~sign : bits;
  return i->neg >> n & 1 ? magnitude ^ sign : magnitude;
}
typedef void read_t(wave_t *, const instruction_t *, int, lanes32_t *);
static inline void select_lanes(
    wave_t *w, const instruction_t *i, uint32_t sign, read_t read, lanes32_t *out) {
  lanes32_t y;
  const uint64_t mask = read_mask(w, &i->operand[SRC2]), before = w->undefined;
  w->undefined = 0;
  read(w, i, 0, out);
  const uint64_t undefined0 = w->undefined;
  w->undefined = 0;
  read(w, i, 1, &y);
  w->undefined = before | (undefined0 & ~mask) | (w->undefined & mask);
  FOR_LANES(l) {
    const uint32_t a = with_float_modifiers(i, 0, out->lane[l], sign);
    const uint32_t b = with_float_modifiers(i, 1, y.lane[l], sign);
    out->lane[l] = has_lane(mask, l) ? b : a;
  }
}
static void v_cndmask_b32(wave_t *w, const instruction_t *i) {
  lanes32_t x;
  select_lanes(w, i, 1u << 31, read32, &x);
  write32(w, i, &x);
}
static void v_cndmask_b16(wave_t *w, const instruction_t *i) {
  lanes32_t x;
  select_lanes(w, i, 1u << 15, read16, &x);
  write16(w, i, &x, false);
}

#define ROWS(name, type, ...) \
  {"v_cmp_" #name "_" #type, name##_##type}, \
  {"v_cmpx_" #name "_" #type, name##_##type},
#define CLASS_ROWS(name, ...) {"v_cmp_" #name, name}, {"v_cmpx_" #name, name},
#define TRUE_ROWS(type) {"v_cmp_t_" #type, tru_##type}, {"v_cmpx_t_" #type, tru_##type},  // RDNA 3's name
OPERATIONS(compare) = {
  ALL_RELATIONS(ROWS)
  CLASSES(CLASS_ROWS)
  TRUE_ROWS(f16)
  TRUE_ROWS(f32)
  TRUE_ROWS(f64)
  {"v_cndmask_b32", v_cndmask_b32},
  {"v_cndmask_b16", v_cndmask_b16},
  {NULL, NULL},
};
