// Scalar loads, and global and flat accesses. Device memory is memory of this process, with the same
// addresses.
#include "memory.h"
#include "group_order.h"
#include "unique_bytes.h"

// ---- scalar loads
static void write_scalars(wave_t *w, const instruction_t *i, const uint32_t *values, bool defined) {
  w->undefined = defined ? 0 : ~0ull;
  for (unsigned d = 0; d < dwords_of(i->bytes); d++) {
    const operand_t dword = {i->operand[DST].kind, 1, (uint16_t)(i->operand[DST].index + d), 0};
    write_scalar32(w, &dword, values[d]);
  }
}

static void note_scalar_load(wave_t *w, const instruction_t *i, uint64_t address, unsigned bytes) {
  w->counters.loaded_bytes += bytes;
  w->counters.loaded_lines += (address + bytes - 1) / 64 - address / 64 + 1;
  if (w->group->unique) unique_bytes_note(w->group->unique, address, bytes, false);
  if (w->group->order) order_scalar_load(w, i, address, bytes);
}

// Loads `bytes` to `values`. Returns false if that is not possible, as the address is undefined or not live.
static bool load_scalars(wave_t *w, const instruction_t *i, uint64_t address, unsigned bytes, void *values) {
  if (w->undefined) report(w, i, UNDEFINED_ADDRESS, -1, 0, w->index);
  else if (!memory_is_live(address, bytes)) report(w, i, OUTSIDE_MEMORY, -1, address, w->index);
  else {
    memcpy(values, (const void *)(uintptr_t)address, bytes);
    note_scalar_load(w, i, address, bytes);
    return true;
  }
  return false;
}

static uint64_t scalar_offset(wave_t *w, const instruction_t *i) {
  return read_scalar32(w, &i->operand[SRC1]) + (uint64_t)(int64_t)i->offset;
}

static uint32_t extended(const instruction_t *i, uint32_t value) {
  const int unused = 32 - 8 * i->bytes;
  if (unused <= 0) return value;
  return i->sign ? (uint32_t)((int32_t)(value << unused) >> unused) : value << unused >> unused;
}

// A load of dwords ignores the lowest two bits of the address (CDNA 3 ISA, "Scalar Memory").
static void s_load(wave_t *w, const instruction_t *i) {
  const uint64_t address = read_scalar64(w, &i->operand[SRC0]) + scalar_offset(w, i);
  uint32_t values[16];
  memset(values, 0xff, sizeof values);
  const bool defined = load_scalars(w, i, i->bytes < 4 ? address : address & ~3ull, i->bytes, values);
  values[0] = extended(i, values[0]);
  write_scalars(w, i, values, defined);
}

// Dwords beyond the end of the buffer are 0. num_records counts strides, or bytes if the stride is 0.
static void s_buffer_load(wave_t *w, const instruction_t *i) {
  const uint64_t resource = read_scalar64(w, &i->operand[SRC0]);
  const operand_t *o = &i->operand[SRC0];
  const uint64_t base = resource & 0xffffffffffffull, stride = resource >> 48 & 0x3fff;
  const uint64_t end = (uint64_t)w->s[o->index + 2] * (stride ? stride : 1), offset = scalar_offset(w, i);
  const uint64_t start = i->bytes < 4 ? offset : offset & ~3ull;
  uint64_t bytes = start >= end ? 0 : end - start < i->bytes ? end - start : i->bytes;
  if (i->bytes > 4) bytes &= ~3ull;
  uint32_t values[16] = {0};
  const bool defined = !bytes || load_scalars(w, i, base + start, (unsigned)bytes, values);
  values[0] = extended(i, values[0]);
  if (!defined) memset(values, 0xff, sizeof values);
  write_scalars(w, i, values, defined && !w->undefined);
}

// ---- functions for all accesses to global memory
uint64_t global_addresses(wave_t *w, const instruction_t *i, lanes64_t *address) {
  const operand_t *vector = &i->operand[SRC0], *base = &i->operand[SRC1];
  const bool is_wide = base->kind == NOTHING;  // 64-bit addresses, else 32 bits added to a scalar base
  const uint64_t start = read_scalar64(w, base) + (uint64_t)(int64_t)i->offset;
  uint64_t undefined = w->undefined;
  FOR_LANES(l) address->lane[l] = start;
  if (vector->kind == VGPR) {
    const uint32_t *low = w->v[vector->index], *high = w->v[vector->index + 1];
    undefined |= ~w->v_defined[vector->index];
    FOR_LANES(l) address->lane[l] += low[l];
    if (is_wide) FOR_LANES(l) address->lane[l] += (uint64_t)high[l] << 32;
    if (is_wide) undefined |= ~w->v_defined[vector->index + 1];
  }
  return lanes_with_address(w, i, undefined);
}

static uint64_t line_of(uint64_t address) { return address / 64 + 1; }

// Returns the number of 64-byte lines that the lanes access, if lines ascend from lane to lane; else -1.
static int count_ascending_lines(const lanes64_t *address, uint64_t lanes, unsigned bytes) {
  uint64_t last = 0;
  int count = 0;
  FOR_SET_LANES(l, lanes) {
    const uint64_t first = line_of(address->lane[l]), end = line_of(address->lane[l] + bytes - 1);
    if (first < last) return -1;
    count += (int)(end - first) + (first != last);
    last = end;
  }
  return count;
}

// Returns the number of different lines in any order, with a hash table of twice the maximum number of lines.
static unsigned count_scattered_lines(const lanes64_t *address, uint64_t lanes, unsigned bytes) {
  uint64_t seen[4 * MAX_LANES] = {0}, last = 0;  // values of line_of; 0: free
  unsigned count = 0;
  FOR_SET_LANES(l, lanes) {
    const uint64_t end = line_of(address->lane[l] + bytes - 1);
    for (uint64_t line = line_of(address->lane[l]); line <= end; line++) {
      if (line == last) continue;
      last = line;
      size_t n = line % (4 * MAX_LANES);
      while (seen[n] && seen[n] != line) n = (n + 1) % (4 * MAX_LANES);
      count += !seen[n];
      seen[n] = line;
    }
  }
  return count;
}

static unsigned count_lines(const lanes64_t *address, uint64_t lanes, unsigned bytes) {
  const int ascending = count_ascending_lines(address, lanes, bytes);
  return ascending >= 0 ? (unsigned)ascending : count_scattered_lines(address, lanes, bytes);
}

static void count_access(wave_t *w, const lanes64_t *address, uint64_t lanes, unsigned bytes, bool is_store) {
  counters_t *c = &w->counters;
  *(is_store ? &c->stored_bytes : &c->loaded_bytes) += (unsigned)__builtin_popcountll(lanes) * bytes;
  *(is_store ? &c->stored_lines : &c->loaded_lines) += count_lines(address, lanes, bytes);
  if (w->group->unique)
    FOR_SET_LANES(l, lanes) unique_bytes_note(w->group->unique, address->lane[l], bytes, is_store);
}

static bool whole_range_is_live(const lanes64_t *address, uint64_t lanes, unsigned bytes) {
  uint64_t low = ~0ull, high = 0;
  FOR_LANES(l) {
    const uint64_t a = address->lane[l], on = -(lanes >> l & 1);
    low = (a | ~on) < low ? (a | ~on) : low;
    high = (a & on) > high ? (a & on) : high;
  }
  return memory_is_live(low, high - low + bytes);
}

uint64_t global_live_lanes(wave_t *w, const instruction_t *i, const lanes64_t *address, uint64_t lanes,
                           unsigned bytes, bool is_store) {
  uint64_t live = lanes;
  if (!lanes) return 0;
  if (!whole_range_is_live(address, lanes, bytes)) {
    FOR_SET_LANES(l, lanes) if (!memory_is_live(address->lane[l], bytes)) live &= ~(1ull << l);
    const int first = live == lanes ? -1 : __builtin_ctzll(lanes & ~live);
    if (first >= 0) report(w, i, OUTSIDE_MEMORY, first, address->lane[first], w->index);
  }
  count_access(w, address, live, bytes, is_store);
  if (w->group->order) order_before(w, i, address, live, bytes);
  return live;
}

void global_load_lanes(wave_t *w, const instruction_t *i, const lanes64_t *address, uint64_t lanes,
                       unsigned bytes, moved_t *to) {
  const uint64_t live = global_live_lanes(w, i, address, lanes, bytes, false);
  FOR_SET_LANES(l, live) lane_from_bytes(to, l, (const uint8_t *)(uintptr_t)address->lane[l], bytes);
  if (w->group->order) order_after(w, i, address, live);
  poison_lanes(to, lanes & ~live, bytes);
  w->undefined |= lanes & ~live;
}

void global_store_lanes(wave_t *w, const instruction_t *i, const lanes64_t *address, uint64_t lanes,
                        unsigned bytes, const moved_t *from, uint64_t undefined) {
  if (undefined & lanes) {
    const int first = __builtin_ctzll(undefined & lanes);
    report(w, i, UNDEFINED_STORED, first, address->lane[first], w->index);
  }
  const uint64_t live = global_live_lanes(w, i, address, lanes, bytes, true);
  w->group->has_effect |= live != 0;
  FOR_SET_LANES(l, live) lane_to_bytes(from, l, (uint8_t *)(uintptr_t)address->lane[l], bytes);
}

// ---- global
static void global_load(wave_t *w, const instruction_t *i) {
  lanes64_t address;
  moved_t data;
  const uint64_t lanes = global_addresses(w, i, &address);
  fill_moved(&data, POISON, i->bytes);
  global_load_lanes(w, i, &address, lanes, i->bytes, &data);
  write_moved(w, i, 0, &data);
}

static void global_store(wave_t *w, const instruction_t *i) {
  lanes64_t address;
  moved_t data;
  const uint64_t lanes = global_addresses(w, i, &address);
  const uint64_t undefined = read_moved(w, i, 2, i->bytes, &data);
  global_store_lanes(w, i, &address, lanes, i->bytes, &data, undefined);
}

static void global_load_lds(wave_t *w, const instruction_t *i) {
  lanes64_t address;
  moved_t data;
  const uint64_t lanes = global_addresses(w, i, &address);
  global_load_lanes(w, i, &address, lanes, i->bytes, &data);
  lds_store_loaded(w, i, lanes, &data);
}

// ---- flat: the upper half of an address selects LDS, scratch or global memory
typedef struct { uint64_t lds, scratch, global; } spaces_t;

static spaces_t spaces_of(const lanes64_t *address, uint64_t lanes, lanes32_t *low) {
  spaces_t s = {0, 0, 0};
  FOR_LANES(l) {
    const uint64_t bit = lanes & 1ull << l, upper = address->lane[l] >> 32;
    low->lane[l] = (uint32_t)address->lane[l];
    s.lds |= upper == aperture(0) >> 32 ? bit : 0;
    s.scratch |= upper == aperture(2) >> 32 ? bit : 0;
  }
  s.global = lanes & ~(s.lds | s.scratch);
  return s;
}

static void flat_load(wave_t *w, const instruction_t *i) {
  lanes64_t address;
  lanes32_t low;
  moved_t data;
  const spaces_t s = spaces_of(&address, global_addresses(w, i, &address), &low);
  fill_moved(&data, POISON, i->bytes);
  global_load_lanes(w, i, &address, s.global, i->bytes, &data);
  if (s.lds) lds_load_lanes(w, i, &low, s.lds, i->bytes, &data);
  if (s.scratch) scratch_load_lanes(w, i, &low, s.scratch, i->bytes, &data);
  write_moved(w, i, 0, &data);
}

static void flat_store(wave_t *w, const instruction_t *i) {
  lanes64_t address;
  lanes32_t low;
  moved_t data;
  const spaces_t s = spaces_of(&address, global_addresses(w, i, &address), &low);
  const uint64_t undefined = read_moved(w, i, 2, i->bytes, &data);
  global_store_lanes(w, i, &address, s.global, i->bytes, &data, undefined);
  if (s.lds) lds_store_lanes(w, i, &low, s.lds, i->bytes, &data, undefined);
  if (s.scratch) scratch_store_lanes(w, i, &low, s.scratch, i->bytes, &data, undefined);
}

OPERATIONS(global_memory) = {
  {"s_load", s_load},
  {"s_buffer_load", s_buffer_load},
  {"global_load", global_load},
  {"global_store", global_store},
  {"global_load_lds", global_load_lds},
  {"flat_load", flat_load},
  {"flat_store", flat_store},
  {NULL, NULL},
};
