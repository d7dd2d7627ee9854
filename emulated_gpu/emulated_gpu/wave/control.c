// Control flow: branches, barriers, the end of a wave, and access to the program counter.
#include "wave.h"

static void s_nop(wave_t *w, const instruction_t *i) { (void)w, (void)i; }

static void s_endpgm(wave_t *w, const instruction_t *i) {
  (void)i;
  w->state = WAVE_ENDED;
}

// `offset`, `offset1` and `target`: how many loads, LDS accesses and scalar loads may remain outstanding; -1: any number.
// Source 0: the same for stores on RDNA; no source: any number.
static void s_waitcnt(wave_t *w, const instruction_t *i) {
  waits_for(w, WAIT_LOADS, i->offset);
  waits_for(w, WAIT_LDS, i->offset1);
  waits_for(w, WAIT_SCALAR, i->target);
  if (i->operand[SRC0].kind == CONSTANT) waits_for(w, WAIT_STORES, (int32_t)i->operand[SRC0].value);
}

static void s_barrier(wave_t *w, const instruction_t *i) {
  waits_check_barrier(w, i);
  if (w->group->num_waves > 1) w->state = WAVE_AT_BARRIER;
}

static void jump(wave_t *w, const instruction_t *i, bool taken) {
  if (w->undefined) report(w, i, UNDEFINED_BRANCH, -1, 0, w->index);
  if (!taken) return;
  if (i->target < 0) fail(w, i, UNKNOWN_INSTRUCTION, LAUNCH_UNKNOWN_INSTRUCTION);
  else w->pc = (uint64_t)i->target;
}

static void s_branch(wave_t *w, const instruction_t *i) { jump(w, i, true); }
static void s_cbranch_scc0(wave_t *w, const instruction_t *i) { jump(w, i, !read_scc(w)); }
static void s_cbranch_scc1(wave_t *w, const instruction_t *i) { jump(w, i, read_scc(w)); }
static void s_cbranch_vccz(wave_t *w, const instruction_t *i) { jump(w, i, !vcc_lanes(w)); }
static void s_cbranch_vccnz(wave_t *w, const instruction_t *i) { jump(w, i, vcc_lanes(w)); }
static void s_cbranch_execz(wave_t *w, const instruction_t *i) { jump(w, i, !exec_lanes(w)); }
static void s_cbranch_execnz(wave_t *w, const instruction_t *i) { jump(w, i, exec_lanes(w)); }

// Returns the address of the next instruction in the loaded image, as kernels see code addresses.
static uint64_t address_after(const wave_t *w, const instruction_t *i) {
  return (uint64_t)(uintptr_t)w->group->launch->image + i->address + 4u * i->words;
}

static void go_to(wave_t *w, const instruction_t *i, uint64_t address) {
  const int64_t index = kernel_index_of(w->group->kernel, address - (uint64_t)(uintptr_t)w->group->launch->image);
  if (index < 0) fail(w, i, UNKNOWN_INSTRUCTION, LAUNCH_UNKNOWN_INSTRUCTION);
  else w->pc = (uint64_t)index;
}

static void s_getpc_b64(wave_t *w, const instruction_t *i) { write_scalar64(w, &i->operand[DST], address_after(w, i)); }
static void s_setpc_b64(wave_t *w, const instruction_t *i) { go_to(w, i, read_scalar64(w, &i->operand[SRC0])); }
static void s_swappc_b64(wave_t *w, const instruction_t *i) {
  const uint64_t to = read_scalar64(w, &i->operand[SRC0]);
  write_scalar64(w, &i->operand[DST], address_after(w, i));
  go_to(w, i, to);
}

OPERATIONS(control) = {
  {"s_nop", s_nop},
  {"s_waitcnt", s_waitcnt},
  {"s_endpgm", s_endpgm},
  {"s_barrier", s_barrier},
  {"s_barrier_signal", s_nop},  // nothing to do: the wave waits at the following s_barrier_wait
  {"s_barrier_wait", s_barrier},
  {"s_branch", s_branch},
  {"s_cbranch_scc0", s_cbranch_scc0},
  {"s_cbranch_scc1", s_cbranch_scc1},
  {"s_cbranch_vccz", s_cbranch_vccz},
  {"s_cbranch_vccnz", s_cbranch_vccnz},
  {"s_cbranch_execz", s_cbranch_execz},
  {"s_cbranch_execnz", s_cbranch_execnz},
  {"s_getpc_b64", s_getpc_b64},
  {"s_setpc_b64", s_setpc_b64},
  {"s_swappc_b64", s_swappc_b64},
  {NULL, NULL},
};
