// The state of a wave, and how operations read sources and write results.
//
// Files of operations are compiled twice, with LANES 32 and 64. An operation reads sources with `read_*`,
// which apply DPP, SDWA, half selection, absolute value and negation. It writes results with `write_*`, which
// apply clamping and half selection, and write only the lanes that EXEC and DPP allow. All of these functions
// track which values are defined.
#pragma once
#include <math.h>
#include <string.h>

#include "launch.h"

#define MAX_LANES 64
#define NUM_VGPRS 520
#define VCC_INDEX 106
#define M0_INDEX 124
#define EXEC_INDEX 126
#define POISON 0xffffffffu  // value of undefined registers, LDS and invalid loads; NaN in every float type

enum wave_state { WAVE_RUNS, WAVE_AT_BARRIER, WAVE_ENDED, WAVE_FAILED };

// The state of a 32-bit word of LDS. `writers` and `readers` have a byte for each byte of the word: the
// wave (plus 1) that touched it since the last barrier, SEVERAL_WAVES, or 0. The others have a bit for each byte.
#define SEVERAL_WAVES 0xff
typedef struct {
  uint32_t epoch;  // epoch of the last access; `writers`, `readers` and `atomic` are of this epoch
  uint32_t writers, readers;
  uint8_t atomic;   // bytes last written by an atomic operation
  uint8_t written;  // bytes written since the start of the workgroup
  uint8_t defined;
} lds_word_t;

typedef struct group {
  const kernel_t *kernel;
  const launch_t *launch;
  uint32_t id[3], num_waves;
  uint32_t epoch;  // number of barriers passed so far, plus 1
  uint8_t *lds;
  lds_word_t *lds_words;
  uint32_t lds_bytes;
  enum launch_status status;
  bool has_effect;  // whether it has changed global memory since this was last cleared
  struct unique_bytes *unique;  // NULL unless unique bytes are counted
  struct group_order *order;  // NULL unless order between workgroups is checked
} group_t;

// ---- waits for memory (waits.c)

typedef struct {
  uint32_t sequence;  // the access's number among those of its counter; 0: no access is outstanding
  uint8_t counter;
  uint8_t unordered;  // whether the access may be overtaken, so that only a wait for 0 covers it
} wait_ticket_t;

typedef struct {
  uint32_t issued[NUM_WAIT_COUNTERS], completed[NUM_WAIT_COUNTERS];
  uint32_t unordered[NUM_WAIT_COUNTERS];  // number of the last access that may overtake others
  uint32_t lds;  // number of the last access to LDS memory; exchanges between lanes are none
  wait_ticket_t vgpr[520][2], sgpr[128][2];  // per half of a register, as D16 loads fill one half
} waits_t;

typedef struct wave {
  uint32_t v[NUM_VGPRS][MAX_LANES] __attribute__((aligned(64)));
  uint64_t v_defined[NUM_VGPRS];  // lanes with a defined value
  uint32_t s[128];
  uint8_t s_defined[128];
  uint32_t scc;
  uint32_t scc_defined;
  uint32_t mode;  // MODE register: bits 0-3 rounding; 4-5 f32, 6-7 f16 and f64 denormals (bit set: kept)
  uint64_t pc;    // index of the next instruction
  enum wave_state state;
  uint32_t index;  // in the workgroup
  group_t *group;
  // Scratch in the hardware's layout, [dword][lane]; and for each byte the lanes in which it is defined.
  uint32_t *scratch;
  uint64_t *scratch_defined;
  uint32_t scratch_bytes;  // per lane
  // State of the current instruction:
  uint64_t undefined;   // lanes that have read an undefined value
  uint64_t undefined_high;  // the same, but only the upper word of the result depends on the value
  uint64_t write_lanes;  // lanes whose result is written
  waits_t waits;
  uint64_t executed;         // instructions, but for those of turns without effect
  uint64_t executed_before;  // this turn
  counters_t counters;
} wave_t;

bool waits_outstanding(const waits_t *waits);
// Reports registers that `i` reads or overwrites before their data has arrived.
void waits_check(wave_t *w, const instruction_t *i);
// Records an access that `i` has issued.
void waits_issue(wave_t *w, const instruction_t *i);
// s_waitcnt: waits until at most `remaining` accesses of `counter` are outstanding; -1: no wait.
void waits_for(wave_t *w, enum wait_counter counter, int32_t remaining);
// Reports LDS accesses that are still outstanding at a barrier, which does not wait for them.
void waits_check_barrier(wave_t *w, const instruction_t *i);

typedef struct { uint32_t lane[MAX_LANES] __attribute__((aligned(64))); } lanes32_t;
typedef struct { uint64_t lane[MAX_LANES] __attribute__((aligned(64))); } lanes64_t;
typedef struct { float lane[MAX_LANES] __attribute__((aligned(64))); } lanes_f32_t;
typedef struct { double lane[MAX_LANES] __attribute__((aligned(64))); } lanes_f64_t;

// Reports a finding at `i`; lane -1 means the whole wave. `fail` also stops the kernel with `status`.
void report(wave_t *w, const instruction_t *i, enum finding_kind kind, int lane, uint64_t address, uint32_t other_wave);
void fail(wave_t *w, const instruction_t *i, enum finding_kind kind, enum launch_status status);

typedef struct {
  uint32_t workgroup[3], wave;
  const instruction_t *instruction;
} writer_t;
// Reports that `i` loads what another workgroup has stored without order between the two.
void report_unordered(wave_t *w, const instruction_t *i, int lane, uint64_t address, const writer_t *writer);

// Runs until the wave ends, fails or reaches a barrier, or has executed `budget` instructions.
void wave_run(wave_t *w, uint64_t budget);

typedef struct { const char *name; operation_t run; } named_operation_t;

#ifdef LANES
#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
// The table of operations of one file, which operations.c lists.
#define OPERATIONS(file) const named_operation_t JOIN(JOIN(file, operations), LANES)[]
#define ROW(name, ...) {#name, name},
#define ALL_LANES (LANES == 64 ? ~0ull : (1ull << (LANES & 63)) - 1)
#define FOR_LANES(l) for (int l = 0; l < LANES; l++)

// ---- bits and floats
static inline float as_f32(uint32_t x) { float f; memcpy(&f, &x, 4); return f; }
static inline uint32_t f32_bits(float f) { uint32_t x; memcpy(&x, &f, 4); return x; }
static inline double as_f64(uint64_t x) { double f; memcpy(&f, &x, 8); return f; }
static inline uint64_t f64_bits(double f) { uint64_t x; memcpy(&x, &f, 8); return x; }
// Computed on integers, so that compilers vectorise loops over lanes, and signalling NaNs stay signalling.
static inline float f16_to_f32(uint32_t x) {
  const uint32_t magnitude = x & 0x7fff, scaled = f32_bits(as_f32(magnitude << 13) * 0x1p112f);
  return as_f32((x & 0x8000) << 16 | (magnitude < 0x7c00 ? scaled : magnitude << 13 | 0x7f800000u));
}
static inline uint32_t f32_to_f16(float f) {  // to nearest even
  const uint32_t x = f32_bits(f), magnitude = x & 0x7fffffffu;
  const uint32_t normal = ((magnitude + 0xfff + (magnitude >> 13 & 1)) >> 13) - (112 << 10);
  const uint32_t denormal = f32_bits(as_f32(magnitude) + 0.5f) - f32_bits(0.5f);  // 0.5's last bit is the denormals' unit
  const uint32_t number = magnitude < 0x38800000u ? denormal : normal < 0x7c00 ? normal : 0x7c00;
  return (x >> 16 & 0x8000) | (magnitude > 0x7f800000u ? 0x7e00 | (magnitude >> 13 & 0x3ff) : number);
}
static inline float bf16_to_f32(uint32_t x) { return as_f32(x << 16); }
static inline uint32_t f32_to_bf16(float f) {  // to nearest even
  uint32_t x = f32_bits(f);
  return f != f ? (x >> 16 | 0x40) & 0xffff : (x + 0x7fff + (x >> 16 & 1)) >> 16;
}

// ---- EXEC and masks
static inline uint64_t pair(const wave_t *w, unsigned n) { return w->s[n] | (uint64_t)w->s[n + 1] << 32; }
static inline uint64_t exec_lanes(const wave_t *w) { return LANES == 64 ? pair(w, EXEC_INDEX) : w->s[EXEC_INDEX]; }
static inline uint64_t vcc_lanes(const wave_t *w) { return LANES == 64 ? pair(w, VCC_INDEX) : w->s[VCC_INDEX]; }
static inline bool has_lane(uint64_t lanes, int l) { return lanes >> l & 1; }

// ---- scalar operands: 32 bits, 64 bits, and lane masks
static inline void note_scalar(wave_t *w, unsigned n) { if (!w->s_defined[n]) w->undefined = ~0ull; }
static inline uint64_t aperture(uint64_t which) { return which < 2 ? 0x0001000000000000ull : 0x0002000000000000ull; }

static inline uint32_t read_scc(wave_t *w) {
  if (!w->scc_defined) w->undefined = ~0ull;
  return w->scc;
}
static inline uint32_t read_scalar32(wave_t *w, const operand_t *o) {
  switch (o->kind) {
    case SGPR: note_scalar(w, o->index); return w->s[o->index];
    case CONSTANT: return (uint32_t)o->value;
    case SCC: return read_scc(w);
    case VCCZ: return vcc_lanes(w) == 0;
    case EXECZ: return exec_lanes(w) == 0;
    case VGPR: return w->v[o->index][0];
    default: return 0;
  }
}
static inline uint64_t read_scalar64(wave_t *w, const operand_t *o) {
  switch (o->kind) {
    case SGPR: note_scalar(w, o->index); note_scalar(w, o->index + 1); return pair(w, o->index);
    case CONSTANT: return o->value;
    case APERTURE: return aperture(o->value);
    default: return read_scalar32(w, o);
  }
}
static inline uint64_t read_mask(wave_t *w, const operand_t *o) {  // one bit per lane
  if (o->kind == CONSTANT) return o->value & ALL_LANES;
  return LANES == 64 ? read_scalar64(w, o) : read_scalar32(w, o);
}
static inline void write_scalar32(wave_t *w, const operand_t *o, uint32_t value) {
  if (o->kind != SGPR) return;
  w->s[o->index] = value;
  w->s_defined[o->index] = !w->undefined;
}
static inline void write_scalar64(wave_t *w, const operand_t *o, uint64_t value) {
  if (o->kind != SGPR) return;
  w->s[o->index] = (uint32_t)value;
  w->s[o->index + 1] = (uint32_t)(value >> 32);
  w->s_defined[o->index] = w->s_defined[o->index + 1] = !w->undefined;
}
static inline void write_mask(wave_t *w, const operand_t *o, uint64_t lanes) {  // masks count as defined
  w->undefined = 0;
  if (LANES == 64) write_scalar64(w, o, lanes); else write_scalar32(w, o, (uint32_t)lanes);
}
static inline void set_scc(wave_t *w, bool value) { w->scc = value; w->scc_defined = !w->undefined; }

// ---- vector sources
// DPP: returns the lane from which lane `l` takes its value, or -1 for none (RDNA 3 ISA, "DPP16"; CDNA 3 ISA,
// "DPP").
int dpp16_lane(int l, int ctrl);
// Applies DPP to a source: permutes `value` and `defined`, and removes lanes from `write_lanes`.
static inline void apply_dpp(wave_t *w, const instruction_t *i, lanes32_t *value, uint64_t *defined) {
  const lanes32_t from = *value;
  const uint64_t from_defined = *defined, exec = exec_lanes(w);
  const bool fetches_inactive = i->lanes_modifier >> 25 & 1, is_bounded = i->lanes_modifier >> 24 & 1;
  uint64_t written = 0;
  *defined = 0;
  FOR_LANES(l) {
    int j = i->encoding == DPP8 ? (l & ~7) | (int)(i->lanes_modifier >> 3 * (l & 7) & 7) : dpp16_lane(l, (int)(i->lanes_modifier & 0x1ff));
    bool valid = j >= 0 && (fetches_inactive || has_lane(exec, j));
    if (i->encoding == DPP8 && !valid) { value->lane[l] = 0; written |= 1ull << l; *defined |= 1ull << l; continue; }
    value->lane[l] = valid ? from.lane[j] : 0;
    *defined |= (valid ? from_defined >> j & 1 : 1ull) << l;
    bool selected = i->encoding == DPP8 || ((i->lanes_modifier >> (16 + (l >> 4)) & 1) && (i->lanes_modifier >> (20 + (l >> 2 & 3)) & 1));
    if (selected && (valid || is_bounded)) written |= 1ull << l;
  }
  w->write_lanes &= written;
}
static inline uint32_t sdwa_select(uint32_t x, unsigned select, bool sign) {
  if (select < 4) { uint32_t b = x >> 8 * select & 255; return sign ? (uint32_t)(int32_t)(int8_t)b : b; }
  if (select < 6) { uint32_t h = x >> 16 * (select - 4) & 0xffff; return sign ? (uint32_t)(int32_t)(int16_t)h : h; }
  return x;
}
static inline void read_register(wave_t *w, const operand_t *o, unsigned part, lanes32_t *out, uint64_t *defined) {
  if (o->kind == VGPR) {
    memcpy(out->lane, w->v[o->index + part], 4 * LANES);
    *defined = w->v_defined[o->index + part];
    return;
  }
  uint64_t before = w->undefined;
  w->undefined = 0;
  uint32_t x = part == 0 && o->dwords < 2 ? read_scalar32(w, o) : (uint32_t)(read_scalar64(w, o) >> 32 * part);
  *defined = w->undefined ? 0 : ~0ull;
  w->undefined = before;
  FOR_LANES(l) out->lane[l] = x;
}
// Reads source `n` (0 to 3), 32 bits per lane, without float modifiers (abs, neg).
static inline void read32(wave_t *w, const instruction_t *i, int n, lanes32_t *out) {
  uint64_t defined;
  read_register(w, &i->operand[SRC0 + n], 0, out, &defined);
  if (i->encoding != PLAIN) {
    if (i->encoding == SDWA) {
      if (n < 2) FOR_LANES(l) out->lane[l] = sdwa_select(out->lane[l], i->lanes_modifier >> 4 * n & 15, i->lanes_modifier >> (16 + n) & 1);
    } else if (n == 0) {
      apply_dpp(w, i, out, &defined);
    }
  }
  w->undefined |= ~defined & exec_lanes(w);
}
// Reads source `n`, 64 bits per lane; `low` and `high` are the lanes in which the lower and upper word are
// defined.
static inline void read_pair(wave_t *w, const instruction_t *i, int n, lanes64_t *out, uint64_t *low, uint64_t *high) {
  const operand_t *o = &i->operand[SRC0 + n];
  lanes32_t words[2];
  *low = *high = ~0ull;
  if (o->kind == SGPR) {
    *low = w->s_defined[o->index] ? ~0ull : 0;
    *high = w->s_defined[o->index + 1] ? ~0ull : 0;
    FOR_LANES(l) out->lane[l] = pair(w, o->index);
    return;
  }
  if (o->kind != VGPR) {
    const uint64_t x = o->kind == CONSTANT || o->kind == NOTHING ? o->value : read_scalar64(w, o);
    FOR_LANES(l) out->lane[l] = x;
    return;
  }
  read_register(w, o, 0, &words[0], low);
  read_register(w, o, 1, &words[1], high);
  if (n == 0 && i->encoding == DPP16) { apply_dpp(w, i, &words[0], low); apply_dpp(w, i, &words[1], high); }
  FOR_LANES(l) out->lane[l] = words[0].lane[l] | (uint64_t)words[1].lane[l] << 32;
}
static inline void read64(wave_t *w, const instruction_t *i, int n, lanes64_t *out) {
  uint64_t low, high;
  read_pair(w, i, n, out, &low, &high);
  w->undefined |= ~(low & high) & exec_lanes(w);
}
// For operations where no bit of the result depends on a higher bit of a source, such as sums. Compilers
// leave a source's upper word undefined if they only use the result's lower word. Callers must write the
// result with `write64_upwards`.
static inline void read64_upwards(wave_t *w, const instruction_t *i, int n, lanes64_t *out) {
  uint64_t low, high;
  read_pair(w, i, n, out, &low, &high);
  w->undefined |= ~low & exec_lanes(w);
  w->undefined_high |= ~high & exec_lanes(w);
}
// The bits of MODE that keep denormals; without one, such denormals are flushed to 0.
enum { KEEPS_F32_INPUT = 0x10, KEEPS_F32_OUTPUT = 0x20, KEEPS_F16_F64_INPUT = 0x40, KEEPS_F16_F64_OUTPUT = 0x80 };
static inline float flush_f32(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x; }
static inline double flush_f64(double x) { return fabs(x) < 0x1p-1022 ? copysign(0, x) : x; }
static inline uint32_t flush_f16(uint32_t x) { return x & 0x7c00 ? x : x & 0x8000; }
static inline void read_f32(wave_t *w, const instruction_t *i, int n, lanes_f32_t *out) {
  lanes32_t x;
  read32(w, i, n, &x);
  const uint32_t and = i->abs >> n & 1 ? 0x7fffffffu : ~0u, xor = (uint32_t)(i->neg >> n & 1) << 31;
  FOR_LANES(l) out->lane[l] = as_f32((x.lane[l] & and) ^ xor);
  if (!(w->mode & KEEPS_F32_INPUT)) FOR_LANES(l) out->lane[l] = flush_f32(out->lane[l]);
}
static inline void read_f64(wave_t *w, const instruction_t *i, int n, lanes_f64_t *out) {
  lanes64_t x;
  read64(w, i, n, &x);
  const uint64_t and = i->abs >> n & 1 ? ~(1ull << 63) : ~0ull, xor = (uint64_t)(i->neg >> n & 1) << 63;
  FOR_LANES(l) out->lane[l] = as_f64((x.lane[l] & and) ^ xor);
  if (!(w->mode & KEEPS_F16_F64_INPUT)) FOR_LANES(l) out->lane[l] = flush_f64(out->lane[l]);
}
// Reads 16 bits per lane, zero-extended, from the half that opsel selects (with SDWA, read32 has selected
// it).
static inline void read16(wave_t *w, const instruction_t *i, int n, lanes32_t *out) {
  read32(w, i, n, out);
  const int shift = i->operand[SRC0 + n].kind != CONSTANT && (i->opsel >> n & 1) ? 16 : 0;
  FOR_LANES(l) out->lane[l] = out->lane[l] >> shift & 0xffff;
}
static inline void read_f16_bits(wave_t *w, const instruction_t *i, int n, lanes32_t *out) {
  read16(w, i, n, out);
  const uint32_t and = i->abs >> n & 1 ? 0x7fffu : 0xffffu, xor = (uint32_t)(i->neg >> n & 1) << 15;
  FOR_LANES(l) out->lane[l] = (out->lane[l] & and) ^ xor;
  if (!(w->mode & KEEPS_F16_F64_INPUT)) FOR_LANES(l) out->lane[l] = flush_f16(out->lane[l]);
}
static inline void read_f16(wave_t *w, const instruction_t *i, int n, lanes_f32_t *out) {
  lanes32_t x;
  read_f16_bits(w, i, n, &x);
  FOR_LANES(l) out->lane[l] = f16_to_f32(x.lane[l]);
}

// ---- vector results
static inline void define(wave_t *w, unsigned index) {
  w->v_defined[index] = (w->v_defined[index] & ~w->write_lanes) | (w->write_lanes & ~w->undefined);
}
static inline uint32_t sdwa_merge(const instruction_t *i, uint32_t old, uint32_t x) {
  const unsigned select = i->lanes_modifier >> 8 & 15, unused = i->lanes_modifier >> 12 & 3;
  if (select > 5) return x;
  const int shift = select < 4 ? 8 * (int)select : 16 * ((int)select - 4), bits = select < 4 ? 8 : 16;
  const uint32_t mask = ((1u << bits) - 1) << shift, value = x << shift & mask;
  if (unused == 2) return (old & ~mask) | value;
  const int above = 32 - shift - bits;
  if (unused == 1) return (uint32_t)((int32_t)(value << above) >> above);
  return value;
}
static inline void write_register(wave_t *w, unsigned index, const uint32_t *x) {
  uint32_t *d = w->v[index];
  const uint64_t lanes = w->write_lanes;
  if (lanes == ALL_LANES) memcpy(d, x, 4 * LANES);
  else FOR_LANES(l) d[l] = has_lane(lanes, l) ? x[l] : d[l];
  define(w, index);
}
static inline void write32(wave_t *w, const instruction_t *i, lanes32_t *x) {
  const operand_t *o = &i->operand[DST];
  if (o->kind != VGPR) return;
  if (i->encoding == SDWA) FOR_LANES(l) x->lane[l] = sdwa_merge(i, w->v[o->index][l], x->lane[l]);
  write_register(w, o->index, x->lane);
}
static inline void write64(wave_t *w, const instruction_t *i, const lanes64_t *x) {
  lanes32_t half;
  for (unsigned part = 0; part < 2; part++) {
    FOR_LANES(l) half.lane[l] = (uint32_t)(x->lane[l] >> 32 * part);
    write_register(w, i->operand[DST].index + part, half.lane);
  }
}
static inline void write64_upwards(wave_t *w, const instruction_t *i, const lanes64_t *x) {
  lanes32_t half;
  for (unsigned part = 0; part < 2; part++) {
    FOR_LANES(l) half.lane[l] = (uint32_t)(x->lane[l] >> 32 * part);
    if (part) w->undefined |= w->undefined_high;
    write_register(w, i->operand[DST].index + part, half.lane);
  }
}
// Output modifiers: a factor (VOP3 OMOD: 1 is *2, 2 is *4, 3 is /2), and a clamp to [0, 1], where NaN becomes
// 0. Hardware ignores the factor if MODE keeps denormal outputs or has the IEEE bit (CDNA 3 ISA, "Output
// modifiers"; LLVM, SIFoldOperands).
static inline double omod_factor(const wave_t *w, const instruction_t *i, uint32_t keeps_output) {
  static const double factor[] = {1, 2, 4, 0.5};
  const bool ieee = w->mode >> 9 & 1 && w->group->kernel->header.generation < 12;
  return factor[ieee || w->mode & keeps_output ? 0 : i->omod & 3];
}
static inline float clamp_f32(float x) { return x > 0 ? (x < 1 ? x : 1) : 0; }
static inline double clamp_f64(double x) { return x > 0 ? (x < 1 ? x : 1) : 0; }
static inline void write_f32(wave_t *w, const instruction_t *i, const lanes_f32_t *x) {
  const float factor = (float)omod_factor(w, i, KEEPS_F32_OUTPUT);
  lanes_f32_t y = *x;
  lanes32_t bits;
  if (factor != 1) FOR_LANES(l) y.lane[l] *= factor;
  if (i->clamp) FOR_LANES(l) y.lane[l] = clamp_f32(y.lane[l]);
  if (!(w->mode & KEEPS_F32_OUTPUT)) FOR_LANES(l) y.lane[l] = flush_f32(y.lane[l]);
  FOR_LANES(l) bits.lane[l] = f32_bits(y.lane[l]);
  write32(w, i, &bits);
}
static inline void write_f64(wave_t *w, const instruction_t *i, const lanes_f64_t *x) {
  const double factor = omod_factor(w, i, KEEPS_F16_F64_OUTPUT);
  lanes_f64_t y = *x;
  lanes64_t bits;
  if (factor != 1) FOR_LANES(l) y.lane[l] *= factor;
  if (i->clamp) FOR_LANES(l) y.lane[l] = clamp_f64(y.lane[l]);
  if (!(w->mode & KEEPS_F16_F64_OUTPUT)) FOR_LANES(l) y.lane[l] = flush_f64(y.lane[l]);
  FOR_LANES(l) bits.lane[l] = f64_bits(y.lane[l]);
  write64(w, i, &bits);
}
// Writes 16 bits per lane to the half that bit 3 of opsel selects. `zeroes_high`: the operation clears the
// other half on CDNA, as most 16-bit operations do there (LLVM, zeroesHigh16BitsOfDest). On RDNA the other
// half is always kept.
static inline void write16(wave_t *w, const instruction_t *i, const lanes32_t *x, bool zeroes_high) {
  const operand_t *o = &i->operand[DST];
  if (o->kind != VGPR) return;
  const uint32_t *old = w->v[o->index];
  const bool high = i->opsel >> 3 & 1, clears = zeroes_high && w->group->kernel->header.generation == 9;
  lanes32_t merged;
  if (i->encoding == SDWA) FOR_LANES(l) merged.lane[l] = sdwa_merge(i, old[l], x->lane[l] & 0xffff);
  else if (high) FOR_LANES(l) merged.lane[l] = (old[l] & 0xffff) | x->lane[l] << 16;
  else FOR_LANES(l) merged.lane[l] = (clears ? 0 : old[l] & 0xffff0000u) | (x->lane[l] & 0xffff);
  write_register(w, o->index, merged.lane);
}
static inline void write_f16(wave_t *w, const instruction_t *i, const lanes_f32_t *x, bool zeroes_high) {
  const float factor = (float)omod_factor(w, i, KEEPS_F16_F64_OUTPUT);
  lanes_f32_t y = *x;
  lanes32_t bits;
  if (factor != 1) FOR_LANES(l) y.lane[l] *= factor;
  if (i->clamp) FOR_LANES(l) y.lane[l] = clamp_f32(y.lane[l]);
  FOR_LANES(l) bits.lane[l] = f32_to_f16(y.lane[l]);
  if (!(w->mode & KEEPS_F16_F64_OUTPUT)) FOR_LANES(l) bits.lane[l] = flush_f16(bits.lane[l]);
  write16(w, i, &bits, zeroes_high);
}
// Returns the lanes whose element is odd.
static inline uint64_t odd_lanes(const lanes32_t *x) {
  uint64_t lanes = 0;
  FOR_LANES(l) lanes |= (uint64_t)(x->lane[l] & 1) << l;
  return lanes;
}
// Writes a carry or a comparison's result as a lane mask. Bits of lanes that are not written (inactive, or
// excluded by DPP) are 0.
static inline void write_carry(wave_t *w, const operand_t *o, uint64_t lanes) {
  write_mask(w, o, lanes & w->write_lanes);
}
#endif
