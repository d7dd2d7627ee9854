// Chooses the order of work among the orders that streams and events allow.
//
// `random`: a seeded generator chooses among the streams whose next work item may run. The executor sometimes
// pauses before, so that more streams have work. `late`: only work that a waiting host needs is run, until
// the host has been idle for some milliseconds. A program that lacks a wait then reads data before they are
// written.
#include "order.h"

#include <stdatomic.h>

static _Atomic uint64_t last_activity;  // nanoseconds of the monotonic clock

static uint64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

void order_note_activity(void) { last_activity = now(); }

void order_seed(device_t *device) {
  device->random = (settings.seed + 1) * 0x9e3779b97f4a7c15u + (uint64_t)device->index;
}

// xorshift64*
uint64_t order_random(device_t *device) {
  uint64_t x = device->random;
  x ^= x >> 12;
  x ^= x << 25;
  x ^= x >> 27;
  device->random = x;
  return (x * 0x2545f4914f6cdd1du) >> 32;
}

static bool is_blocked(const stream_t *s) {
  return s->head && s->head->kind == WORK_WAIT && !s->head->mark->is_done;
}

static bool may_run(const stream_t *s) {
  if (!s->head || s->is_busy) return false;
  if (s->device->error != hipSuccess) return true;  // work of a failed device is released without running
  return !s->is_stalled && !s->device->is_stalled && !is_blocked(s);
}

static void set_needed(stream_t *s) {
  while (s && !s->is_needed) {
    s->is_needed = true;
    s = is_blocked(s) ? s->head->mark->stream : NULL;
  }
}

static void mark_needed(void) {
  for (int d = 0; d < settings.num_devices; d++)
    for (stream_t *s = devices[d].streams; s; s = s->next) s->is_needed = false;
  for (const mark_t *r = wanted_marks(); r; r = r->next_wanted)
    if (!r->is_done) set_needed(r->stream);
}

static uint64_t idle_ns(void) { return (uint64_t)(settings.idle_ms * 1e6); }
static bool is_host_idle(void) { return now() - last_activity >= idle_ns(); }

stream_t *order_next(device_t *device) {
  const bool needed_only = settings.is_late && !is_host_idle();
  if (needed_only) mark_needed();
  stream_t *chosen = NULL;
  uint64_t candidates = 0;
  for (stream_t *s = device->streams; s; s = s->next) {
    if (!may_run(s) || (needed_only && !s->is_needed && device->error == hipSuccess)) continue;
    if (order_random(device) % ++candidates == 0) chosen = s;  // all candidates have the same probability
  }
  return chosen;
}

static bool has_work(const device_t *device) {
  for (const stream_t *s = device->streams; s; s = s->next)
    if (may_run(s)) return true;
  return false;
}

void order_wait(device_t *device) {
  if (!settings.is_late || !has_work(device)) {
    pthread_cond_wait(&device->work_ready, &work_lock);
    return;
  }
  struct timespec until;
  clock_gettime(CLOCK_REALTIME, &until);
  const uint64_t ns = (uint64_t)until.tv_nsec + idle_ns();
  until.tv_sec += (time_t)(ns / 1000000000u);
  until.tv_nsec = (long)(ns % 1000000000u);
  pthread_cond_timedwait(&device->work_ready, &work_lock, &until);
}
