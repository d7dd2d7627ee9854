// Matrix operations of CDNA (MFMA), for waves of 64 lanes. They ignore EXEC.
#include "matrix.h"

#if LANES == 64

// Each lane holds one run of consecutive k, and runs of four consecutive rows of D.
#define SHAPE(M_, K_, BLOCKS) \
  {.m = M_, .n = M_, .k = K_, .blocks = BLOCKS, .groups = 64 / (M_ * BLOCKS), \
   .k_run = K_ * M_ * BLOCKS / 64, .row_run = 4}

static void read_sources(
    wave_t *w, const instruction_t *i, const shape_t *s, enum format a, enum format b, matrices_t *x) {
  x->cbsz = i->cbsz;
  x->abid = i->abid;
  x->a_defined = read_rows(w, &i->operand[SRC0], s, s->m, (source_t){.format = a}, x->a);
  x->b_defined = read_rows(w, &i->operand[SRC1], s, s->n, (source_t){.format = b, .pattern = i->blgp}, x->b);
}

static void flush_sums(const shape_t *s, matrices_t *x) {
  for (int n = 0; n < s->m * s->n * s->blocks; n++) x->d[n] = as_f32(flushed(f32_bits(x->d[n]), 0x7f800000, 1u << 31));
}

static void mfma_f32(wave_t *w, const instruction_t *i, const shape_t *s, enum format a, enum format b) {
  matrices_t x;
  if (!has_registers(w, i)) return;
  read_sources(w, i, s, a, b, &x);
  const bool flushes = a == F16_FLUSH || a == BF16_FLUSH;
  read_c_f32(w, &i->operand[SRC2], s, &x);
  if (flushes) flush_sums(s, &x);
  multiply(s, &x);
  if (flushes) flush_sums(s, &x);
  write_d_f32(w, i, s, &x);
  count_multiply_adds(w, s);
}

// Sums wrap, as the encoding has no clamp bit.
static void mfma_i32(wave_t *w, const instruction_t *i, const shape_t *s, enum format a, enum format b) {
  matrices_t x;
  if (!has_registers(w, i)) return;
  read_sources(w, i, s, a, b, &x);
  memset(x.d, 0, sizeof x.d);
  multiply(s, &x);
  write_d_i32(w, i, s, &x, false);
  count_multiply_adds(w, s);
}

// ---- f8f6f4 (CDNA 4 ISA, "MFMA with block exponent scaling")

static enum format small_format(int selector) {
  static const uint8_t formats[] = {FP8, BF8, FP6, BF6, FP4, FP4, FP4, FP4};
  return formats[selector & 7];
}
// A lane holds 32 consecutive k, or two runs of 16 for elements of 8 bits (AMD, "Matrix Core Programming on
// AMD CDNA 3 and CDNA 4 architecture", and the tables in composable_kernel's test/mx_mfma_op).
static uint64_t read_small(wave_t *w, const operand_t *o, const shape_t *s, int selector, float *out) {
  shape_t layout = *s;
  layout.k_run = selector < 2 ? 16 : 32;
  return read_rows(w, o, &layout, s->m, (source_t){.format = small_format(selector)}, out);
}

// Scales, which are powers of two (E8M0), one for each row and 32 consecutive k. Lane row + rows * (k / 32)
// holds it in byte `byte`. Returns the rows whose scales are defined.
typedef struct { double of[MAX_LANES]; } scales_t;
static uint64_t read_scales(wave_t *w, const operand_t *o, const shape_t *s, int byte, scales_t *out) {
  uint64_t defined = o->kind == VGPR ? w->v_defined[o->index] : ~0ull;
  const uint32_t constant = o->kind == VGPR ? 0 : read_scalar32(w, o);
  FOR_LANES(l) {
    const uint64_t exponent = (o->kind == VGPR ? w->v[o->index][l] : constant) >> 8 * byte & 255;
    out->of[l] = exponent == 255 ? NAN : as_f64((exponent + 1023 - 127) << 52);
  }
  for (int l = s->m; l < LANES; l += s->m) defined &= defined >> s->m;
  return defined;
}
// Each sum of 32 products is computed in f32, scaled exactly, and added to D with one rounding.
static void multiply_scaled(const shape_t *s, matrices_t *x, const scales_t *a, const scales_t *b) {
  for (int row = 0; row < s->m; row++)
    for (int block = 0; block < s->k / 32; block++) {
      float sum[32] = {0}, *d = x->d + row * s->n;
      multiply_row(x->a + 32 * block * s->m + row, s->m, x->b + 32 * block * s->n, s->n, 32, s->n, sum);
      for (int j = 0; j < s->n; j++)
        d[j] = (float)(d[j] + sum[j] * a->of[block * s->m + row] * b->of[block * s->n + j]);
    }
}
static int scale_byte(const instruction_t *i, int n) {
  return (i->opsel >> n & 1) + 2 * (i->opsel_hi >> n & 1);
}

static void mfma_small(wave_t *w, const instruction_t *i, const shape_t *s, bool is_scaled) {
  matrices_t x;
  scales_t a, b;
  if (!has_registers(w, i)) return;
  x.cbsz = x.abid = 0;
  x.a_defined = read_small(w, &i->operand[SRC0], s, i->cbsz, x.a);
  x.b_defined = read_small(w, &i->operand[SRC1], s, i->blgp, x.b);
  read_c_f32(w, &i->operand[SRC2], s, &x);
  if (is_scaled) {
    x.a_defined &= read_scales(w, &i->operand[SRC3], s, scale_byte(i, 0), &a);
    x.b_defined &= read_scales(w, &i->operand[DST2], s, scale_byte(i, 1), &b);
    multiply_scaled(s, &x, &a, &b);
  } else {
    multiply(s, &x);
  }
  write_d_f32(w, i, s, &x);
  count_multiply_adds(w, s);
}

// ---- sparse A of 16-bit elements: only two of each four consecutive k are stored, the others are zero. Each
// stored element has an index of two bits. A lane's indices are a byte of SRC2 that ABID selects, or the
// lowest bits of SRC2 if CBSZ is set (CDNA 3 ISA, "Sparse matrices"). C is the destination's old value.

static void spread_by_index(
    const wave_t *w, const instruction_t *i, const shape_t *s, const float *kept, matrices_t *x) {
  const operand_t *o = &i->operand[SRC2];
  const int first_bit = i->cbsz ? 0 : 8 * (i->abid & 3), per_lane = s->k_run / 2;
  memset(x->a, 0, sizeof x->a);
  for (int g = 0; g < s->groups; g++)
    for (int row = 0; row < s->m; row++) {
      const uint32_t indices = w->v[o->index][g * s->m + row] >> first_bit;
      for (int e = 0; e < per_lane; e++) {
        const int k = s->k_run * g + e / 2 * 4 + (int)(indices >> 2 * e & 3);
        x->a[k * s->m + row] = kept[(per_lane * g + e) * s->m + row];
      }
      if (!(w->v_defined[o->index] >> (g * s->m + row) & 1)) x->a_defined &= ~(1ull << row);
    }
}

static void smfmac_f32(wave_t *w, const instruction_t *i, const shape_t *s, enum format format) {
  matrices_t x;
  float kept[MAX_ELEMENTS];
  shape_t half = *s;
  instruction_t in_place = *i;
  if (!has_registers(w, i)) return;
  half.k /= 2, half.k_run /= 2;
  in_place.operand[SRC2] = i->operand[DST];
  x.cbsz = x.abid = 0;
  x.a_defined = read_rows(w, &i->operand[SRC0], &half, s->m, (source_t){.format = format}, kept);
  x.b_defined = read_rows(w, &i->operand[SRC1], s, s->n, (source_t){.format = format}, x.b);
  spread_by_index(w, i, s, kept, &x);
  read_c_f32(w, &in_place.operand[SRC2], s, &x);
  multiply(s, &x);
  write_d_f32(w, &in_place, s, &x);
  count_multiply_adds(w, &half);
}

// ---- f64 with four elements of k; BLGP negates A, B and C. Lane 16 * k + n holds element k of row n of A
// (column n of B), numbered through all blocks. Register pair e of D holds row e * 4 + lane / 16 of column
// lane % 16, also numbered through all blocks.

static double read_double(const wave_t *w, const operand_t *o, int pair, int lane) {
  if (o->kind != VGPR) return as_f64(o->value);
  const unsigned first = o->index + 2u * (unsigned)pair;
  return as_f64(w->v[first][lane] | (uint64_t)w->v[first + 1][lane] << 32);
}
static void read_doubles(const wave_t *w, const operand_t *o, int pairs, bool negates, double *out) {
  for (int e = 0; e < pairs; e++)
    FOR_LANES(l) out[LANES * e + l] = negates ? -read_double(w, o, e, l) : read_double(w, o, e, l);
}
// Returns the lanes in which a pair of registers is defined.
static uint64_t defined_pair(const wave_t *w, const operand_t *o, int pair) {
  if (o->kind != VGPR) return ~0ull;
  const unsigned first = o->index + 2u * (unsigned)pair;
  return w->v_defined[first] & w->v_defined[first + 1];
}
// Returns a mask whose bit n tells whether all elements of row n of A (column n of B) are defined.
static uint64_t defined_rows(const wave_t *w, const operand_t *o) {
  const uint64_t lanes = defined_pair(w, o, 0);
  return lanes & lanes >> 16 & lanes >> 32 & lanes >> 48 & 0xffff;
}
static void write_doubles(wave_t *w, const operand_t *o, int pair, const double *x, uint64_t defined) {
  const unsigned first = o->index + 2u * (unsigned)pair;
  FOR_LANES(l) {
    w->v[first][l] = (uint32_t)f64_bits(x[l]);
    w->v[first + 1][l] = (uint32_t)(f64_bits(x[l]) >> 32);
  }
  w->v_defined[first] = w->v_defined[first + 1] = defined;
}
static void mfma_f64(wave_t *w, const instruction_t *i, const shape_t *s) {
  double a[LANES], b[LANES], c[4 * LANES];
  if (!has_registers(w, i)) return;
  const operand_t *c_operand = &i->operand[SRC2];
  const int pairs = result_elements(s);
  read_doubles(w, &i->operand[SRC0], 1, i->blgp & 1, a);
  read_doubles(w, &i->operand[SRC1], 1, i->blgp & 2, b);
  read_doubles(w, c_operand, pairs, i->blgp & 4, c);
  const uint64_t rows = defined_rows(w, &i->operand[SRC0]), columns = defined_rows(w, &i->operand[SRC1]);
  for (int e = 0; e < pairs; e++) {
    double *d = c + LANES * e;
    uint64_t defined = defined_pair(w, c_operand, e);
    FOR_LANES(l) {
      const int column = l % 16, row = column / s->n * s->m + l / 16 + 4 * e;
      for (int k = 0; k < 4; k++) d[l] = __builtin_fma(a[16 * k + row], b[16 * k + column], d[l]);
      if (!(rows >> row & columns >> column & 1)) defined &= ~(1ull << l);
    }
    write_doubles(w, &i->operand[DST], e, d, defined);
  }
  count_multiply_adds(w, s);
}

// ---- operations: X(name, rows of A and columns of B, k, blocks, format of A, format of B)
#define SHAPES_F32(X) \
  X(v_mfma_f32_32x32x1_2b_f32, 32, 1, 2, F32, F32) X(v_mfma_f32_16x16x1_4b_f32, 16, 1, 4, F32, F32) \
  X(v_mfma_f32_4x4x1_16b_f32, 4, 1, 16, F32, F32) X(v_mfma_f32_32x32x2_f32, 32, 2, 1, F32, F32) \
  X(v_mfma_f32_16x16x4_f32, 16, 4, 1, F32, F32) \
  X(v_mfma_f32_16x16x8_xf32, 16, 8, 1, XF32, XF32) X(v_mfma_f32_32x32x4_xf32, 32, 4, 1, XF32, XF32)
#define SHAPES_16_BITS(X, type, format) \
  X(v_mfma_f32_32x32x4_2b_##type, 32, 4, 2, format, format) \
  X(v_mfma_f32_16x16x4_4b_##type, 16, 4, 4, format, format) \
  X(v_mfma_f32_4x4x4_16b_##type, 4, 4, 16, format, format) \
  X(v_mfma_f32_32x32x8_##type, 32, 8, 1, format, format) \
  X(v_mfma_f32_16x16x16_##type, 16, 16, 1, format, format) \
  X(v_mfma_f32_16x16x32_##type, 16, 32, 1, format, format) \
  X(v_mfma_f32_32x32x16_##type, 32, 16, 1, format, format)
#define SHAPES_CDNA2(X) \
  SHAPES_16_BITS(X, f16_flush, F16_FLUSH) SHAPES_16_BITS(X, bf16_flush, BF16_FLUSH) \
  X(v_mfma_f32_32x32x2_2b_bf16_flush, 32, 2, 2, BF16_FLUSH, BF16_FLUSH) \
  X(v_mfma_f32_16x16x2_4b_bf16_flush, 16, 2, 4, BF16_FLUSH, BF16_FLUSH) \
  X(v_mfma_f32_4x4x2_16b_bf16_flush, 4, 2, 16, BF16_FLUSH, BF16_FLUSH) \
  X(v_mfma_f32_32x32x4_bf16_flush, 32, 4, 1, BF16_FLUSH, BF16_FLUSH) \
  X(v_mfma_f32_16x16x8_bf16_flush, 16, 8, 1, BF16_FLUSH, BF16_FLUSH)
#define SHAPES_8_BITS(X, suffix, a, b) \
  X(v_mfma_f32_16x16x32_##suffix, 16, 32, 1, a, b) X(v_mfma_f32_32x32x16_##suffix, 32, 16, 1, a, b)
#define SHAPES_FP8(X) \
  SHAPES_8_BITS(X, fp8_fp8, FP8, FP8) SHAPES_8_BITS(X, fp8_bf8, FP8, BF8) \
  SHAPES_8_BITS(X, bf8_fp8, BF8, FP8) SHAPES_8_BITS(X, bf8_bf8, BF8, BF8) \
  SHAPES_8_BITS(X, fp8_fp8_fnuz, FP8_FNUZ, FP8_FNUZ) SHAPES_8_BITS(X, fp8_bf8_fnuz, FP8_FNUZ, BF8_FNUZ) \
  SHAPES_8_BITS(X, bf8_fp8_fnuz, BF8_FNUZ, FP8_FNUZ) SHAPES_8_BITS(X, bf8_bf8_fnuz, BF8_FNUZ, BF8_FNUZ)
#define FOR_F32(X) \
  SHAPES_F32(X) SHAPES_16_BITS(X, f16, F16) SHAPES_16_BITS(X, bf16, BF16) SHAPES_CDNA2(X) SHAPES_FP8(X)
#define FOR_I32(X) \
  X(v_mfma_i32_32x32x4_2b_i8, 32, 4, 2, I8, I8) X(v_mfma_i32_16x16x4_4b_i8, 16, 4, 4, I8, I8) \
  X(v_mfma_i32_4x4x4_16b_i8, 4, 4, 16, I8, I8) X(v_mfma_i32_32x32x8_i8, 32, 8, 1, I8, I8) \
  X(v_mfma_i32_16x16x16_i8, 16, 16, 1, I8, I8) X(v_mfma_i32_32x32x16_i8, 32, 16, 1, I8, I8) \
  X(v_mfma_i32_16x16x32_i8, 16, 32, 1, I8, I8) \
  X(v_mfma_i32_16x16x64_i8, 16, 64, 1, I8, I8) X(v_mfma_i32_32x32x32_i8, 32, 32, 1, I8, I8)
#define FOR_SMALL(X) \
  X(v_mfma_f32_16x16x128_f8f6f4, 16, 128, false) X(v_mfma_f32_32x32x64_f8f6f4, 32, 64, false) \
  X(v_mfma_scale_f32_16x16x128_f8f6f4, 16, 128, true) X(v_mfma_scale_f32_32x32x64_f8f6f4, 32, 64, true)
#define SPARSE_SHAPES(X, type, format) \
  X(v_smfmac_f32_16x16x32_##type, 16, 32, format) X(v_smfmac_f32_32x32x16_##type, 32, 16, format)
#define FOR_SPARSE(X) SPARSE_SHAPES(X, f16, F16) SPARSE_SHAPES(X, bf16, BF16)
#define FOR_F64(X) X(v_mfma_f64_16x16x4_f64, 16, 1) X(v_mfma_f64_4x4x4_4b_f64, 4, 4)

#define DEFINE(how, name, rows, k, blocks, ...) \
  static void name(wave_t *w, const instruction_t *i) { \
    static const shape_t shape = SHAPE(rows, k, blocks); \
    how(w, i, &shape __VA_ARGS__); \
  }
#define DEFINE_F32(name, rows, k, blocks, a, b) DEFINE(mfma_f32, name, rows, k, blocks, , a, b)
#define DEFINE_I32(name, rows, k, blocks, a, b) DEFINE(mfma_i32, name, rows, k, blocks, , a, b)
#define DEFINE_SMALL(name, rows, k, is_scaled) DEFINE(mfma_small, name, rows, k, 1, , is_scaled)
#define DEFINE_F64(name, rows, blocks) DEFINE(mfma_f64, name, rows, 4, blocks, )
#define DEFINE_SPARSE(name, rows, k, format) DEFINE(smfmac_f32, name, rows, k, 1, , format)
FOR_F32(DEFINE_F32) FOR_I32(DEFINE_I32) FOR_SMALL(DEFINE_SMALL) FOR_F64(DEFINE_F64) FOR_SPARSE(DEFINE_SPARSE)

OPERATIONS(mfma) = {FOR_F32(ROW) FOR_I32(ROW) FOR_SMALL(ROW) FOR_F64(ROW) FOR_SPARSE(ROW) {NULL, NULL}};

#else

OPERATIONS(mfma) = {{NULL, NULL}};

#endif
