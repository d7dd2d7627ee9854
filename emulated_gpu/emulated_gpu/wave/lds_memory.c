// LDS: loads and stores, detection of races between waves, and counting of bank conflicts.
#include "memory.h"

// ---- addresses
// Returns the base address in M0, for loads from global memory to LDS.
static uint32_t lds_base(const wave_t *w) { return w->s[M0_INDEX] & 0x3ffff; }

uint64_t lds_addresses(wave_t *w, const instruction_t *i, int32_t offset, lanes32_t *address) {
  const operand_t *o = &i->operand[SRC0];
  uint64_t undefined = 0;
  if (o->kind == VGPR) {
    FOR_LANES(l) address->lane[l] = w->v[o->index][l] + (uint32_t)offset;
    undefined = ~w->v_defined[o->index];
  } else {
    const uint32_t base = read_scalar32(w, o) + (uint32_t)offset;
    FOR_LANES(l) address->lane[l] = base;
    undefined = w->undefined;
  }
  return lanes_with_address(w, i, undefined);
}

static void report_first(wave_t *w, const instruction_t *i, enum finding_kind kind, uint64_t lanes,
                         const lanes32_t *address) {
  if (!lanes) return;
  const int first = __builtin_ctzll(lanes);
  report(w, i, kind, first, address->lane[first], w->index);
}

// Returns the lanes whose access is inside of the workgroup's LDS, and reports the others. Also reports
// accesses of more than 32 bits that are not aligned to 32 bits: in the mode that amdhsa sets, they work but
// are slow.
static uint64_t lanes_inside(
    wave_t *w, const instruction_t *i, const lanes32_t *address, uint64_t lanes, unsigned bytes) {
  uint64_t outside = 0, misaligned = 0;
  FOR_LANES(l) {
    outside |= (uint64_t)((uint64_t)address->lane[l] + bytes > w->group->lds_bytes) << l;
    misaligned |= (uint64_t)(bytes > 4 && (address->lane[l] & 3)) << l;
  }
  report_first(w, i, OUTSIDE_LDS, outside & lanes, address);
  report_first(w, i, MISALIGNED, misaligned & lanes & ~outside, address);
  return lanes & ~outside;
}

// ---- counters
// Returns the cycle in which lane `l` accesses LDS. LDS has 32 banks of 4 bytes, so a cycle accesses 128
// bytes: 32 lanes of up to 4 bytes, 16 lanes of 8 or 8 lanes of 16. A cycle has consecutive lanes, except for
// loads of 128 bits by 64 lanes, where lanes 0 to 3 are combined with 20 to 23 and so on (AMD, "Avoiding LDS
// Bank Conflicts on AMD GPUs Using CK-Tile Framework", for MI300). Lanes that access the same dword share an
// access. All chips are counted like this, even gfx950 with its wider LDS.
static int cycle_of(int l, unsigned bytes, bool is_load) {
  if (bytes <= 4) return l / 32;
  if (bytes <= 8) return l / 16;
  return LANES == 64 && is_load ? l / 32 * 4 + ((l / 4 & 3) ^ (l / 16 & 1)) : l / 8;
}

// Whether no bank has to access more than one dword.
static bool is_free_of_conflicts(const lanes32_t *address, uint64_t lanes, unsigned bytes) {
  uint32_t dword[32], used = 0;
  FOR_SET_LANES(l, lanes) {
    const uint32_t end = (address->lane[l] + bytes - 1) / 4;
    for (uint32_t d = address->lane[l] / 4; d <= end; d++) {
      if ((used >> (d & 31) & 1) && dword[d & 31] != d) return false;
      dword[d & 31] = d;
      used |= 1u << (d & 31);
    }
  }
  return true;
}

// Returns the maximum number of different dwords that one bank has to access.
static unsigned most_in_a_bank(const lanes32_t *address, uint64_t lanes, unsigned bytes) {
  uint32_t dword[32][32];
  unsigned count[32] = {0}, most = 0;
  FOR_SET_LANES(l, lanes) {
    const uint32_t end = (address->lane[l] + bytes - 1) / 4;
    for (uint32_t d = address->lane[l] / 4; d <= end; d++) {
      const uint32_t bank = d & 31;
      unsigned n = 0;
      while (n < count[bank] && dword[bank][n] != d) n++;
      if (n == count[bank]) dword[bank][count[bank]++] = d;
      most = count[bank] > most ? count[bank] : most;
    }
  }
  return most;
}

static unsigned conflict_cycles(const lanes32_t *address, uint64_t lanes, unsigned bytes, bool is_load) {
  const int num_cycles = cycle_of(LANES - 1, bytes, false) + 1;
  uint64_t lanes_of_cycle[8] = {0};
  unsigned conflicts = 0;
  FOR_SET_LANES(l, lanes) lanes_of_cycle[cycle_of(l, bytes, is_load)] |= 1ull << l;
  for (int n = 0; n < num_cycles; n++)
    if (!is_free_of_conflicts(address, lanes_of_cycle[n], bytes))
      conflicts += most_in_a_bank(address, lanes_of_cycle[n], bytes) - 1;
  return conflicts;
}

static void count_access(wave_t *w, const lanes32_t *address, uint64_t lanes, unsigned bytes, bool is_load) {
  w->counters.lds_bytes += (unsigned)__builtin_popcountll(lanes) * bytes;
  w->counters.lds_conflict_cycles += conflict_cycles(address, lanes, bytes, is_load);
}

// ---- races
enum touch { READ, WRITE, UPDATE };  // UPDATE: by an atomic operation

static uint32_t byte_mask(unsigned bits) {
  return (bits & 1 ? 0xffu : 0) | (bits & 2 ? 0xff00u : 0) | (bits & 4 ? 0xff0000u : 0) |
         (bits & 8 ? 0xff000000u : 0);
}

// Returns a wave other than `mine` from the four bytes of `waves` (each a wave's index plus 1); 0 if there is
// none.
static unsigned other_wave(uint32_t waves, unsigned mine) {
  for (; waves; waves >>= 8)
    if ((waves & 0xff) && (waves & 0xff) != mine) return waves & 0xff;
  return 0;
}

static uint32_t joined(uint32_t waves, uint32_t mask, unsigned mine) {
  uint32_t out = waves;
  for (int shift = 0; shift < 32; shift += 8)
    if (mask >> shift & 0xff) {
      const uint32_t before = waves >> shift & 0xff, after = before && before != mine ? SEVERAL_WAVES : mine;
      out = (out & ~(0xffu << shift)) | after << shift;
    }
  return out;
}

// Records an access of a wave to the bytes `bits` of a word. Returns the index plus 1 of a wave that the
// access races with, or 0.
static unsigned touch_word(const wave_t *w, lds_word_t *word, unsigned bits, enum touch how) {
  const unsigned mine = w->index + 1;
  const uint32_t mask = byte_mask(bits);
  if (word->epoch != w->group->epoch) {
    word->epoch = w->group->epoch;
    word->writers = word->readers = 0;
    word->atomic = 0;
  }
  const uint32_t written = word->writers & mask & (how == UPDATE ? ~byte_mask(word->atomic) : ~0u);
  unsigned other = other_wave(written, mine);
  if (how == READ) {
    word->readers = joined(word->readers, mask, mine);
    return other;
  }
  if (!other) other = other_wave(word->readers & mask, mine);
  word->writers = how == UPDATE ? joined(word->writers, mask, mine)
                                : (word->writers & ~mask) | (mask & mine * 0x01010101u);
  word->atomic = (uint8_t)(how == UPDATE ? word->atomic | bits : word->atomic & ~bits);
  return other;
}

// ---- words
typedef struct { bool unwritten, undefined; unsigned other; } found_t;

static unsigned bits_in_word(uint32_t from, uint32_t end, uint32_t word) {
  const uint32_t first = from > 4 * word ? from - 4 * word : 0,
                 last = end < 4 * word + 4 ? end - 4 * word : 4;
  return ((1u << last) - 1) & ~((1u << first) - 1);
}

// Records an access of a lane. `changes`: whether a store changes bytes. A store that does not is no race, as
// waves with overlapping tiles may store the same values.
static found_t touch(wave_t *w, uint32_t address, unsigned bytes, enum touch how, bool defines, bool changes) {
  found_t found = {false, false, 0};
  const bool is_whole = ((address | bytes) & 3) == 0;
  for (uint32_t n = address / 4; n <= (address + bytes - 1) / 4; n++) {
    lds_word_t *word = &w->group->lds_words[n];
    const unsigned bits = is_whole ? 15 : bits_in_word(address, address + bytes, n);
    if (how != WRITE) {
      found.unwritten |= bits & ~word->written;
      found.undefined |= bits & ~word->defined;
    }
    const bool may_race = w->group->num_waves > 1 && (changes || bits & ~word->defined);
    if (how != READ) {
      word->written |= (uint8_t)bits;
      word->defined = (uint8_t)(defines && !found.undefined ? word->defined | bits : word->defined & ~bits);
    }
    const unsigned other = may_race ? touch_word(w, word, bits, how) : 0;
    if (other) found.other = other;
  }
  return found;
}

static void touch_lanes(wave_t *w, const instruction_t *i, const lanes32_t *address, uint64_t lanes,
                        unsigned bytes, enum touch how, uint64_t undefined, uint64_t changed) {
  uint64_t unwritten = 0, races = 0;
  unsigned other = 0;
  FOR_SET_LANES(l, lanes) {
    const found_t found = touch(w, address->lane[l], bytes, how, !has_lane(undefined, l), has_lane(changed, l));
    unwritten |= (uint64_t)found.unwritten << l;
    w->undefined |= (uint64_t)found.undefined << l;
    if (found.other && !races) other = found.other;
    races |= (uint64_t)(found.other != 0) << l;
  }
  report_first(w, i, UNDEFINED_LDS, unwritten, address);
  if (!races) return;
  const int first = __builtin_ctzll(races);
  report(w, i, LDS_RACE, first, address->lane[first], other == SEVERAL_WAVES ? w->index : other - 1);
}

// Returns the lanes whose store changes bytes.
static uint64_t changed_by(const wave_t *w, const lanes32_t *address, uint64_t lanes, unsigned bytes,
                           const moved_t *from) {
  uint64_t changed = 0;
  FOR_SET_LANES(l, lanes) {
    unsigned char stored[16];
    lane_to_bytes(from, l, stored, bytes);
    changed |= (uint64_t)(memcmp(stored, w->group->lds + address->lane[l], bytes) != 0) << l;
  }
  return changed;
}

// ---- functions for all LDS operations
void lds_load_lanes(wave_t *w, const instruction_t *i, const lanes32_t *address, uint64_t lanes,
                    unsigned bytes, moved_t *to) {
  const uint64_t inside = lanes_inside(w, i, address, lanes, bytes);
  touch_lanes(w, i, address, inside, bytes, READ, 0, inside);
  FOR_SET_LANES(l, inside) lane_from_bytes(to, l, w->group->lds + address->lane[l], bytes);
  poison_lanes(to, lanes & ~inside, bytes);
  w->undefined |= lanes & ~inside;
  count_access(w, address, inside, bytes, true);
}

void lds_store_lanes(wave_t *w, const instruction_t *i, const lanes32_t *address, uint64_t lanes,
                     unsigned bytes, const moved_t *from, uint64_t undefined) {
  const uint64_t inside = lanes_inside(w, i, address, lanes, bytes);
  touch_lanes(w, i, address, inside, bytes, WRITE, undefined, changed_by(w, address, inside, bytes, from));
  FOR_SET_LANES(l, inside) lane_to_bytes(from, l, w->group->lds + address->lane[l], bytes);
  count_access(w, address, inside, bytes, false);
}

uint64_t lds_atomic_lanes(wave_t *w, const instruction_t *i, const lanes32_t *address, uint64_t lanes,
                          unsigned bytes, uint64_t undefined) {
  const uint64_t inside = lanes_inside(w, i, address, lanes, bytes);
  touch_lanes(w, i, address, inside, bytes, UPDATE, undefined, inside);
  w->undefined |= lanes & ~inside;
  count_access(w, address, inside, bytes, false);
  return inside;
}

// Lane l stores at M0 + offset + l * size, where `size` is the element's size but at least 4 bytes (CDNA 3
// ISA, "Memory Buffer Load to LDS").
void lds_store_loaded(wave_t *w, const instruction_t *i, uint64_t lanes, moved_t *loaded) {
  const unsigned bytes = i->bytes < 4 ? 4 : i->bytes;
  const uint64_t undefined = w->undefined;
  lanes32_t address;
  sign_extend(i, loaded);
  if (!w->s_defined[M0_INDEX]) report(w, i, UNDEFINED_ADDRESS, -1, 0, w->index);
  FOR_LANES(l) address.lane[l] = lds_base(w) + (uint32_t)i->offset + (uint32_t)l * bytes;
  lds_store_lanes(w, i, &address, lanes, bytes, loaded, undefined);
}

// ---- operations
static void load_part(wave_t *w, const instruction_t *i, int32_t offset, unsigned first, moved_t *data) {
  lanes32_t address;
  const uint64_t lanes = lds_addresses(w, i, offset, &address);
  fill_moved(data, POISON, i->bytes);
  lds_load_lanes(w, i, &address, lanes, i->bytes, data);
  write_moved(w, i, first, data);
}

static void ds_load(wave_t *w, const instruction_t *i) {
  moved_t data;
  load_part(w, i, i->offset, 0, &data);
}

// 16 lanes load a matrix of 4 rows and 16 columns of 16-bit elements: each lane loads 4 elements of a row and
// gets a column as its result (CDNA 4 ISA, "DS_READ_B64_TR_B16").
static void ds_load_b64_tr_b16(wave_t *w, const instruction_t *i) {
  lanes32_t address;
  moved_t data, columns;
  const uint64_t lanes = lds_addresses(w, i, i->offset, &address);
  fill_moved(&data, POISON, i->bytes);
  lds_load_lanes(w, i, &address, lanes, i->bytes, &data);
  uint64_t undefined = 0;
  FOR_LANES(l) for (int row = 0; row < 4; row++) {
    const int from = (l & ~15) + 4 * row + (l & 15) / 4, element = l & 3;
    const uint32_t value = data.dword[element / 2][from] >> 16 * (element & 1) & 0xffff;
    uint32_t *to = &columns.dword[row / 2][l];
    *to = row & 1 ? *to | value << 16 : value;
    undefined |= (w->undefined >> from & 1) << l;
  }
  w->undefined |= undefined;
  write_moved(w, i, 0, &columns);
}

// Both loads are done before a result is written, as the first result may overwrite the register with the
// address.
static void ds_load2(wave_t *w, const instruction_t *i) {
  lanes32_t address[2];
  moved_t data[2];
  for (int n = 0; n < 2; n++) {
    const uint64_t lanes = lds_addresses(w, i, n ? i->offset1 : i->offset, &address[n]);
    fill_moved(&data[n], POISON, i->bytes);
    lds_load_lanes(w, i, &address[n], lanes, i->bytes, &data[n]);
  }
  for (unsigned n = 0; n < 2; n++) write_moved(w, i, n * dwords_of(i->bytes), &data[n]);
}

static void store_part(wave_t *w, const instruction_t *i, int32_t offset, int source) {
  lanes32_t address;
  moved_t data;
  const uint64_t lanes = lds_addresses(w, i, offset, &address);
  const uint64_t undefined = read_moved(w, i, source, i->bytes, &data);
  lds_store_lanes(w, i, &address, lanes, i->bytes, &data, undefined);
}

static void ds_store(wave_t *w, const instruction_t *i) { store_part(w, i, i->offset, 1); }
static void ds_store2(wave_t *w, const instruction_t *i) {
  store_part(w, i, i->offset, 1);
  store_part(w, i, i->offset1, 2);
}

OPERATIONS(lds_memory) = {
  {"ds_load", ds_load},
  {"ds_load2", ds_load2},
  {"ds_load_b64_tr_b16", ds_load_b64_tr_b16},
  {"ds_store", ds_store},
  {"ds_store2", ds_store2},
  {NULL, NULL},
};
