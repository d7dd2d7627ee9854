// Matrix operations of RDNA 3 and 4 (WMMA), with results of 16 x 16 elements. They ignore EXEC.
#include "matrix.h"

// RDNA 3: each 16 lanes hold a copy of A and B, and rows of D are distributed in turn over the groups of 16
// lanes.
#define SHAPE_11 \
  {.m = 16, .n = 16, .k = 16, .blocks = 1, .groups = 1, .k_run = 16, .row_run = 1, .replicates = true}
// RDNA 4: lanes hold runs of k of at most 4 (16-bit elements) or 8 (8 and 4 bits), and consecutive rows of D.
#define SHAPE_12(K, GROUPS, RUN, SWAPS) \
  {.m = 16, .n = 16, .k = K, .blocks = 1, .groups = GROUPS, .k_run = RUN, .row_run = 256 / LANES, \
   .swaps_k = SWAPS, .swaps_rows = LANES == 64}

#define NUM_GROUPS (LANES / 16)
static const shape_t shape_11 = SHAPE_11;
static const shape_t shape_12_16_bits = SHAPE_12(16, NUM_GROUPS, 4, false);
static const shape_t shape_12_8_bits = SHAPE_12(16, NUM_GROUPS, 16 / NUM_GROUPS, LANES == 64);
static const shape_t shape_12_4_bits = SHAPE_12(16, 2, 8, false);  // lanes from 32 on are not read
static const shape_t shape_12_4_bits_32 = SHAPE_12(32, NUM_GROUPS, 32 / NUM_GROUPS, LANES == 64);

static bool is_rdna3(const wave_t *w) { return w->group->kernel->header.generation == 11; }

// NEG negates the lower halves of the registers of A and B, NEG_HI the upper halves.
static source_t floats(const instruction_t *i, enum format format, int n) {
  const bool has_halves = format == F16 || format == BF16;
  return (source_t){format, has_halves && (i->neg >> n & 1), has_halves && (i->neg_hi >> n & 1), 0};
}
static void read_sources(
    wave_t *w, const instruction_t *i, const shape_t *s, source_t a, source_t b, matrices_t *x) {
  x->cbsz = x->abid = 0;
  x->a_defined = read_rows(w, &i->operand[SRC0], s, 16, a, x->a);
  x->b_defined = read_rows(w, &i->operand[SRC1], s, 16, b, x->b);
}
// For C, NEG_HI means the absolute value, and NEG negation after it.
static void modify_c(const instruction_t *i, float *c) {
  if (i->neg_hi & 4) for (int n = 0; n < 256; n++) c[n] = fabsf(c[n]);
  if (i->neg & 4) for (int n = 0; n < 256; n++) c[n] = -c[n];
}

static void wmma_f32(wave_t *w, const instruction_t *i, const shape_t *s, enum format a, enum format b) {
  matrices_t x;
  if (!has_registers(w, i)) return;
  read_sources(w, i, s, floats(i, a, 0), floats(i, b, 1), &x);
  read_c_f32(w, &i->operand[SRC2], s, &x);
  modify_c(i, x.d);
  multiply(s, &x);
  write_d_f32(w, i, s, &x);
  count_multiply_adds(w, s);
}

// ---- 16-bit C and D: sums are rounded once at the end. On RDNA 3, a register has one element in the half
// that OPSEL selects, and its other half is kept. On RDNA 4, a register has two elements.
static void place_half(const wave_t *w, const instruction_t *i, int element, unsigned *offset, int *shift) {
  *offset = (unsigned)(is_rdna3(w) ? element : element / 2);
  *shift = (is_rdna3(w) ? i->opsel & 4 : element & 1) ? 16 : 0;
}
static void read_c_halves(
    wave_t *w, const instruction_t *i, const shape_t *s, enum format format, matrices_t *x) {
  const operand_t *o = &i->operand[SRC2];
  for (int e = 0; e < result_elements(s); e++) {
    unsigned offset;
    int shift;
    uint32_t c[MAX_LANES];
    float lanes[MAX_LANES] = {0};
    place_half(w, i, e, &offset, &shift);
    if (o->kind != VGPR) shift = 0;
    read_c(w, o, (int)offset, c);
    FOR_LANES(l) c[l] = c[l] >> shift & 0xffff;
    to_f32(format, c, lanes);
    rows_from_lanes(s, e, lanes, x->d);
  }
}
static void write_d_halves(
    wave_t *w, const instruction_t *i, const shape_t *s, enum format format, const matrices_t *x) {
  const operand_t *o = &i->operand[SRC2];
  for (int e = 0; e < result_elements(s); e++) {
    unsigned offset;
    int shift;
    float lanes[MAX_LANES] = {0};
    place_half(w, i, e, &offset, &shift);
    lanes_from_rows(s, e, x->d, lanes);
    const unsigned index = i->operand[DST].index + offset;
    const uint64_t c_defined = o->kind == VGPR ? w->v_defined[o->index + offset] : ~0ull;
    const uint32_t keep = 0xffff0000u >> shift;
    FOR_LANES(l) {
      const uint32_t half = format == F16 ? f32_to_f16(lanes[l]) : f32_to_bf16(lanes[l]);
      w->v[index][l] = (w->v[index][l] & keep) | half << shift;
    }
    const uint64_t defined = c_defined & defined_results(s, x, e);
    w->v_defined[index] = is_rdna3(w) || !shift ? defined : w->v_defined[index] & defined;
  }
}
static void wmma_halves(wave_t *w, const instruction_t *i, const shape_t *s, enum format format) {
  matrices_t x;
  if (!has_registers(w, i)) return;
  read_sources(w, i, s, floats(i, format, 0), floats(i, format, 1), &x);
  read_c_halves(w, i, s, format, &x);
  modify_c(i, x.d);
  multiply(s, &x);
  write_d_halves(w, i, s, format, &x);
  count_multiply_adds(w, s);
}

// ---- integers: NEG tells whether A and B are signed; CLAMP makes sums saturate
static source_t integers(const instruction_t *i, enum format is_signed, enum format is_unsigned, int n) {
  return (source_t){.format = i->neg >> n & 1 ? is_signed : is_unsigned};
}
static void wmma_i32(
    wave_t *w, const instruction_t *i, const shape_t *s, enum format is_signed, enum format is_unsigned) {
  matrices_t x;
  if (!has_registers(w, i)) return;
  const source_t a = integers(i, is_signed, is_unsigned, 0), b = integers(i, is_signed, is_unsigned, 1);
  read_sources(w, i, s, a, b, &x);
  memset(x.d, 0, sizeof x.d);
  multiply(s, &x);
  write_d_i32(w, i, s, &x, i->clamp);
  count_multiply_adds(w, s);
}

// ---- operations: X(name, function, shape on RDNA 4, formats)
#define FOR_OPERATIONS(X) \
  X(v_wmma_f32_16x16x16_f16, wmma_f32, shape_12_16_bits, F16, F16) \
  X(v_wmma_f32_16x16x16_bf16, wmma_f32, shape_12_16_bits, BF16, BF16) \
  X(v_wmma_f16_16x16x16_f16, wmma_halves, shape_12_16_bits, F16) \
  X(v_wmma_bf16_16x16x16_bf16, wmma_halves, shape_12_16_bits, BF16) \
  X(v_wmma_i32_16x16x16_iu8, wmma_i32, shape_12_8_bits, I8, U8) \
  X(v_wmma_i32_16x16x16_iu4, wmma_i32, shape_12_4_bits, I4, U4) \
  X(v_wmma_i32_16x16x32_iu4, wmma_i32, shape_12_4_bits_32, I4, U4) \
  X(v_wmma_f32_16x16x16_fp8_fp8, wmma_f32, shape_12_8_bits, FP8, FP8) \
  X(v_wmma_f32_16x16x16_fp8_bf8, wmma_f32, shape_12_8_bits, FP8, BF8) \
  X(v_wmma_f32_16x16x16_bf8_fp8, wmma_f32, shape_12_8_bits, BF8, FP8) \
  X(v_wmma_f32_16x16x16_bf8_bf8, wmma_f32, shape_12_8_bits, BF8, BF8)

#define DEFINE(name, how, shape, ...) \
  static void name(wave_t *w, const instruction_t *i) { \
    how(w, i, is_rdna3(w) ? &shape_11 : &shape, __VA_ARGS__); \
  }
FOR_OPERATIONS(DEFINE)

OPERATIONS(wmma) = {FOR_OPERATIONS(ROW) {NULL, NULL}};
