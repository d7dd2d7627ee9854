// Collects findings (errors of kernels): the first 1,000 distinct ones, each with its number of repetitions.
#include <pthread.h>
#include <stdio.h>

#include "wave.h"

enum { CAPACITY = 1000 };
static finding_t findings[CAPACITY];
static size_t num_findings;
static void (*listener)(const finding_t *);
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static const char *const names[NUM_FINDING_KINDS] = {
  "outside_memory", "outside_lds", "outside_scratch", "undefined_address", "undefined_stored", "undefined_branch",
  "undefined_lds", "lds_race", "divergent_barrier", "endless", "unknown_instruction", "misaligned", "missing_wait",
  "unordered", "not_resident",
};
const char *finding_name(enum finding_kind kind) { return kind < NUM_FINDING_KINDS ? names[kind] : "?"; }

static bool is_same(const finding_t *a, const finding_t *b) {
  return a->kind == b->kind && a->code_address == b->code_address && !strcmp(a->kernel, b->kernel);
}

static void keep(const finding_t *f) {
  pthread_mutex_lock(&lock);
  size_t n = 0;
  while (n < num_findings && !is_same(&findings[n], f)) n++;
  const bool is_new = n == num_findings && n < CAPACITY;
  if (is_new) findings[num_findings++] = *f;
  else if (n < num_findings) findings[n].repetitions++;
  void (*const call)(const finding_t *) = is_new ? listener : NULL;
  pthread_mutex_unlock(&lock);
  if (call) call(f);
}

static finding_t finding_of(const wave_t *w, const instruction_t *i, enum finding_kind kind, int lane, uint64_t address) {
  const group_t *g = w->group;
  finding_t f = {.kind = (int32_t)kind, .wave = w->index, .lane = lane, .address = address};
  f.code_address = i->address;
  memcpy(f.workgroup, g->id, sizeof f.workgroup);
  snprintf(f.kernel, sizeof f.kernel, "%s", g->kernel->name);
  snprintf(f.instruction, sizeof f.instruction, "%s", i->name);
  return f;
}

void report(wave_t *w, const instruction_t *i, enum finding_kind kind, int lane, uint64_t address, uint32_t other_wave) {
  finding_t f = finding_of(w, i, kind, lane, address);
  f.other_wave = other_wave;
  keep(&f);
}

void report_unordered(wave_t *w, const instruction_t *i, int lane, uint64_t address, const writer_t *writer) {
  finding_t f = finding_of(w, i, UNORDERED, lane, address);
  f.other_wave = writer->wave;
  f.other_code_address = writer->instruction->address;
  memcpy(f.other_workgroup, writer->workgroup, sizeof f.other_workgroup);
  snprintf(f.other_instruction, sizeof f.other_instruction, "%s", writer->instruction->name);
  keep(&f);
}

void fail(wave_t *w, const instruction_t *i, enum finding_kind kind, enum launch_status status) {
  report(w, i, kind, -1, 0, w->index);
  w->state = WAVE_FAILED;
  w->group->status = status;
}

size_t findings_read(finding_t *out, size_t capacity) {
  pthread_mutex_lock(&lock);
  const size_t n = num_findings;
  memcpy(out, findings, (n < capacity ? n : capacity) * sizeof *out);
  pthread_mutex_unlock(&lock);
  return n;
}

void findings_clear(void) {
  pthread_mutex_lock(&lock);
  num_findings = 0;
  pthread_mutex_unlock(&lock);
}

void findings_set_listener(void (*call)(const finding_t *)) {
  pthread_mutex_lock(&lock);
  listener = call;
  pthread_mutex_unlock(&lock);
}
