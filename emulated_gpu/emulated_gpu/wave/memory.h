// Definitions for all memory operations: the data that lanes move, and the three address spaces: global
// memory, LDS and scratch. A `*_load_lanes` writes the rows of the given lanes, and adds lanes without a
// defined value to `w->undefined`; rows of other lanes do not change.
#pragma once
#include "wave.h"

// The data of a load or store, up to 16 bytes per lane. Elements of less than 4 bytes are zero-extended in
// `dword[0]`.
typedef struct { uint32_t dword[4][MAX_LANES] __attribute__((aligned(64))); } moved_t;

#define FOR_SET_LANES(l, lanes) \
  for (uint64_t left_ = (lanes); left_; left_ &= left_ - 1) \
    for (int l = __builtin_ctzll(left_), once_ = 1; once_; once_ = 0)

#define global_addresses JOIN(global_addresses, LANES)
#define global_live_lanes JOIN(global_live_lanes, LANES)
#define global_load_lanes JOIN(global_load_lanes, LANES)
#define global_store_lanes JOIN(global_store_lanes, LANES)
#define lds_addresses JOIN(lds_addresses, LANES)
#define lds_load_lanes JOIN(lds_load_lanes, LANES)
#define lds_store_lanes JOIN(lds_store_lanes, LANES)
#define lds_store_loaded JOIN(lds_store_loaded, LANES)
#define lds_atomic_lanes JOIN(lds_atomic_lanes, LANES)
#define scratch_load_lanes JOIN(scratch_load_lanes, LANES)
#define scratch_store_lanes JOIN(scratch_store_lanes, LANES)
#define scratch_load JOIN(scratch_load, LANES)
#define scratch_store JOIN(scratch_store, LANES)
#define buffer_addresses JOIN(buffer_addresses, LANES)

// Computes the addresses of a global or flat access; returns the active lanes whose address is defined.
uint64_t global_addresses(wave_t *w, const instruction_t *i, lanes64_t *address);
// Returns the lanes whose access is in live memory, and counts these accesses and checks their order; reports
// the other lanes.
uint64_t global_live_lanes(wave_t *w, const instruction_t *i, const lanes64_t *address, uint64_t lanes,
                           unsigned bytes, bool is_store);
void global_load_lanes(
    wave_t *w, const instruction_t *i, const lanes64_t *address, uint64_t lanes, unsigned bytes, moved_t *to);
// `undefined`: the lanes whose data are undefined, which is reported.
void global_store_lanes(wave_t *w, const instruction_t *i, const lanes64_t *address, uint64_t lanes,
                        unsigned bytes, const moved_t *from, uint64_t undefined);

uint64_t lds_addresses(wave_t *w, const instruction_t *i, int32_t offset, lanes32_t *address);
void lds_load_lanes(
    wave_t *w, const instruction_t *i, const lanes32_t *address, uint64_t lanes, unsigned bytes, moved_t *to);
void lds_store_lanes(wave_t *w, const instruction_t *i, const lanes32_t *address, uint64_t lanes,
                     unsigned bytes, const moved_t *from, uint64_t undefined);
// Stores to LDS what `global_load_lds` and `buffer_load_lds` have loaded from global memory.
void lds_store_loaded(wave_t *w, const instruction_t *i, uint64_t lanes, moved_t *loaded);
// Returns the lanes whose atomic access is inside of LDS; adds lanes that read undefined bytes to
// `w->undefined`.
uint64_t lds_atomic_lanes(wave_t *w, const instruction_t *i, const lanes32_t *address, uint64_t lanes,
                          unsigned bytes, uint64_t undefined);

void scratch_load_lanes(
    wave_t *w, const instruction_t *i, const lanes32_t *address, uint64_t lanes, unsigned bytes, moved_t *to);
void scratch_store_lanes(wave_t *w, const instruction_t *i, const lanes32_t *address, uint64_t lanes,
                         unsigned bytes, const moved_t *from, uint64_t undefined);
// Whole instructions: source 0 is the vector address, source 1 the scalar one, source 2 the data.
void scratch_load(wave_t *w, const instruction_t *i);
void scratch_store(wave_t *w, const instruction_t *i);

// Computes the addresses of a buffer access, and in `in_range` how many bytes from there on are within the
// buffer (at most 16); returns the active lanes whose address is defined.
uint64_t buffer_addresses(wave_t *w, const instruction_t *i, lanes64_t *address, lanes32_t *in_range);

// Returns the active lanes whose address is defined; reports the others, and makes their result undefined.
static inline uint64_t lanes_with_address(wave_t *w, const instruction_t *i, uint64_t undefined) {
  undefined &= exec_lanes(w);
  if (undefined) report(w, i, UNDEFINED_ADDRESS, __builtin_ctzll(undefined), 0, w->index);
  w->undefined = undefined;
  return exec_lanes(w) & ~undefined;
}

static inline unsigned dwords_of(unsigned bytes) { return (bytes + 3) / 4; }

static inline void fill_moved(moved_t *m, uint32_t value, unsigned bytes) {
  const uint32_t x = bytes >= 4 ? value : value & ((1u << 8 * bytes) - 1);
  for (unsigned d = 0; d < dwords_of(bytes); d++) FOR_LANES(l) m->dword[d][l] = x;
}

static inline void lane_from_bytes(moved_t *m, int l, const uint8_t *from, unsigned bytes) {
  if (bytes == 1) { m->dword[0][l] = *from; return; }
  if (bytes == 2) { uint16_t x; memcpy(&x, from, 2); m->dword[0][l] = x; return; }
  for (unsigned d = 0; d < 4 && 4 * d < bytes; d++) memcpy(&m->dword[d][l], from + 4 * d, 4);
}
static inline void poison_lanes(moved_t *m, uint64_t lanes, unsigned bytes) {
  static const uint8_t poison[16] = {[0 ... 15] = 0xff};
  FOR_SET_LANES(l, lanes) lane_from_bytes(m, l, poison, bytes);
}
static inline void lane_to_bytes(const moved_t *m, int l, uint8_t *to, unsigned bytes) {
  if (bytes < 4) { memcpy(to, &m->dword[0][l], bytes); return; }
  for (unsigned d = 0; d < 4 && 4 * d < bytes; d++) memcpy(to + 4 * d, &m->dword[d][l], 4);
}

// Reads the data of a store from source `n`; returns the lanes in which they are undefined.
static inline uint64_t read_moved(const wave_t *w, const instruction_t *i, int n, unsigned bytes,
                                  moved_t *out) {
  const operand_t *o = &i->operand[SRC0 + n];
  uint64_t defined = ~0ull;
  for (unsigned d = 0; d < dwords_of(bytes); d++) {
    memcpy(out->dword[d], w->v[o->index + d], 4 * LANES);
    defined &= w->v_defined[o->index + d];
  }
  if (i->d16 == 2) FOR_LANES(l) out->dword[0][l] >>= 16;
  return ~defined & exec_lanes(w);
}

static inline void sign_extend(const instruction_t *i, moved_t *m) {
  const int unused = 32 - 8 * i->bytes;
  if (i->sign && unused > 0)
    FOR_LANES(l) m->dword[0][l] = (uint32_t)((int32_t)(m->dword[0][l] << unused) >> unused);
}

// Writes loaded data to the destination's registers from number `first` on. A D16 load keeps the register's
// other half.
static inline void write_moved(wave_t *w, const instruction_t *i, unsigned first, moved_t *m) {
  const operand_t *o = &i->operand[DST];
  if (o->kind != VGPR) return;
  sign_extend(i, m);
  uint32_t *row = m->dword[0];
  const uint32_t *old = w->v[o->index];
  if (i->d16 == 1) FOR_LANES(l) row[l] = (old[l] & 0xffff0000u) | (row[l] & 0xffff);
  if (i->d16 == 2) FOR_LANES(l) row[l] = (old[l] & 0xffff) | row[l] << 16;
  const unsigned dwords = dwords_of(i->bytes);
  for (unsigned d = 0; d < dwords; d++) write_register(w, o->index + first + d, m->dword[d]);
  if (i->memory & MEMORY_TFE) {  // a status follows the data; 0: no fault
    FOR_LANES(l) row[l] = 0;
    write_register(w, o->index + first + dwords, row);
  }
}
