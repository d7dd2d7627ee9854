// Runs a kernel over a grid. Threads of the host share the workgroups. The waves of a workgroup run one after
// the other, each until it ends or reaches a barrier. After each barrier the order is reversed, so that a
// kernel that depends on the order of waves is likely to fail.
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include "unique_bytes.h"
#include "wave.h"

struct launch_options launch_options = {.max_instructions = 500000000};

typedef struct {
  const kernel_t *kernel;
  const launch_t *launch;
  uint64_t next;  // number of the next workgroup, incremented atomically
  enum launch_status status;
  counters_t *counters;
  struct unique_bytes *unique;
  pthread_mutex_t lock;
} work_t;

// The memory of one host thread, reused for each workgroup that the thread runs.
typedef struct {
  wave_t *waves;
  uint8_t *lds;
  uint32_t *scratch;
  uint64_t *scratch_defined;
  lds_word_t *lds_words;
  group_t group;
} room_t;

static int lanes_of(const kernel_t *k) { return k->header.lanes; }
static uint32_t scratch_dwords(const kernel_t *k) { return (k->header.scratch_bytes + 3) / 4; }  // per lane
static uint32_t group_size(const launch_t *l) { return l->block[0] * l->block[1] * l->block[2]; }

static bool room_open(room_t *r, const work_t *work) {
  const kernel_t *k = work->kernel;
  group_t *g = &r->group;
  *g = (group_t){.kernel = k, .launch = work->launch, .unique = work->unique};
  g->num_waves = (group_size(work->launch) + (uint32_t)lanes_of(k) - 1) / (uint32_t)lanes_of(k);
  g->lds_bytes = k->header.lds_bytes + work->launch->dynamic_lds_bytes;
  const size_t scratch = 4ull * scratch_dwords(k) * g->num_waves;  // bytes per lane, summed over the waves
  r->waves = aligned_alloc(64, sizeof(wave_t) * g->num_waves);
  g->lds = r->lds = malloc(g->lds_bytes + 64);
  g->lds_words = r->lds_words = malloc((g->lds_bytes / 4 + 1) * sizeof(lds_word_t));
  r->scratch = malloc(scratch * (size_t)lanes_of(k) + 64);
  r->scratch_defined = malloc(scratch * sizeof *r->scratch_defined + 64);
  return r->waves && r->lds && r->lds_words && r->scratch && r->scratch_defined;
}

static void room_close(room_t *r) {
  free(r->waves);
  free(r->lds);
  free(r->lds_words);
  free(r->scratch);
  free(r->scratch_defined);
}

static void set_sgpr(wave_t *w, unsigned n, uint32_t value) {
  w->s[n] = value;
  w->s_defined[n] = 1;
}

// Sets the initial SGPRs: user SGPRs in the order of the kernel descriptor's bits, then preloaded arguments,
// then system SGPRs (LLVM, "User Guide for AMDGPU Backend": Initial Kernel Execution State).
static void set_sgprs(wave_t *w, const kernel_header_t *h, const launch_t *l, const uint32_t id[3]) {
  static const unsigned sizes[] = {4, 2, 2, 2, 2, 2, 1};
  unsigned n = 0;
  for (unsigned bit = 0; bit < 7; bit++) {
    if (!(h->properties >> bit & 1)) continue;
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

void wave_run(wave_t *w) {
  const instruction_t *code = w->group->kernel->code;
  const bool wide = w->group->kernel->header.lanes == 64;
  w->state = WAVE_RUNS;
  while (w->state == WAVE_RUNS) {
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

static void add(counters_t *sum, const counters_t *part) {
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

static void group_run(room_t *r, const uint32_t id[3]) {
  group_t *g = &r->group;
  memcpy(g->id, id, sizeof g->id);
  memset(g->lds, 0xff, g->lds_bytes);
  memset(g->lds_words, 0, (g->lds_bytes / 4 + 1) * sizeof *g->lds_words);
  memset(r->scratch_defined, 0, 4ull * scratch_dwords(g->kernel) * g->num_waves * sizeof *r->scratch_defined);
  for (uint32_t n = 0; n < g->num_waves; n++) wave_start(&r->waves[n], r, n, id);
  uint32_t num_ended = 0;
  for (g->epoch = 1; num_ended < g->num_waves && g->status == LAUNCH_DONE; g->epoch++) {
    const uint32_t ended_before = num_ended;
    for (uint32_t n = 0; n < g->num_waves && g->status == LAUNCH_DONE; n++) {
      wave_t *w = &r->waves[g->epoch & 1 ? n : g->num_waves - 1 - n];
      if (w->state == WAVE_ENDED) continue;
      wave_run(w);
      num_ended += w->state == WAVE_ENDED;
    }
    if (g->status == LAUNCH_DONE && num_ended < g->num_waves) check_barrier(r, ended_before < num_ended ? num_ended : 0);
  }
}

static void group_count(const room_t *r, counters_t *counters) {
  for (uint32_t n = 0; n < r->group.num_waves; n++) add(counters, &r->waves[n].counters);
}

static void *work_run(void *argument) {
  work_t *work = argument;
  const uint32_t *grid = work->launch->grid;
  const uint64_t groups = (uint64_t)grid[0] * grid[1] * grid[2];
  counters_t counters = {0};
  room_t room;
  enum launch_status status = room_open(&room, work) ? LAUNCH_DONE : LAUNCH_NO_MEMORY;
  while (status == LAUNCH_DONE) {
    const uint64_t n = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED);
    if (n >= groups || __atomic_load_n(&work->status, __ATOMIC_RELAXED) != LAUNCH_DONE) break;
    group_run(&room, (uint32_t[3]){(uint32_t)(n % grid[0]), (uint32_t)(n / grid[0] % grid[1]), (uint32_t)(n / grid[0] / grid[1])});
    group_count(&room, &counters);
    status = room.group.status;
  }
  room_close(&room);
  pthread_mutex_lock(&work->lock);
  add(work->counters, &counters);
  if (status != LAUNCH_DONE) work->status = status;
  pthread_mutex_unlock(&work->lock);
  return NULL;
}

static int num_threads(uint64_t groups) {
  const int wanted = launch_options.threads ? launch_options.threads : (int)sysconf(_SC_NPROCESSORS_ONLN);
  const uint64_t useful = groups / 4 + 1;
  return (uint64_t)wanted < useful ? wanted : (int)useful;
}

enum launch_status launch_run(const kernel_t *kernel, const launch_t *launch, counters_t *counters) {
  enum { MOST = 64 };
  work_t work = {.kernel = kernel, .launch = launch, .counters = counters, .lock = PTHREAD_MUTEX_INITIALIZER};
  work.unique = launch_options.counts_unique_bytes ? unique_bytes_open() : NULL;
  pthread_t threads[MOST];
  int helpers = num_threads((uint64_t)launch->grid[0] * launch->grid[1] * launch->grid[2]) - 1, started = 0;
  while (started < helpers && started < MOST && !pthread_create(&threads[started], NULL, work_run, &work)) started++;
  work_run(&work);
  while (started) pthread_join(threads[--started], NULL);
  if (work.unique) unique_bytes_close(work.unique, counters);
  return work.status;
}
