// Runs a kernel over a grid. Threads of the host share the workgroups.
//
// A thread runs a workgroup to its end before it starts the next, unless the kernel may wait for other workgroups
// in a loop. Then a workgroup that has used up its budget of instructions stays resident, and the thread starts
// another one or goes on with one of those that it has, in a seeded order.
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <unistd.h>

#include "group.h"
#include "unique_bytes.h"

struct launch_options launch_options = {.max_instructions = 500000000};

// Instructions of a workgroup that may spin: in its first turn, in which most end, and in further turns.
enum { FIRST_TURN = 100000, TURN = 4000 };
enum { MAX_THREADS = 64 };

// Values of `idle_at` that are not a number of effects.
static const uint64_t BUSY = UINT64_MAX, HAS_ENDED = UINT64_MAX - 1;

typedef struct {
  const kernel_t *kernel;
  const launch_t *launch;
  struct unique_bytes *unique;
  struct order *order;
  uint64_t groups;
  // Atomic:
  uint64_t next;      // number of the next workgroup
  uint64_t resident;  // workgroups that have started and not ended
  uint64_t effects;   // turns in which a workgroup has changed memory, started or ended
  // Of each thread: `effects` when it had run for as long as is allowed without one, or a place to start in.
  uint64_t idle_at[MAX_THREADS];
  int num_threads;
  enum launch_status status;
  pthread_mutex_t lock;  // of `counters`
  counters_t *counters;
} work_t;

// The rooms of one host thread: first `active` ones with a workgroup, then free ones.
typedef struct {
  work_t *work;
  int thread;
  room_t **rooms;
  uint64_t count, active, capacity;
  uint64_t seen;  // `effects` of the launch at its last turn
  uint64_t idle;  // instructions that it has executed since then
  uint64_t random;
  counters_t counters;
} shift_t;

static void stop(work_t *work, enum launch_status status) {
  __atomic_store_n(&work->status, status, __ATOMIC_RELAXED);
}

// xorshift64
static uint64_t random_below(shift_t *s, uint64_t end) {
  s->random ^= s->random << 13;
  s->random ^= s->random >> 7;
  s->random ^= s->random << 17;
  return s->random % end;
}

// ---- rooms

static room_t *add_room(shift_t *s) {
  if (s->count == s->capacity) {
    const uint64_t capacity = s->capacity ? 2 * s->capacity : 4;
    room_t **rooms = realloc(s->rooms, capacity * sizeof *rooms);
    if (!rooms) return NULL;
    s->rooms = rooms;
    s->capacity = capacity;
  }
  room_t *room = calloc(1, sizeof *room);
  if (!room) return NULL;
  s->rooms[s->count++] = room;
  const work_t *w = s->work;
  return room_open(room, w->kernel, w->launch, w->order, w->unique) ? room : NULL;
}

static room_t *free_room(shift_t *s) { return s->active < s->count ? s->rooms[s->active] : add_room(s); }

static void close_rooms(shift_t *s) {
  for (uint64_t n = 0; n < s->active; n++) group_end(s->rooms[n], &s->counters);
  for (uint64_t n = 0; n < s->count; n++) {
    room_close(s->rooms[n]);
    free(s->rooms[n]);
  }
  free(s->rooms);
}

// ---- progress
//
// A launch of which no workgroup does anything any more ends with a finding. Each thread counts its own
// instructions since the last effect that it has seen, so one that the host has suspended in the middle of a turn
// is waited for, however long the others spin meanwhile.

static bool all_have_started(const work_t *work) {
  return __atomic_load_n(&work->next, __ATOMIC_ACQUIRE) >= work->groups;
}

// Whether there is another workgroup, and a place for it on the device.
static bool can_start(const work_t *work) {
  const uint32_t places = work->launch->resident;
  return !all_have_started(work) && (!places || __atomic_load_n(&work->resident, __ATOMIC_ACQUIRE) < places);
}

static void count_effect(work_t *work) { __atomic_fetch_add(&work->effects, 1, __ATOMIC_RELEASE); }

static void publish(shift_t *s, uint64_t idle_at) {
  __atomic_store_n(&s->work->idle_at[s->thread], idle_at, __ATOMIC_RELEASE);
}

static bool is_stuck(const work_t *work, uint64_t effects) {
  for (int n = 0; n < work->num_threads; n++) {
    const uint64_t idle_at = __atomic_load_n(&work->idle_at[n], __ATOMIC_ACQUIRE);
    if (idle_at != effects && idle_at != HAS_ENDED) return false;
  }
  return true;
}

// Counts instructions without effect; `UINT64_MAX` if the thread has no workgroup. Returns whether all threads have
// executed as many as are allowed.
static bool count_idle(shift_t *s, uint64_t executed) {
  const uint64_t effects = __atomic_load_n(&s->work->effects, __ATOMIC_ACQUIRE);
  const bool is_first = s->seen != effects || can_start(s->work);
  s->idle = is_first ? 0 : s->idle + executed < executed ? UINT64_MAX : s->idle + executed;
  s->seen = effects;
  const bool is_idle = s->idle > launch_options.max_instructions;
  publish(s, is_idle ? effects : BUSY);
  return is_idle && is_stuck(s->work, effects);
}

// ---- workgroups

// Takes one of the places that workgroups have on the device.
static bool take_place(work_t *work) {
  const uint32_t places = work->launch->resident;
  if (__atomic_fetch_add(&work->resident, 1, __ATOMIC_ACQ_REL) < places || !places) return true;
  __atomic_fetch_sub(&work->resident, 1, __ATOMIC_ACQ_REL);
  return false;
}

// Starts the next workgroup, if there is one and the device has a place for it.
static bool start_group(shift_t *s) {
  work_t *work = s->work;
  if (!can_start(work)) return false;
  publish(s, BUSY);  // before it takes the place, without which the launch may look stuck to the others
  if (!take_place(work)) return false;
  const uint64_t number = __atomic_fetch_add(&work->next, 1, __ATOMIC_ACQ_REL);
  if (number >= work->groups) return false;
  room_t *room = free_room(s);
  if (!room) {
    stop(work, LAUNCH_NO_MEMORY);
    return false;
  }
  group_start(room, work->order, number);
  s->active++;
  count_effect(work);
  return true;
}

static void end_group(shift_t *s, uint64_t n) {
  room_t *room = s->rooms[n];
  group_end(room, &s->counters);
  s->rooms[n] = s->rooms[--s->active];
  s->rooms[s->active] = room;
  __atomic_fetch_sub(&s->work->resident, 1, __ATOMIC_ACQ_REL);
}

// Reports a launch that is stuck.
static void check_progress(shift_t *s, room_t *room) {
  const bool has_effect = room->group.has_effect || group_has_ended(room);
  group_end_turn(room, has_effect);
  if (has_effect) count_effect(s->work);
  else if (count_idle(s, room->executed)) group_give_up(room, all_have_started(s->work) ? ENDLESS : NOT_RESIDENT);
}

static void run_group(shift_t *s, uint64_t n) {
  room_t *room = s->rooms[n];
  work_t *work = s->work;
  group_run(room, !work->kernel->may_spin ? UINT64_MAX : room->has_run ? TURN : FIRST_TURN);
  room->has_run = true;
  if (room->group.status == LAUNCH_DONE) check_progress(s, room);
  if (room->group.status != LAUNCH_DONE) stop(work, room->group.status);
  else if (group_has_ended(room)) end_group(s, n);
}

// Returns the room to run: one of a workgroup that starts now, or any.
static uint64_t next_room(shift_t *s) {
  if ((!s->active || random_below(s, 2)) && start_group(s)) return s->active - 1;
  return s->active ? random_below(s, s->active) : 0;
}

// ---- threads

static void *work_run(void *argument) {
  shift_t *shift = argument;
  work_t *work = shift->work;
  while (__atomic_load_n(&work->status, __ATOMIC_RELAXED) == LAUNCH_DONE) {
    const uint64_t n = next_room(shift);
    if (n < shift->active) {
      run_group(shift, n);
    } else if (all_have_started(work)) {
      break;
    } else {  // other threads have all places of the device
      count_idle(shift, UINT64_MAX);
      sched_yield();
    }
  }
  publish(shift, HAS_ENDED);
  close_rooms(shift);
  pthread_mutex_lock(&work->lock);
  counters_add(work->counters, &shift->counters);
  pthread_mutex_unlock(&work->lock);
  return NULL;
}

static int num_threads(uint64_t groups) {
  const int wanted = launch_options.threads ? launch_options.threads : (int)sysconf(_SC_NPROCESSORS_ONLN);
  const uint64_t useful = groups / 4 + 1;
  const int most = wanted < MAX_THREADS ? wanted : MAX_THREADS;
  return (uint64_t)most < useful ? most : (int)useful;
}

// Runs the launch's workgroups on its threads. The caller is the first of them.
static void run_threads(work_t *work) {
  shift_t shifts[MAX_THREADS];
  pthread_t threads[MAX_THREADS];
  for (int n = 0; n < work->num_threads; n++) {
    shifts[n] = (shift_t){.work = work, .thread = n, .random = (launch_options.seed + 1) * 0x9e3779b97f4a7c15u};
    work->idle_at[n] = BUSY;
  }
  int started = 1;
  while (started < work->num_threads && !pthread_create(&threads[started], NULL, work_run, &shifts[started])) started++;
  for (int n = started; n < work->num_threads; n++) publish(&shifts[n], HAS_ENDED);
  work_run(&shifts[0]);
  while (--started) pthread_join(threads[started], NULL);
}

enum launch_status launch_run(const kernel_t *kernel, const launch_t *launch, counters_t *counters) {
  work_t work = {.kernel = kernel, .launch = launch, .counters = counters, .lock = PTHREAD_MUTEX_INITIALIZER};
  work.groups = (uint64_t)launch->grid[0] * launch->grid[1] * launch->grid[2];
  work.num_threads = num_threads(work.groups);
  work.unique = launch_options.counts_unique_bytes ? unique_bytes_open() : NULL;
  work.order = order_open(kernel, launch);
  run_threads(&work);
  if (work.unique) unique_bytes_close(work.unique, counters);
  order_close(work.order);
  return work.status;
}
