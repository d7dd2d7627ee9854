// Vector operations on bytes: selection, sums of absolute differences, averages.
#include "wave.h"

static inline uint32_t byte(uint32_t x, int n) { return x >> 8 * n & 255; }
static inline uint32_t distance(uint32_t x, uint32_t y) { return x > y ? x - y : y - x; }

// Returns byte `select` of `both` for 0 to 7. For 8 to 11, returns the sign (0xff or 0) of a 16-bit element,
// whose number is `select` - 8. For 12, returns 0; from 13 on, 0xff.
static inline uint32_t selected_byte(uint64_t both, uint32_t select) {
  const uint32_t sign = both >> (16 * (select & 3) + 15) & 1 ? 255 : 0;
  const uint32_t constant = select == 12 ? 0 : 255;
  return select < 8 ? (uint32_t)(both >> 8 * (select & 7)) & 255 : select < 12 ? sign : constant;
}
static inline uint32_t selected_bytes(uint32_t high, uint32_t low, uint32_t selects) {
  const uint64_t both = (uint64_t)high << 32 | low;
  uint32_t x = 0;
  for (int n = 0; n < 4; n++) x |= selected_byte(both, byte(selects, n)) << 8 * n;
  return x;
}
static inline uint32_t byte_distances(uint32_t a, uint32_t b) {
  uint32_t sum = 0;
  for (int n = 0; n < 4; n++) sum += distance(byte(a, n), byte(b, n));
  return sum;
}
static inline uint32_t masked_byte_distances(uint32_t a, uint32_t b) {  // omits bytes where `b` is 0
  uint32_t sum = 0;
  for (int n = 0; n < 4; n++) sum += byte(b, n) ? distance(byte(a, n), byte(b, n)) : 0;
  return sum;
}
static inline uint32_t half_distances(uint32_t a, uint32_t b) {
  return distance(a & 0xffff, b & 0xffff) + distance(a >> 16, b >> 16);
}
// Averages of the bytes of a and b, rounded up where bit 0 of the byte of c is set, else down.
static inline uint32_t averages(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t x = 0;
  for (int n = 0; n < 4; n++) x |= (byte(a, n) + byte(b, n) + (byte(c, n) & 1)) >> 1 << 8 * n;
  return x;
}

// ---- name, exact result, which wraps or is clamped to 32 bits
#define TERNARY(X) \
  X(v_perm_b32, selected_bytes(a, b, c)) \
  X(v_lerp_u8, averages(a, b, c)) \
  X(v_sad_u8, (uint64_t)byte_distances(a, b) + c) \
  X(v_sad_hi_u8, ((uint64_t)byte_distances(a, b) << 16) + c) \
  X(v_sad_u16, (uint64_t)half_distances(a, b) + c) \
  X(v_sad_u32, (uint64_t)distance(a, b) + c) \
  X(v_msad_u8, (uint64_t)masked_byte_distances(a, b) + c)
#define DEFINE_TERNARY(name, exact) \
  static void name(wave_t *w, const instruction_t *i) { \
    lanes32_t x, y, z; \
    read32(w, i, 0, &x); \
    read32(w, i, 1, &y); \
    read32(w, i, 2, &z); \
    FOR_LANES(l) { \
      const uint32_t a = x.lane[l], b = y.lane[l], c = z.lane[l]; \
      const uint64_t d = exact; \
      x.lane[l] = i->clamp && d > UINT32_MAX ? UINT32_MAX : (uint32_t)d; \
    } \
    write32(w, i, &x); \
  }
TERNARY(DEFINE_TERNARY)

// ---- sliding sums of absolute differences: four sums, of the four bytes that start at byte 0, 1, 2 and 3 of
// source 0; each is added to a 16-bit element of source 2
#define SLIDING(X) \
  X(v_qsad_pk_u16_u8, byte_distances) \
  X(v_mqsad_pk_u16_u8, masked_byte_distances)
static inline uint64_t sum16(const instruction_t *i, uint32_t distances, uint64_t c) {
  const uint64_t exact = distances + c;
  return i->clamp && exact > 0xffff ? 0xffff : exact & 0xffff;
}
#define DEFINE_SLIDING(name, distances) \
  static void name(wave_t *w, const instruction_t *i) { \
    lanes64_t x, z, d = {0}; \
    lanes32_t y; \
    read64(w, i, 0, &x); \
    read32(w, i, 1, &y); \
    read64(w, i, 2, &z); \
    for (int n = 0; n < 4; n++) \
      FOR_LANES(l) { \
        const uint32_t four = (uint32_t)(x.lane[l] >> 8 * n); \
        d.lane[l] |= sum16(i, distances(four, y.lane[l]), z.lane[l] >> 16 * n & 0xffff) << 16 * n; \
      } \
    write64(w, i, &d); \
  }
SLIDING(DEFINE_SLIDING)

OPERATIONS(vector_bytes) = {
  TERNARY(ROW)
  SLIDING(ROW)
  {NULL, NULL},
};
