// Vector operations on 64-bit integers.
#include "wave.h"

static void v_mov_b64(wave_t *w, const instruction_t *i) {
  lanes64_t x;
  read64_upwards(w, i, 0, &x);
  write64_upwards(w, i, &x);
}

// ---- shifts: name, result from the 32-bit shift `a` and the 64-bit element `b`, `_upwards` as in
// read64_upwards
#define SHIFTS(X) \
  X(v_lshlrev_b64, b << (a & 63), _upwards) \
  X(v_lshrrev_b64, b >> (a & 63), ) \
  X(v_ashrrev_i64, (uint64_t)((int64_t)b >> (a & 63)), )
#define DEFINE_SHIFT(name, result, upwards) \
  static void name(wave_t *w, const instruction_t *i) { \
    lanes32_t x; \
    lanes64_t y; \
    read32(w, i, 0, &x); \
    read64##upwards(w, i, 1, &y); \
    FOR_LANES(l) { const uint32_t a = x.lane[l]; const uint64_t b = y.lane[l]; y.lane[l] = result; } \
    write64##upwards(w, i, &y); \
  }
SHIFTS(DEFINE_SHIFT)

static void v_lshl_add_u64(wave_t *w, const instruction_t *i) {
  lanes64_t x, z;
  lanes32_t y;
  read64_upwards(w, i, 0, &x);
  read32(w, i, 1, &y);
  read64_upwards(w, i, 2, &z);
  FOR_LANES(l) x.lane[l] = (x.lane[l] << (y.lane[l] & 7)) + z.lane[l];
  write64_upwards(w, i, &x);
}

// ---- products of 32-bit integers added to a 64-bit integer. The carry is bit 64 of the exact sum. Clamping
// replaces a sum out of range by the nearest value in range.
static inline uint64_t sum_unsigned(uint32_t a, uint32_t b, uint64_t c, bool clamps, uint32_t *carry) {
  const uint64_t sum = (uint64_t)a * b + c;
  *carry = sum < c;
  return clamps && *carry ? UINT64_MAX : sum;
}
static inline uint64_t sum_signed(uint32_t a, uint32_t b, uint64_t c, bool clamps, uint32_t *carry) {
  const uint64_t product = (uint64_t)((int64_t)(int32_t)a * (int32_t)b), sum = product + c;
  const uint64_t overflows = ((product ^ sum) & (c ^ sum)) >> 63, sign = sum >> 63;
  *carry = (uint32_t)(sign ^ overflows);
  return clamps && overflows ? (uint64_t)INT64_MAX + (1 - sign) : sum;
}
#define PRODUCTS(X) \
  X(v_mad_u64_u32, sum_unsigned) \
  X(v_mad_i64_i32, sum_signed)
#define DEFINE_PRODUCT(name, sum) \
  static void name(wave_t *w, const instruction_t *i) { \
    lanes32_t x, y, carries; \
    lanes64_t z; \
    read32(w, i, 0, &x); \
    read32(w, i, 1, &y); \
    read64_upwards(w, i, 2, &z); \
    FOR_LANES(l) z.lane[l] = sum(x.lane[l], y.lane[l], z.lane[l], i->clamp, &carries.lane[l]); \
    write64_upwards(w, i, &z); \
    write_carry(w, &i->operand[DST2], odd_lanes(&carries)); \
  }
PRODUCTS(DEFINE_PRODUCT)

OPERATIONS(vector_wide) = {
  SHIFTS(ROW)
  PRODUCTS(ROW)
  {"v_mov_b64", v_mov_b64},
  {"v_lshl_add_u64", v_lshl_add_u64},
  {NULL, NULL},
};
