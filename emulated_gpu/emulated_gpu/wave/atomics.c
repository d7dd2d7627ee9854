// Atomic operations on global memory, buffers, flat addresses and LDS. Workgroups run on several threads of
// the host, so an update is a loop of compare-and-exchange.
//
// On every chip, minima and maxima of floats return the other operand if one is a NaN, and -0 is less than
// +0. RDNA 4 documents this, and LLVM expects it of earlier chips. Sums round to nearest even and keep
// denormals.
#include "memory.h"
#include "group_order.h"

typedef uint64_t (*update_t)(uint64_t memory, uint64_t data, uint64_t compare);

// ---- values
static float f32_of(uint64_t x) { return as_f32((uint32_t)x); }
static uint64_t add_f32(uint64_t a, uint64_t b) { return f32_bits(f32_of(a) + f32_of(b)); }
static uint64_t add_f64(uint64_t a, uint64_t b) { return f64_bits(as_f64(a) + as_f64(b)); }

// Whether `a` is the minimum (`sign` is 1) or the maximum (-1) of a and b. If either is a NaN: whether a is
// not.
static bool takes_first(double a, double b, int sign) {
  if (a != a || b != b) return a == a;
  return a == b ? (sign > 0) == (signbit(a) != 0) : (sign > 0) == (a < b);
}
static uint64_t quiet_f32(uint64_t x) { return x | 0x400000; }
static uint64_t quiet_f64(uint64_t x) { return x | 1ull << 51; }
static uint64_t chosen_f32(uint64_t a, uint64_t b, int sign) {
  const float x = f32_of(a), y = f32_of(b);
  return x != x && y != y ? quiet_f32(a) : takes_first(x, y, sign) ? a : b;
}
static uint64_t chosen_f64(uint64_t a, uint64_t b, int sign) {
  const double x = as_f64(a), y = as_f64(b);
  return x != x && y != y ? quiet_f64(a) : takes_first(x, y, sign) ? a : b;
}

static uint32_t halves(uint32_t low, uint32_t high) { return low | high << 16; }
static uint32_t add_f16(uint32_t a, uint32_t b) { return f32_to_f16(f16_to_f32(a) + f16_to_f32(b)); }
static uint32_t add_bf16(uint32_t a, uint32_t b) { return f32_to_bf16(bf16_to_f32(a) + bf16_to_f32(b)); }
static uint64_t pk_add_f16(uint64_t a, uint64_t b) {
  return halves(add_f16(a & 0xffff, b & 0xffff), add_f16(a >> 16 & 0xffff, b >> 16 & 0xffff));
}
static uint64_t pk_add_bf16(uint64_t a, uint64_t b) {
  return halves(add_bf16(a & 0xffff, b & 0xffff), add_bf16(a >> 16 & 0xffff, b >> 16 & 0xffff));
}

// ---- name, bytes, new value of the zero-extended `memory`; compare-and-swap and mskor also use `compare`
#define FOR_INTEGERS(X, bits, size) \
  X(add_u##bits, size, memory + data) \
  X(sub_u##bits, size, memory - data) \
  X(inc_u##bits, size, memory >= data ? 0 : memory + 1) \
  X(dec_u##bits, size, memory == 0 || memory > data ? data : memory - 1) \
  X(min_u##bits, size, memory < data ? memory : data) \
  X(max_u##bits, size, memory > data ? memory : data) \
  X(min_i##bits, size, (int##bits##_t)memory < (int##bits##_t)data ? memory : data) \
  X(max_i##bits, size, (int##bits##_t)memory > (int##bits##_t)data ? memory : data) \
  X(and_b##bits, size, memory & data) \
  X(or_b##bits, size, memory | data) \
  X(xor_b##bits, size, memory ^ data) \
  X(swap_b##bits, size, data) \
  X(cmpswap_b##bits, size, memory == compare ? data : memory)
#define FOR_EVERYWHERE(X) \
  FOR_INTEGERS(X, 32, 4) \
  FOR_INTEGERS(X, 64, 8) \
  X(cond_sub_u32, 4, memory >= data ? memory - data : memory) \
  X(sub_clamp_u32, 4, memory >= data ? memory - data : 0) \
  X(add_f32, 4, add_f32(memory, data)) \
  X(add_f64, 8, add_f64(memory, data)) \
  X(min_f32, 4, chosen_f32(data, memory, 1)) \
  X(max_f32, 4, chosen_f32(data, memory, -1)) \
  X(min_f64, 8, chosen_f64(data, memory, 1)) \
  X(max_f64, 8, chosen_f64(data, memory, -1)) \
  X(cmpswap_f32, 4, f32_of(memory) == f32_of(compare) ? data : memory) \
  X(cmpswap_f64, 8, as_f64(memory) == as_f64(compare) ? data : memory) \
  X(pk_add_f16, 4, pk_add_f16(memory, data)) \
  X(pk_add_bf16, 4, pk_add_bf16(memory, data))
#define FOR_MEMORY_ONLY(X) \
  X(csub_u32, 4, memory >= data ? memory - data : 0)
#define FOR_LDS_ONLY(X) \
  X(rsub_u32, 4, data - memory) \
  X(rsub_u64, 8, data - memory) \
  X(mskor_b32, 4, (memory & ~data) | compare) \
  X(mskor_b64, 8, (memory & ~data) | compare)

#define UPDATE(name, size, value) \
  static uint64_t update_##name(uint64_t memory, uint64_t data, uint64_t compare) { \
    (void)memory, (void)data, (void)compare; \
    return value; \
  }
FOR_EVERYWHERE(UPDATE)
FOR_MEMORY_ONLY(UPDATE)
FOR_LDS_ONLY(UPDATE)

static uint64_t exchange32(uint32_t *at, update_t update, uint64_t data, uint64_t compare) {
  uint32_t old = __atomic_load_n(at, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(
      at, &old, (uint32_t)update(old, data, compare), true, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) continue;
  return old;
}
static uint64_t exchange64(uint64_t *at, update_t update, uint64_t data, uint64_t compare) {
  uint64_t old = __atomic_load_n(at, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(at, &old, update(old, data, compare), true, __ATOMIC_SEQ_CST,
                                      __ATOMIC_RELAXED))
    continue;
  return old;
}

// ---- lanes
typedef struct {
  lanes64_t data, compare;
  uint64_t undefined;
} operands_t;

static void read_operand(const wave_t *w, const operand_t *o, unsigned first, unsigned dwords, lanes64_t *out,
                         uint64_t *undefined) {
  if (o->kind != VGPR) return;
  const uint32_t *low = w->v[o->index + first], *high = w->v[o->index + first + 1];
  for (unsigned d = 0; d < dwords; d++) *undefined |= ~w->v_defined[o->index + first + d];
  if (dwords == 1) FOR_LANES(l) out->lane[l] = low[l];
  else FOR_LANES(l) out->lane[l] = low[l] | (uint64_t)high[l] << 32;
}

// For global memory, the compared value is in the registers after the data. For LDS, it is a separate
// operand.
static void read_operands(const wave_t *w, const instruction_t *i, unsigned dwords, bool in_lds,
                          operands_t *out) {
  const operand_t *data = &i->operand[in_lds ? SRC1 : SRC2], *compare = &i->operand[SRC2];
  memset(out, 0, sizeof *out);
  read_operand(w, data, 0, dwords, &out->data, &out->undefined);
  if (in_lds) read_operand(w, compare, 0, dwords, &out->compare, &out->undefined);
  else if (data->dwords == 2 * dwords)
    read_operand(w, compare, dwords, dwords, &out->compare, &out->undefined);
  out->undefined &= exec_lanes(w);
}

static void update_lane(
    uint8_t *at, int l, unsigned bytes, update_t update, const operands_t *operands, lanes64_t *before) {
  const uint64_t data = operands->data.lane[l], compare = operands->compare.lane[l];
  before->lane[l] = bytes == 4 ? exchange32((uint32_t *)at, update, data, compare)
                               : exchange64((uint64_t *)at, update, data, compare);
}

static uint64_t aligned_lanes(
    wave_t *w, const instruction_t *i, const lanes64_t *address, uint64_t lanes, unsigned bytes) {
  uint64_t misaligned = 0;
  FOR_LANES(l) misaligned |= (uint64_t)(address->lane[l] % bytes != 0) << l;
  misaligned &= lanes;
  if (!misaligned) return lanes;
  const int first = __builtin_ctzll(misaligned);
  report(w, i, MISALIGNED, first, address->lane[first], w->index);
  w->undefined |= misaligned;
  return lanes & ~misaligned;
}

static void update_global(wave_t *w, const instruction_t *i, const lanes64_t *address, uint64_t lanes,
                          unsigned bytes, update_t update, const operands_t *operands, lanes64_t *before) {
  const uint64_t undefined = operands->undefined & lanes;
  if (undefined) {
    const int first = __builtin_ctzll(undefined);
    report(w, i, UNDEFINED_STORED, first, address->lane[first], w->index);
  }
  const uint64_t aligned = aligned_lanes(w, i, address, lanes, bytes);
  const uint64_t live = global_live_lanes(w, i, address, aligned, bytes, true);
  w->undefined |= aligned & ~live;
  FOR_SET_LANES(l, live) {
    update_lane((uint8_t *)(uintptr_t)address->lane[l], l, bytes, update, operands, before);
    const uint64_t old = before->lane[l];
    w->group->has_effect |= update(old, operands->data.lane[l], operands->compare.lane[l]) != old;
  }
  if (w->group->order) order_after(w, i, address, live);
}

static void update_lds(wave_t *w, const instruction_t *i, const lanes64_t *address, uint64_t lanes,
                       unsigned bytes, update_t update, const operands_t *operands, lanes64_t *before) {
  lanes32_t low;
  FOR_LANES(l) low.lane[l] = (uint32_t)address->lane[l];
  const uint64_t aligned = aligned_lanes(w, i, address, lanes, bytes);
  const uint64_t inside = lds_atomic_lanes(w, i, &low, aligned, bytes, operands->undefined);
  FOR_SET_LANES(l, inside) update_lane(w->group->lds + low.lane[l], l, bytes, update, operands, before);
}

static void write_before(wave_t *w, const instruction_t *i, unsigned bytes, const lanes64_t *before) {
  if (!(i->memory & MEMORY_RETURNS)) return;
  moved_t rows;
  for (unsigned d = 0; d < bytes / 4; d++)
    FOR_LANES(l) rows.dword[d][l] = (uint32_t)(before->lane[l] >> 32 * d);
  for (unsigned d = 0; d < bytes / 4; d++) write_register(w, i->operand[DST].index + d, rows.dword[d]);
}

// ---- address spaces
static void global_atomic(wave_t *w, const instruction_t *i, unsigned bytes, update_t update) {
  lanes64_t address, before;
  operands_t operands;
  memset(&before, 0xff, sizeof before);
  const uint64_t lanes = global_addresses(w, i, &address);
  read_operands(w, i, bytes / 4, false, &operands);
  update_global(w, i, &address, lanes, bytes, update, &operands, &before);
  write_before(w, i, bytes, &before);
}

// An access that is not entirely inside of the buffer does nothing and returns 0.
static void buffer_atomic(wave_t *w, const instruction_t *i, unsigned bytes, update_t update) {
  lanes64_t address, before;
  lanes32_t in_range;
  operands_t operands;
  const uint64_t lanes = buffer_addresses(w, i, &address, &in_range);
  uint64_t whole = 0;
  FOR_LANES(l) {
    whole |= (uint64_t)(in_range.lane[l] >= bytes) << l;
    before.lane[l] = has_lane(lanes & ~whole, l) ? 0 : ~0ull;
  }
  read_operands(w, i, bytes / 4, false, &operands);
  update_global(w, i, &address, lanes & whole, bytes, update, &operands, &before);
  write_before(w, i, bytes, &before);
}

static void ds_atomic(wave_t *w, const instruction_t *i, unsigned bytes, update_t update) {
  lanes32_t low;
  lanes64_t address, before;
  operands_t operands;
  memset(&before, 0xff, sizeof before);
  const uint64_t lanes = lds_addresses(w, i, i->offset, &low);
  FOR_LANES(l) address.lane[l] = low.lane[l];
  read_operands(w, i, bytes / 4, true, &operands);
  update_lds(w, i, &address, lanes, bytes, update, &operands, &before);
  write_before(w, i, bytes, &before);
}

// The upper half of a flat address selects the address space. Scratch is not supported: as it belongs to one
// lane, no compiler generates atomic operations on it.
static void flat_atomic(wave_t *w, const instruction_t *i, unsigned bytes, update_t update) {
  lanes64_t address, before;
  operands_t operands;
  uint64_t lds = 0, scratch = 0;
  memset(&before, 0xff, sizeof before);
  const uint64_t lanes = global_addresses(w, i, &address);
  FOR_LANES(l) {
    lds |= (uint64_t)(address.lane[l] >> 32 == aperture(0) >> 32) << l;
    scratch |= (uint64_t)(address.lane[l] >> 32 == aperture(2) >> 32) << l;
  }
  if (lanes & scratch) { fail(w, i, UNKNOWN_INSTRUCTION, LAUNCH_UNKNOWN_INSTRUCTION); return; }
  read_operands(w, i, bytes / 4, false, &operands);
  update_global(w, i, &address, lanes & ~lds, bytes, update, &operands, &before);
  if (lanes & lds) update_lds(w, i, &address, lanes & lds, bytes, update, &operands, &before);
  write_before(w, i, bytes, &before);
}

#define IN_MEMORY(name, size, value) \
  static void global_atomic_##name(wave_t *w, const instruction_t *i) { \
    global_atomic(w, i, size, update_##name); \
  } \
  static void buffer_atomic_##name(wave_t *w, const instruction_t *i) { \
    buffer_atomic(w, i, size, update_##name); \
  } \
  static void flat_atomic_##name(wave_t *w, const instruction_t *i) { \
    flat_atomic(w, i, size, update_##name); \
  }
FOR_EVERYWHERE(IN_MEMORY)
FOR_MEMORY_ONLY(IN_MEMORY)

#define IN_LDS(name, size, value) \
  static void ds_##name(wave_t *w, const instruction_t *i) { ds_atomic(w, i, size, update_##name); }
FOR_EVERYWHERE(IN_LDS)
FOR_LDS_ONLY(IN_LDS)

#define MEMORY_ROWS(name, size, value) \
  {"global_atomic_" #name, global_atomic_##name}, {"buffer_atomic_" #name, buffer_atomic_##name}, \
  {"flat_atomic_" #name, flat_atomic_##name},
#define LDS_ROW(name, size, value) {"ds_" #name, ds_##name},

OPERATIONS(atomics) = {
  FOR_EVERYWHERE(MEMORY_ROWS)
  FOR_MEMORY_ONLY(MEMORY_ROWS)
  FOR_EVERYWHERE(LDS_ROW)
  FOR_LDS_ONLY(LDS_ROW)
  {NULL, NULL},
};
