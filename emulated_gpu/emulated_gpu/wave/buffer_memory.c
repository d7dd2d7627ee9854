// Accesses through buffer resources (V#). Outside of the buffer, a load returns 0 and a store is dropped.
//
// Sources: CDNA 3 and RDNA 3 ISA manuals, "Buffer Addressing" and "Range Checking"; LLVM, "User Guide for
// AMDGPU Backend" (relaxed buffer out-of-bounds mode), and its raw and structured buffer intrinsics.
#include "memory.h"

// The bounds check of an access. RAW: offset and size against the bytes of the buffer. STRUCTURED: the
// index against the number of records, and offset and size against the stride. INDEXED: the index only.
// EMPTY: that there are no records.
enum bounds { STRUCTURED, INDEXED, EMPTY, RAW };

typedef struct {
  uint64_t base;
  uint32_t records, stride, element, index_stride;
  bool swizzles, adds_lane;
  enum bounds bounds;
} resource_t;

static resource_t decode(const uint32_t word[4], int generation, bool has_index) {
  resource_t r = {
    .base = word[0] | (uint64_t)(word[1] & 0xffff) << 32,
    .records = word[2],
    .stride = word[1] >> 16 & 0x3fff,
    .index_stride = 8u << (word[3] >> 21 & 3),
    .adds_lane = word[3] >> 23 & 1,
  };
  if (generation == 9) {  // bit 30 only concerns the cache; an index selects the kind of range check (LLVM)
    r.swizzles = word[1] >> 31 && has_index;
    r.element = 4;
    r.bounds = !has_index || !r.stride ? RAW : r.swizzles ? STRUCTURED : INDEXED;
    return r;
  }
  const unsigned swizzle = word[1] >> 30;
  r.swizzles = swizzle;
  r.element = 2u << swizzle;
  r.bounds = (enum bounds)(word[3] >> 28 & 3);
  if (r.bounds == RAW && r.swizzles && r.stride) r.bounds = STRUCTURED;
  return r;
}

static uint64_t buffer_offset(const resource_t *r, uint64_t index, uint64_t offset) {
  if (!r->swizzles) return index * r->stride + offset;
  const uint64_t block = index / r->index_stride * r->stride + offset / r->element * r->element;
  return block * r->index_stride + index % r->index_stride * r->element + offset % r->element;
}

static uint64_t bytes_up_to(uint64_t end, uint64_t from) { return from < end ? end - from : 0; }

static uint64_t bytes_in_range(const resource_t *r, uint64_t index, uint64_t offset, uint64_t records) {
  switch (r->bounds) {
    case RAW: return bytes_up_to(records, index * r->stride + offset);
    case STRUCTURED: return index < r->records ? bytes_up_to(r->stride, offset) : 0;
    case INDEXED: return index < r->records ? ~0ull : 0;
    default: return r->records ? ~0ull : 0;
  }
}

// Reads the index and the offset of each lane, which are in consecutive registers if there are both. Returns
// the lanes in which one is undefined. The offset is a 32-bit sum that wraps: LLVM may split a constant
// offset into an immediate and a negative value in a register (before gfx1250, splitBufferOffsets).
static uint64_t read_index_and_offset(
    const wave_t *w, const instruction_t *i, const resource_t *r, lanes64_t *index, lanes64_t *offset) {
  const bool has_index = i->memory & MEMORY_IDXEN, has_offset = i->memory & MEMORY_OFFEN;
  const unsigned n = i->operand[SRC0].index;
  uint64_t defined = ~0ull;
  FOR_LANES(l) {
    index->lane[l] = r->adds_lane ? (uint64_t)l : 0;
    offset->lane[l] = (uint64_t)(int64_t)i->offset;
  }
  if (has_index) {
    FOR_LANES(l) index->lane[l] += w->v[n][l];
    defined &= w->v_defined[n];
  }
  if (has_offset) {
    FOR_LANES(l) offset->lane[l] = (uint32_t)(offset->lane[l] + w->v[n + has_index][l]);
    defined &= w->v_defined[n + has_index];
  }
  return ~defined;
}

uint64_t buffer_addresses(wave_t *w, const instruction_t *i, lanes64_t *address, lanes32_t *in_range) {
  const operand_t *o = &i->operand[SRC1];
  const int generation = w->group->kernel->header.generation;
  for (unsigned n = 0; n < 4; n++) note_scalar(w, o->index + n);
  const resource_t r = decode(&w->s[o->index], generation, i->memory & MEMORY_IDXEN);
  const uint64_t scalar = read_scalar32(w, &i->operand[SRC3]);
  // On CDNA (generation 9), the range check of a raw buffer includes the scalar offset.
  const uint64_t records = generation == 9 ? bytes_up_to(r.records, scalar) : r.records;
  lanes64_t index, offset;
  const uint64_t undefined = w->undefined | read_index_and_offset(w, i, &r, &index, &offset);
  FOR_LANES(l) {
    const uint64_t bytes = bytes_in_range(&r, index.lane[l], offset.lane[l], records);
    in_range->lane[l] = bytes < 16 ? (uint32_t)bytes : 16;
    address->lane[l] = r.base + scalar + buffer_offset(&r, index.lane[l], offset.lane[l]);
  }
  return lanes_with_address(w, i, undefined);
}

static uint64_t lanes_in_range(const lanes32_t *in_range, unsigned bytes) {
  uint64_t lanes = 0;
  FOR_LANES(l) lanes |= (uint64_t)(in_range->lane[l] >= bytes) << l;
  return lanes;
}

static lanes64_t moved_by(const lanes64_t *address, unsigned bytes) {
  lanes64_t out;
  FOR_LANES(l) out.lane[l] = address->lane[l] + bytes;
  return out;
}

// Checks each dword separately: an access across the end of the buffer loads the dwords that are in range.
static void load_in_range(wave_t *w, const instruction_t *i, const lanes64_t *address,
                          const lanes32_t *in_range, uint64_t lanes, moved_t *data) {
  const uint64_t whole = lanes & lanes_in_range(in_range, i->bytes), partly = lanes & ~whole;
  global_load_lanes(w, i, address, whole, i->bytes, data);
  for (unsigned d = 0; i->bytes > 4 && 4 * d < i->bytes; d++) {
    const lanes64_t at = moved_by(address, 4 * d);
    moved_t dword;
    const uint64_t some = partly & lanes_in_range(in_range, 4 * d + 4);
    global_load_lanes(w, i, &at, some, 4, &dword);
    FOR_SET_LANES(l, some) data->dword[d][l] = dword.dword[0][l];
  }
}

static uint64_t load(wave_t *w, const instruction_t *i, moved_t *data) {
  lanes64_t address;
  lanes32_t in_range;
  const uint64_t lanes = buffer_addresses(w, i, &address, &in_range);
  fill_moved(data, 0, i->bytes);
  poison_lanes(data, w->undefined, i->bytes);
  load_in_range(w, i, &address, &in_range, lanes, data);
  return lanes;
}

// Whether the resource is the one of scratch (group.c), of which each lane then accesses its own bytes.
static bool is_scratch(const wave_t *w, const instruction_t *i) {
  const uint32_t *word = &w->s[i->operand[SRC1].index];
  return !word[0] && !(word[1] & 0xffff) && word[3] >> 23 & 1;
}
static instruction_t of_scratch(wave_t *w, const instruction_t *i) {
  instruction_t out = *i;
  for (unsigned n = 0; n < 4; n++) note_scalar(w, i->operand[SRC1].index + n);
  out.operand[SRC1] = i->operand[SRC3];
  return out;
}

static void buffer_load(wave_t *w, const instruction_t *i) {
  if (is_scratch(w, i)) {
    const instruction_t scratch = of_scratch(w, i);
    scratch_load(w, &scratch);
    return;
  }
  moved_t data;
  load(w, i, &data);
  write_moved(w, i, 0, &data);
}

static void buffer_load_lds(wave_t *w, const instruction_t *i) {
  moved_t data;
  const uint64_t lanes = load(w, i, &data);
  lds_store_loaded(w, i, lanes, &data);
}

static void buffer_store(wave_t *w, const instruction_t *i) {
  if (is_scratch(w, i)) {
    const instruction_t scratch = of_scratch(w, i);
    scratch_store(w, &scratch);
    return;
  }
  lanes64_t address;
  lanes32_t in_range;
  moved_t data;
  const uint64_t lanes = buffer_addresses(w, i, &address, &in_range);
  const uint64_t undefined = read_moved(w, i, 2, i->bytes, &data);
  const uint64_t whole = lanes & lanes_in_range(&in_range, i->bytes), partly = lanes & ~whole;
  global_store_lanes(w, i, &address, whole, i->bytes, &data, undefined);
  for (unsigned d = 0; i->bytes > 4 && 4 * d < i->bytes; d++) {
    const lanes64_t at = moved_by(&address, 4 * d);
    moved_t dword;
    memcpy(dword.dword[0], data.dword[d], 4 * LANES);
    global_store_lanes(w, i, &at, partly & lanes_in_range(&in_range, 4 * d + 4), 4, &dword, undefined);
  }
}

OPERATIONS(buffer_memory) = {
  {"buffer_load", buffer_load},
  {"buffer_load_lds", buffer_load_lds},
  {"buffer_store", buffer_store},
  {NULL, NULL},
};
