// Scratch: private memory of each lane, to which registers are spilled. EXEC may differ between a spill and
// its reload, so a lane may load bytes that it never stored. Therefore a load of undefined bytes is not
// reported: its result is undefined.
#include "memory.h"

// The address is the 32-bit sum of a scalar, a vector and a constant (CDNA 3 ISA, "Scratch Space").
static uint64_t scratch_addresses(wave_t *w, const instruction_t *i, lanes32_t *address) {
  const operand_t *vector = &i->operand[SRC0];
  const uint32_t start = read_scalar32(w, &i->operand[SRC1]) + (uint32_t)i->offset;
  uint64_t undefined = w->undefined;
  FOR_LANES(l) address->lane[l] = start;
  if (vector->kind == VGPR) {
    FOR_LANES(l) address->lane[l] += w->v[vector->index][l];
    undefined |= ~w->v_defined[vector->index];
  }
  return lanes_with_address(w, i, undefined);
}

static uint64_t lanes_inside(
    wave_t *w, const instruction_t *i, const lanes32_t *address, uint64_t lanes, unsigned bytes) {
  uint64_t outside = 0;
  FOR_LANES(l) outside |= (uint64_t)((uint64_t)address->lane[l] + bytes > w->scratch_bytes) << l;
  outside &= lanes;
  if (outside) {
    const int first = __builtin_ctzll(outside);
    report(w, i, OUTSIDE_SCRATCH, first, address->lane[first], w->index);
  }
  return lanes & ~outside;
}

static uint8_t *byte_at(const wave_t *w, uint32_t address, int l) {
  return (uint8_t *)&w->scratch[(size_t)(address / 4) * LANES + (size_t)l] + address % 4;
}

// Whether all of these lanes access the same whole dwords, as spills do.
static bool is_uniform(const lanes32_t *address, uint64_t lanes, unsigned bytes) {
  if (!lanes || bytes < 4) return false;
  const uint32_t a = address->lane[__builtin_ctzll(lanes)];
  uint32_t differs = a & 3;
  FOR_LANES(l) differs |= lanes >> l & 1 ? address->lane[l] ^ a : 0;
  return !differs;
}

static void load_uniform(wave_t *w, uint32_t address, uint64_t lanes, unsigned bytes, moved_t *to) {
  for (unsigned d = 0; d < bytes / 4; d++) {
    const uint32_t *from = &w->scratch[(size_t)(address / 4 + d) * LANES];
    const uint64_t *defined = &w->scratch_defined[address + 4 * d];
    const uint64_t known = defined[0] & defined[1] & defined[2] & defined[3];
    FOR_LANES(l)
    to->dword[d][l] = !has_lane(lanes, l)  ? to->dword[d][l]
                      : has_lane(known, l) ? from[l]
                                           : POISON;
    w->undefined |= lanes & ~known;
  }
}

static void load_lane(wave_t *w, uint32_t address, int l, unsigned bytes, moved_t *to) {
  uint8_t data[16];
  for (uint32_t n = 0; n < bytes; n++) {
    const bool defined = has_lane(w->scratch_defined[address + n], l);
    data[n] = defined ? *byte_at(w, address + n, l) : 0xff;
    w->undefined |= (uint64_t)!defined << l;
  }
  lane_from_bytes(to, l, data, bytes);
}

static void store_uniform(
    wave_t *w, uint32_t address, uint64_t lanes, unsigned bytes, const moved_t *from, uint64_t undefined) {
  for (unsigned d = 0; d < bytes / 4; d++) {
    uint32_t *to = &w->scratch[(size_t)(address / 4 + d) * LANES];
    FOR_LANES(l) to[l] = has_lane(lanes, l) ? from->dword[d][l] : to[l];
  }
  for (uint32_t n = address; n < address + bytes; n++)
    w->scratch_defined[n] = (w->scratch_defined[n] & ~lanes) | (lanes & ~undefined);
}

static void store_lane(wave_t *w, uint32_t address, int l, unsigned bytes, const moved_t *from,
                       bool defined) {
  uint8_t data[16];
  const uint64_t bit = 1ull << l;
  lane_to_bytes(from, l, data, bytes);
  for (uint32_t n = 0; n < bytes; n++) {
    uint64_t *known = &w->scratch_defined[address + n];
    *byte_at(w, address + n, l) = data[n];
    *known = defined ? *known | bit : *known & ~bit;
  }
}

void scratch_load_lanes(wave_t *w, const instruction_t *i, const lanes32_t *address, uint64_t lanes,
                        unsigned bytes, moved_t *to) {
  const uint64_t inside = lanes_inside(w, i, address, lanes, bytes);
  if (is_uniform(address, inside, bytes))
    load_uniform(w, address->lane[__builtin_ctzll(inside)], inside, bytes, to);
  else FOR_SET_LANES(l, inside) load_lane(w, address->lane[l], l, bytes, to);
  poison_lanes(to, lanes & ~inside, bytes);
  w->undefined |= lanes & ~inside;
}

void scratch_store_lanes(wave_t *w, const instruction_t *i, const lanes32_t *address, uint64_t lanes,
                         unsigned bytes, const moved_t *from, uint64_t undefined) {
  const uint64_t inside = lanes_inside(w, i, address, lanes, bytes);
  if (is_uniform(address, inside, bytes))
    store_uniform(w, address->lane[__builtin_ctzll(inside)], inside, bytes, from, undefined);
  else FOR_SET_LANES(l, inside) store_lane(w, address->lane[l], l, bytes, from, !has_lane(undefined, l));
}

// Registers are loaded one by one, as a spill of several registers may include undefined ones.
void scratch_load(wave_t *w, const instruction_t *i) {
  lanes32_t address;
  moved_t data;
  const uint64_t lanes = scratch_addresses(w, i, &address), undefined = w->undefined;
  instruction_t part = *i;
  for (part.bytes = i->bytes < 4 ? i->bytes : 4; part.operand[DST].index < i->operand[DST].index + dwords_of(i->bytes);
       part.operand[DST].index++) {
    w->undefined = undefined;
    fill_moved(&data, POISON, part.bytes);
    scratch_load_lanes(w, i, &address, lanes, part.bytes, &data);
    write_moved(w, &part, 0, &data);
    FOR_LANES(l) address.lane[l] += 4;
  }
}

void scratch_store(wave_t *w, const instruction_t *i) {
  lanes32_t address;
  moved_t data;
  const uint64_t lanes = scratch_addresses(w, i, &address);
  instruction_t part = *i;
  const unsigned bytes = i->bytes < 4 ? i->bytes : 4;
  for (unsigned d = 0; d < dwords_of(i->bytes); d++, part.operand[SRC0 + 2].index++) {
    const uint64_t undefined = read_moved(w, &part, 2, bytes, &data);
    scratch_store_lanes(w, i, &address, lanes, bytes, &data, undefined);
    FOR_LANES(l) address.lane[l] += 4;
  }
}

OPERATIONS(scratch_memory) = {
  ROW(scratch_load)
  ROW(scratch_store)
  {NULL, NULL},
};
