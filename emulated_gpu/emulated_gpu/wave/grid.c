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

typedef struct {
  const kernel_t *kernel;
  const launch_t *launch;
  struct unique_bytes *unique;
  struct order *order;
  uint64_t groups;
  // Atomic:
  uint64_t next;      // number of the next workgroup
  uint64_t resident;  // workgroups that have started and not ended
  uint64_t idle;      // instructions executed since a workgroup has changed memory, started or ended
  enum launch_status status;
  pthread_mutex_t lock;  // of `counters`
  counters_t *counters;
} work_t;

// The rooms of one host thread: first `active` ones with a workgroup, then free ones.
typedef struct {
  work_t *work;
  room_t **rooms;
  uint64_t count, active, capacity;
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

// ---- workgroups

static bool all_have_started(const work_t *work) {
  return __atomic_load_n(&work->next, __ATOMIC_RELAXED) >= work->groups;
}

// Takes one of the places that workgroups have on the device.
static bool take_place(work_t *work) {
  const uint32_t places = work->launch->resident;
  if (__atomic_fetch_add(&work->resident, 1, __ATOMIC_RELAXED) < places || !places) return true;
  __atomic_fetch_sub(&work->resident, 1, __ATOMIC_RELAXED);
  return false;
}

// Starts the next workgroup, if there is one and the device has a place for it.
static bool start_group(shift_t *s) {
  work_t *work = s->work;
  if (all_have_started(work) || !take_place(work)) return false;
  const uint64_t number = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED);
  if (number >= work->groups) return false;
  room_t *room = free_room(s);
  if (!room) {
    stop(work, LAUNCH_NO_MEMORY);
    return false;
  }
  group_start(room, work->order, number);
  s->active++;
  return true;
}

static void end_group(shift_t *s, uint64_t n) {
  room_t *room = s->rooms[n];
  group_end(room, &s->counters);
  s->rooms[n] = s->rooms[--s->active];
  s->rooms[s->active] = room;
  __atomic_fetch_sub(&s->work->resident, 1, __ATOMIC_RELAXED);
}

static bool has_place(const work_t *work) {
  const uint32_t places = work->launch->resident;
  return !places || __atomic_load_n(&work->resident, __ATOMIC_RELAXED) < places;
}

// Reports a launch of which no workgroup does anything any more, and no other one can start.
static void check_progress(work_t *work, room_t *room) {
  group_t *g = &room->group;
  const bool can_start = !all_have_started(work) && has_place(work);
  if (g->has_effect || group_has_ended(room) || can_start) {
    g->has_effect = false;
    __atomic_store_n(&work->idle, 0, __ATOMIC_RELAXED);
  } else if (__atomic_add_fetch(&work->idle, room->executed, __ATOMIC_RELAXED) > launch_options.max_instructions) {
    group_give_up(room, all_have_started(work) ? ENDLESS : NOT_RESIDENT);
  }
}

static void run_group(shift_t *s, uint64_t n) {
  room_t *room = s->rooms[n];
  work_t *work = s->work;
  group_run(room, !work->kernel->may_spin ? UINT64_MAX : room->has_run ? TURN : FIRST_TURN);
  room->has_run = true;
  if (room->group.status == LAUNCH_DONE) check_progress(work, room);
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
  work_t *work = argument;
  shift_t shift = {.work = work, .random = (launch_options.seed + 1) * 0x9e3779b97f4a7c15u};
  while (__atomic_load_n(&work->status, __ATOMIC_RELAXED) == LAUNCH_DONE) {
    const uint64_t n = next_room(&shift);
    if (n < shift.active) run_group(&shift, n);
    else if (all_have_started(work)) break;
    else sched_yield();  // other threads have all places of the device
  }
  close_rooms(&shift);
  pthread_mutex_lock(&work->lock);
  counters_add(work->counters, &shift.counters);
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
  work.groups = (uint64_t)launch->grid[0] * launch->grid[1] * launch->grid[2];
  work.unique = launch_options.counts_unique_bytes ? unique_bytes_open() : NULL;
  work.order = order_open(kernel, launch);
  pthread_t threads[MOST];
  int helpers = num_threads(work.groups) - 1, started = 0;
  while (started < helpers && started < MOST && !pthread_create(&threads[started], NULL, work_run, &work)) started++;
  work_run(&work);
  while (started) pthread_join(threads[--started], NULL);
  if (work.unique) unique_bytes_close(work.unique, counters);
  order_close(work.order);
  return work.status;
}
