// Matrix operations D = A * B + C: copy A, B and C from registers to dense matrices, multiply, copy D back.
//
// Layout in registers (AMD, "Matrix Instruction Calculator", and the ISA manuals): lanes form groups with one
// lane for each row of A (or column of B) of all blocks. A lane's registers hold elements of this row in runs
// of consecutive k: k first counts through the first runs of all groups, then through their second runs. D
// has the same layout with groups of one lane per column, and runs of consecutive rows.
//
// Products are added in the order of k, beginning with C, by f32 fused multiply-adds. MI300 does the same for
// f32; for smaller types it adds groups of products with more bits and truncates (Xie et al., "MMA-Sim",
// arXiv 2511.10909), so the hardware's results may differ in the last bits. Denormals are kept, as on CDNA 3
// (ibid.); only CDNA 2 flushes those of f16 and bf16 factors and of their f32 sums to zero (AMD, MIOpen, "MI200 MFMA
// behavior specifics"). Products of integers and their sums are below 2^24, where f32 is exact.
#pragma once
#include "matrix_formats.h"

typedef struct {
  int m, n, k, blocks;
  int groups;        // groups of lanes that hold the same rows with different k
  int k_run;         // length of runs of consecutive k in a lane
  int row_run;       // length of runs of consecutive rows of D in a lane
  bool swaps_k, swaps_rows;  // the second and third group are exchanged (RDNA 4, 64 lanes)
  bool replicates;   // each 16 lanes hold a copy of A and B (RDNA 3)
} shape_t;

// Dense matrices: a[k][block, row], b[k][block, column], d[block, row][column].
#define MAX_ELEMENTS 2048
typedef struct {
  float a[MAX_ELEMENTS] __attribute__((aligned(64)));
  float b[MAX_ELEMENTS] __attribute__((aligned(64)));
  float d[MAX_ELEMENTS] __attribute__((aligned(64)));
  uint64_t a_defined, b_defined;  // a bit per row of A (column of B) of all blocks
  int cbsz, abid;  // tell which blocks share an A (block_of_a)
} matrices_t;

// How a source is read: its format, which elements are negated, and from which lanes values are taken.
typedef struct {
  enum format format;
  bool negates_even, negates_odd;  // negates the elements of a lane with even or odd numbers
  int pattern;                     // the field BLGP, an index of lane_patterns
} source_t;

// Returns the k of a lane's element in A or B, or the row of its element in D. Runs of all groups are
// interleaved.
static inline int position(int run, int groups, bool swaps, int element, int group) {
  if (swaps && (group == 1 || group == 2)) group = 3 - group;
  return run * (groups * (element / run) + group) + element % run;
}

// BLGP (CDNA 3 ISA, "Broadcasting values"): for each 16 lanes, from which 16 lanes they take their values.
static const uint8_t lane_patterns[8][4] = {
  {0, 1, 2, 3}, {0, 1, 0, 1}, {2, 3, 2, 3}, {1, 2, 3, 0},
  {0, 0, 0, 0}, {1, 1, 1, 1}, {2, 2, 2, 2}, {3, 3, 3, 3},
};
static inline void permute_lanes(int pattern, float *x) {
  float from[MAX_LANES];
  memcpy(from, x, sizeof from);
  for (int g = 0; g < 4; g++) memcpy(x + 16 * g, from + 16 * lane_patterns[pattern][g], 16 * sizeof *x);
}
static inline uint64_t permute_mask(int pattern, uint64_t lanes) {
  uint64_t out = 0;
  for (int g = 0; g < 4; g++) out |= (lanes >> 16 * lane_patterns[pattern][g] & 0xffff) << 16 * g;
  return out;
}

// Returns the lanes in which all registers of an operand are defined.
static inline uint64_t defined_lanes(const wave_t *w, const operand_t *o, int registers) {
  uint64_t defined = ~0ull;
  for (int r = 0; r < registers; r++) defined &= w->v_defined[o->index + r];
  return defined;
}

// Returns the rows whose copies in other lanes differ. The hardware's result for them is not documented.
static inline uint64_t differing_rows(const uint32_t *bits, int width) {
  uint64_t rows = 0;
  for (int l = width; l < LANES; l++) rows |= (uint64_t)(bits[l] != bits[l % width]) << l % width;
  return rows;
}

// Reads A or B to out[k][block, row]; returns the rows in which all elements are defined.
static inline uint64_t read_rows(
    const wave_t *w, const operand_t *o, const shape_t *s, int rows, source_t source, float *out) {
  const int width = rows * s->blocks, elements = s->k / s->groups, bits = format_bits(source.format);
  const size_t row_bytes = sizeof *out * (size_t)width;
  uint64_t defined = permute_mask(source.pattern, defined_lanes(w, o, (elements * bits + 31) / 32));
  uint64_t all = ~0ull;
  for (int e = 0; e < elements; e++) {
    uint32_t raw[MAX_LANES];
    float x[MAX_LANES] = {0};
    read_bits(w, o->index, bits, e, raw);
    to_f32(source.format, raw, x);
    if (source.pattern) permute_lanes(source.pattern, x);
    if (e % 2 ? source.negates_odd : source.negates_even) FOR_LANES(l) x[l] = -x[l];
    if (s->replicates) defined &= ~differing_rows(raw, width);
    for (int g = 0; g < s->groups; g++)
      memcpy(out + position(s->k_run, s->groups, s->swaps_k, e, g) * width, x + g * width, row_bytes);
  }
  for (int l = 0; l < (s->replicates ? LANES : s->groups * width); l += width) all &= defined >> l;
  return all;
}

// ---- the product
static inline __attribute__((always_inline)) void multiply_row(
    const float *a, int a_step, const float *b, int b_step, int k, int n, float *d) {
  float sum[32];
  for (int j = 0; j < n; j++) sum[j] = d[j];
  for (int l = 0; l < k; l++)
    for (int j = 0; j < n; j++) sum[j] = __builtin_fmaf(a[l * a_step], b[l * b_step + j], sum[j]);
  for (int j = 0; j < n; j++) d[j] = sum[j];
}
// CBSZ and ABID (CDNA 3 ISA, "Broadcasting values"): each 2^cbsz blocks use the A of the block `abid` among
// them.
static inline int block_of_a(const matrices_t *x, int block) {
  return (block >> x->cbsz << x->cbsz) + (x->abid & ((1 << x->cbsz) - 1));
}
static inline void multiply(const shape_t *s, matrices_t *x) {
  const int a_step = s->m * s->blocks, b_step = s->n * s->blocks;
  for (int block = 0; block < s->blocks; block++) {
    const float *a = x->a + block_of_a(x, block) * s->m, *b = x->b + block * s->n;
    for (int row = 0; row < s->m; row++) {
      float *d = x->d + (block * s->m + row) * s->n;
      if (s->n == 16) multiply_row(a + row, a_step, b, b_step, s->k, 16, d);
      else if (s->n == 32) multiply_row(a + row, a_step, b, b_step, s->k, 32, d);
      else multiply_row(a + row, a_step, b, b_step, s->k, 4, d);
    }
  }
}

// ---- C and D
static inline int result_elements(const shape_t *s) { return s->m * s->n * s->blocks / LANES; }
static inline int result_row(const shape_t *s, int element, int group) {
  return position(s->row_run, LANES / s->n, s->swaps_rows, element, group);
}
// Copy between the lanes of one register and the rows of D that the lanes hold.
static inline void rows_from_lanes(const shape_t *s, int element, const float *lanes, float *d) {
  for (int g = 0; g < LANES / s->n; g++)
    memcpy(d + result_row(s, element, g) * s->n, lanes + g * s->n, sizeof *d * (size_t)s->n);
}
static inline void lanes_from_rows(const shape_t *s, int element, const float *d, float *lanes) {
  for (int g = 0; g < LANES / s->n; g++)
    memcpy(lanes + g * s->n, d + result_row(s, element, g) * s->n, sizeof *d * (size_t)s->n);
}
// Returns the lanes in which an element of D is defined, because its row of A and column of B are.
static inline uint64_t defined_results(const shape_t *s, const matrices_t *x, int element) {
  const uint64_t columns = (1ull << s->n) - 1;
  uint64_t lanes = 0;
  for (int g = 0; g < LANES / s->n; g++) {
    const int row = result_row(s, element, g), block = row / s->m;
    const bool is_defined = x->a_defined >> (block_of_a(x, block) * s->m + row % s->m) & 1;
    if (is_defined) lanes |= (x->b_defined >> block * s->n & columns) << g * s->n;
  }
  return lanes;
}
// Reads 32 bits per lane of C, from the element's register or a constant; returns the lanes that are defined.
static inline uint64_t read_c(wave_t *w, const operand_t *o, int element, uint32_t *out) {
  if (o->kind == VGPR) {
    memcpy(out, w->v[o->index + element], sizeof *out * LANES);
    return w->v_defined[o->index + element];
  }
  const uint32_t x = read_scalar32(w, o);
  FOR_LANES(l) out[l] = x;
  return ~0ull;
}

static inline void read_c_f32(wave_t *w, const operand_t *o, const shape_t *s, matrices_t *x) {
  for (int e = 0; e < result_elements(s); e++) {
    uint32_t c[MAX_LANES];
    float lanes[MAX_LANES] = {0};
    read_c(w, o, e, c);
    to_f32(F32, c, lanes);
    rows_from_lanes(s, e, lanes, x->d);
  }
}
// Writes D. An element is defined if its row of A, its column of B and its element of C are. The registers of
// C and D may be the same.
static inline void write_d_f32(wave_t *w, const instruction_t *i, const shape_t *s, const matrices_t *x) {
  const unsigned first = i->operand[DST].index;
  const operand_t *o = &i->operand[SRC2];
  for (int e = 0; e < result_elements(s); e++) {
    const uint64_t c_defined = o->kind == VGPR ? w->v_defined[o->index + e] : ~0ull;
    float lanes[MAX_LANES] = {0};
    lanes_from_rows(s, e, x->d, lanes);
    FOR_LANES(l) w->v[first + e][l] = f32_bits(lanes[l]);
    w->v_defined[first + e] = c_defined & defined_results(s, x, e);
  }
}
static inline int32_t saturated(int64_t x) {
  return x > INT32_MAX ? INT32_MAX : x < INT32_MIN ? INT32_MIN : (int32_t)x;
}
// Writes D = C + sums of products, which wraps or saturates.
static inline void write_d_i32(
    wave_t *w, const instruction_t *i, const shape_t *s, const matrices_t *x, bool saturates) {
  const unsigned first = i->operand[DST].index;
  for (int e = 0; e < result_elements(s); e++) {
    uint32_t c[MAX_LANES];
    float sums[MAX_LANES] = {0};
    const uint64_t c_defined = read_c(w, &i->operand[SRC2], e, c);
    lanes_from_rows(s, e, x->d, sums);
    uint32_t *d = w->v[first + e];
    if (saturates) FOR_LANES(l) d[l] = (uint32_t)saturated((int64_t)(int32_t)c[l] + (int32_t)sums[l]);
    else FOR_LANES(l) d[l] = c[l] + (uint32_t)(int32_t)sums[l];
    w->v_defined[first + e] = c_defined & defined_results(s, x, e);
  }
}

// Whether A, B and D are vector registers; other operands are not supported and stop the kernel.
static inline bool has_registers(wave_t *w, const instruction_t *i) {
  const operand_t *o = i->operand;
  if (o[SRC0].kind == VGPR && o[SRC1].kind == VGPR && o[DST].kind == VGPR) return true;
  fail(w, i, UNKNOWN_INSTRUCTION, LAUNCH_UNKNOWN_INSTRUCTION);
  return false;
}
static inline void count_multiply_adds(wave_t *w, const shape_t *s) {
  w->counters.matrix_operations += (uint64_t)s->m * s->n * s->k * s->blocks;
}
