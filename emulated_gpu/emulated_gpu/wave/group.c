// Runs a workgroup. Its waves run one after the other, each until it ends, reaches a barrier or has used up its
// budget of instructions. After each barrier the order is reversed, so that a kernel that depends on the order
// of waves is likely to fail.
#include "group.h"

#include <stdlib.h>

static int lanes_of(const kernel_t *k) { return k->header.lanes; }
static uint32_t scratch_dwords(const kernel_t *k) { return (k->header.scratch_bytes + 3) / 4; }  // per lane
static uint32_t group_size(const launch_t *l) { return l->block[0] * l->block[1] * l->block[2]; }

uint32_t num_waves_of(const kernel_t *k, const launch_t *l) {
  return (group_size(l) + (uint32_t)lanes_of(k) - 1) / (uint32_t)lanes_of(k);
}

bool room_open(room_t *r, const kernel_t *k, const launch_t *launch, struct order *order,
               struct unique_bytes *unique) {
  group_t *g = &r->group;
  *g = (group_t){.kernel = k, .launch = launch, .unique = unique};
  g->num_waves = num_waves_of(k, launch);
  g->lds_bytes = k->header.lds_bytes + launch->dynamic_lds_bytes;
  const size_t scratch = 4ull * scratch_dwords(k) * g->num_waves;  // bytes per lane, summed over the waves
  r->waves = aligned_alloc(64, sizeof(wave_t) * g->num_waves);
  g->lds = r->lds = malloc(g->lds_bytes + 64);
  g->lds_words = r->lds_words = malloc((g->lds_bytes / 4 + 1) * sizeof(lds_word_t));
  r->scratch = malloc(scratch * (size_t)lanes_of(k) + 64);
  r->scratch_defined = malloc(scratch * sizeof *r->scratch_defined + 64);
  g->order = r->order = order ? malloc(sizeof *r->order) : NULL;
  return r->waves && r->lds && r->lds_words && r->scratch && r->scratch_defined && (r->order || !order);
}

void room_close(room_t *r) {
  free(r->waves);
  free(r->lds);
  free(r->lds_words);
  free(r->scratch);
  free(r->scratch_defined);
  free(r->order);
}

static void set_sgpr(wave_t *w, unsigned n, uint32_t value) {
  w->s[n] = value;
  w->s_defined[n] = 1;
}

// The buffer resource through which CDNA 2 accesses scratch: of address 0, with one element for each lane.
static void set_scratch_resource(wave_t *w, unsigned n) {
  const uint32_t words[] = {0, 1u << 31, ~0u, 1u << 23};  // swizzled; all records; adds the lane's number
  for (unsigned j = 0; j < 4; j++) set_sgpr(w, n + j, words[j]);
}

// Sets the initial SGPRs: user SGPRs in the order of the kernel descriptor's bits, then preloaded arguments,
// then system SGPRs (LLVM, "User Guide for AMDGPU Backend": Initial Kernel Execution State).
static void set_sgprs(wave_t *w, const kernel_header_t *h, const launch_t *l, const uint32_t id[3]) {
  static const unsigned sizes[] = {4, 2, 2, 2, 2, 2, 1};
  unsigned n = 0;
  for (unsigned bit = 0; bit < 7; bit++) {
    if (!(h->properties >> bit & 1)) continue;
    if (bit == 0) set_scratch_resource(w, n);
    if (bit == 3) {
      set_sgpr(w, n, (uint32_t)(uintptr_t)l->kernarg);
      set_sgpr(w, n + 1, (uint32_t)((uintptr_t)l->kernarg >> 32));
    }
    n += sizes[bit];
  }
  const uint32_t *arguments = l->kernarg;
  for (unsigned j = 0; j < (h->preload & 127u); j++) set_sgpr(w, n + j, arguments[(h->preload >> 7) + j]);
  n = h->rsrc2 >> 1 & 31;
  if (h->generation == 12) {  // RDNA 4 passes the ids of workgroup and wave in trap registers (TTMP)
    set_sgpr(w, 108 + 8, w->index << 25);
    set_sgpr(w, 108 + 9, id[0]);
    set_sgpr(w, 108 + 7, id[1] | id[2] << 16);
    return;
  }
  for (unsigned d = 0; d < 3; d++)
    if (h->rsrc2 >> (7 + d) & 1) set_sgpr(w, n++, id[d]);
  if (h->properties & 1) set_sgpr(w, n + (h->rsrc2 >> 10 & 1), 0);  // the wave's offset from the resource's address
}

static void set_lanes(wave_t *w, const launch_t *l, uint32_t lanes) {
  uint64_t exec = 0;
  for (uint32_t lane = 0; lane < lanes; lane++) {
    const uint32_t t = w->index * lanes + lane, x = l->block[0], y = l->block[1];
    if (t >= group_size(l)) continue;
    exec |= 1ull << lane;
    w->v[0][lane] = t % x | (t / x % y) << 10 | (t / x / y) << 20;
  }
  w->v_defined[0] = ~0ull;
  set_sgpr(w, EXEC_INDEX, (uint32_t)exec);
  set_sgpr(w, EXEC_INDEX + 1, (uint32_t)(exec >> 32));
}

static void wave_start(wave_t *w, const room_t *r, uint32_t index, const uint32_t id[3]) {
  const kernel_t *k = r->group.kernel;
  const kernel_header_t *h = &k->header;
  memset(w->v, 0xff, k->used_vgprs * sizeof *w->v);
  memset((char *)w + sizeof w->v, 0, sizeof *w - sizeof w->v);
  memset(w->s, 0xff, sizeof w->s);
  w->mode = h->rsrc1 >> 12 & 0xff;
  if (h->generation < 12) w->mode |= (h->rsrc1 >> 21 & 1) << 8 | (h->rsrc1 >> 23 & 1) << 9;  // DX10_CLAMP, IEEE
  w->index = index;
  w->group = (group_t *)&r->group;
  w->scratch_bytes = h->scratch_bytes;
  w->scratch = r->scratch + (size_t)scratch_dwords(k) * h->lanes * index;
  w->scratch_defined = r->scratch_defined + (size_t)scratch_dwords(k) * 4 * index;
  // If arguments are preloaded, the kernel starts after the 256 bytes of code that would load them.
  const int64_t entry = kernel_index_of(k, h->entry + (h->preload & 127 ? 256 : 0));
  w->pc = entry < 0 ? h->num_instructions : (uint64_t)entry;
  set_sgprs(w, h, r->group.launch, id);
  set_lanes(w, r->group.launch, h->lanes);
}

void wave_run(wave_t *w, uint64_t budget) {
  const instruction_t *code = w->group->kernel->code;
  const bool wide = w->group->kernel->header.lanes == 64;
  for (; w->state == WAVE_RUNS && budget; budget--) {
    const instruction_t *i = &code[w->pc++];
    w->undefined = w->undefined_high = 0;
    w->write_lanes = wide ? w->s[EXEC_INDEX] | (uint64_t)w->s[EXEC_INDEX + 1] << 32 : w->s[EXEC_INDEX];
    if (waits_outstanding(&w->waits)) waits_check(w, i);
    i->run(w, i);
    if (i->wait_counter != WAIT_NONE) waits_issue(w, i);
    w->counters.instructions[i->class < NUM_CLASSES ? i->class : 0] += i->counted;
    if (++w->executed > launch_options.max_instructions) fail(w, i, ENDLESS, LAUNCH_ENDLESS);
  }
}

void counters_add(counters_t *sum, const counters_t *part) {
  for (size_t n = 0; n < sizeof *sum / sizeof(uint64_t); n++) ((uint64_t *)sum)[n] += ((const uint64_t *)part)[n];
}

// Reports a divergent barrier. Callers must call it when all waves that have not ended are at a barrier. They
// must be at the same one, and no wave may have ended since the last barrier (`num_ended` is then 0).
static void check_barrier(room_t *r, uint32_t num_ended) {
  const wave_t *first = NULL;
  for (uint32_t n = 0; n < r->group.num_waves; n++) {
    wave_t *w = &r->waves[n];
    if (w->state != WAVE_AT_BARRIER) continue;
    if (!first) first = w;
    if (w->pc != first->pc || num_ended)
      report(w, &r->group.kernel->code[w->pc - 1], DIVERGENT_BARRIER, -1, 0, first->index);
  }
}

static void pass_barrier(room_t *r) {
  group_t *g = &r->group;
  check_barrier(r, r->ended_before < r->num_ended ? r->num_ended : 0);
  if (g->order) order_meet(r->waves, g->num_waves);
  r->ended_before = r->num_ended;
  g->epoch++;
  for (uint32_t n = 0; n < g->num_waves; n++)
    if (r->waves[n].state == WAVE_AT_BARRIER) r->waves[n].state = WAVE_RUNS;
}

void group_start(room_t *r, struct order *order, uint64_t number) {
  group_t *g = &r->group;
  const uint32_t *grid = g->launch->grid;
  const uint32_t id[3] = {
    (uint32_t)(number % grid[0]), (uint32_t)(number / grid[0] % grid[1]), (uint32_t)(number / grid[0] / grid[1])};
  memcpy(g->id, id, sizeof g->id);
  memset(g->lds, 0xff, g->lds_bytes);
  memset(g->lds_words, 0, (g->lds_bytes / 4 + 1) * sizeof *g->lds_words);
  memset(r->scratch_defined, 0, 4ull * scratch_dwords(g->kernel) * g->num_waves * sizeof *r->scratch_defined);
  for (uint32_t n = 0; n < g->num_waves; n++) wave_start(&r->waves[n], r, n, id);
  if (g->order) order_start(g->order, order, g, number);
  r->num_ended = r->ended_before = 0;
  r->has_run = false;
  g->epoch = 1;
}

// Runs each wave that is not at a barrier. Returns whether one of them could go on.
static bool run_waves(room_t *r, uint64_t budget) {
  group_t *g = &r->group;
  bool goes_on = false;
  for (uint32_t n = 0; n < g->num_waves && g->status == LAUNCH_DONE; n++) {
    wave_t *w = &r->waves[g->epoch & 1 ? n : g->num_waves - 1 - n];
    if (w->state != WAVE_RUNS) continue;
    const uint64_t before = w->executed;
    wave_run(w, budget);
    r->executed += w->executed - before;
    r->num_ended += w->state == WAVE_ENDED;
    goes_on |= w->state == WAVE_RUNS;
  }
  return goes_on;
}

void group_run(room_t *r, uint64_t budget) {
  group_t *g = &r->group;
  for (r->executed = 0; r->executed < budget && r->num_ended < g->num_waves && g->status == LAUNCH_DONE;) {
    if (run_waves(r, budget)) return;
    if (r->num_ended < g->num_waves && g->status == LAUNCH_DONE) pass_barrier(r);
  }
}

void group_end(room_t *r, counters_t *counters) {
  for (uint32_t n = 0; n < r->group.num_waves; n++) counters_add(counters, &r->waves[n].counters);
  if (r->group.order) order_end(r->group.order);
}

void group_end_turn(room_t *r, bool has_effect) {
  for (uint32_t n = 0; n < r->group.num_waves; n++) {
    wave_t *w = &r->waves[n];
    if (has_effect) w->executed_before = w->executed;
    else w->executed = w->executed_before;
  }
  r->group.has_effect = false;
}

bool group_has_ended(const room_t *r) { return r->num_ended == r->group.num_waves; }

void group_give_up(room_t *r, enum finding_kind kind) {
  uint32_t n = 0;
  while (n + 1 < r->group.num_waves && r->waves[n].state != WAVE_RUNS) n++;
  wave_t *w = &r->waves[n];
  fail(w, &r->group.kernel->code[w->pc], kind, LAUNCH_ENDLESS);
}
