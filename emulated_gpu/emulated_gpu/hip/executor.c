// Each device has an executor thread, which runs one work item at a time in the order that order.c chooses,
// and a thread that calls the host functions in the device's streams.
#include "executor.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "memory.h"
#include "order.h"
#include "report.h"

// A host function to call, and its stream.
typedef struct { stream_t *stream; work_t *work; } host_call_t;

enum { MAX_HOST_CALLS = 1024 };
static struct host_queue {
  host_call_t calls[MAX_HOST_CALLS];
  size_t first, count;
  pthread_cond_t filled;
} host_queues[MAX_DEVICES];

static bool is_stopping;
static int num_running;
static _Thread_local bool is_host_thread;

static void free_work(work_t *work) {
  if (work->release) work->release(work->payload);
  free(work);
}

// Runs a work item. Callers must hold `work_lock`, which is released while the item runs.
static void run(stream_t *stream, work_t *work) {
  device_t *device = stream->device;
  hipError_t error = device->error;
  stream->is_busy = true;
  num_running++;
  pthread_mutex_unlock(&work_lock);
  memory_begin_use();
  if (error == hipSuccess) error = work->run(work->payload);
  memory_end_use();
  free_work(work);
  pthread_mutex_lock(&work_lock);
  num_running--;
  stream->is_busy = false;
  if (error != hipSuccess) device_fail(device, error);
}

static void hand_to_host(stream_t *stream, work_t *work) {
  struct host_queue *q = &host_queues[stream->device->index];
  if (stream->device->error != hipSuccess || q->count == MAX_HOST_CALLS) return free_work(work);
  stream->is_busy = true;
  q->calls[(q->first + q->count++) % MAX_HOST_CALLS] = (host_call_t){stream, work};
  pthread_cond_signal(&q->filled);
}

static void finish_step(stream_t *stream) {
  stream_sweep(stream);
  pthread_cond_broadcast(&work_finished);
  if (settings.is_late) devices_wake();  // what a host waits for may now depend on another device's work
}

// Wakes each device with a stream that waits for the mark.
static void wake_blocked_by(const mark_t *mark) {
  for (int d = 0; d < settings.num_devices; d++)
    for (stream_t *s = devices[d].streams; s; s = s->next)
      if (s->head && s->head->kind == WORK_WAIT && s->head->mark == mark) device_wake(&devices[d]);
}

static void step(stream_t *stream) {
  work_t *work = stream_take_head(stream);
  switch (work->kind) {
    case WORK_RUN: run(stream, work); break;
    case WORK_HOST: hand_to_host(stream, work); break;
    case WORK_MARK:
      mark_finish(work->mark, stream->device->error);
      wake_blocked_by(work->mark);
      mark_release(work->mark);
      free_work(work);
      break;
    case WORK_WAIT:
      mark_release(work->mark);
      free_work(work);
      break;
  }
  finish_step(stream);
}

// Sleeps at random for a short time, so that other streams get work and more orders become possible.
static void dawdle(device_t *device) {
  const uint64_t draw = order_random(device);
  if (settings.is_late || draw % 8) return;
  const struct timespec pause = {.tv_nsec = (long)(draw / 8 % 100000)};
  pthread_mutex_unlock(&work_lock);
  nanosleep(&pause, NULL);
  pthread_mutex_lock(&work_lock);
}

static void *execute(void *argument) {
  device_t *device = argument;
  pthread_mutex_lock(&work_lock);
  while (!is_stopping) {
    if (order_next(device)) dawdle(device);
    stream_t *stream = order_next(device);
    if (stream) step(stream);
    else order_wait(device);
  }
  pthread_mutex_unlock(&work_lock);
  return NULL;
}

static void *call_host(void *argument) {
  struct host_queue *q = argument;
  is_host_thread = true;
  pthread_mutex_lock(&work_lock);
  while (!is_stopping) {
    if (!q->count) {
      pthread_cond_wait(&q->filled, &work_lock);
      continue;
    }
    const host_call_t c = q->calls[q->first];
    q->first = (q->first + 1) % MAX_HOST_CALLS;
    q->count--;
    pthread_mutex_unlock(&work_lock);
    c.work->call(c.work->data);
    free_work(c.work);
    pthread_mutex_lock(&work_lock);
    c.stream->is_busy = false;
    device_wake(c.stream->device);
    finish_step(c.stream);
  }
  pthread_mutex_unlock(&work_lock);
  return NULL;
}

static void start_thread(const char *role, const device_t *device, void *(*body)(void *), void *argument) {
  pthread_t thread;
  char name[16];
  snprintf(name, sizeof name, "%s %d", role, device->index);
  if (pthread_create(&thread, NULL, body, argument)) abort();
  pthread_setname_np(thread, name);
  pthread_detach(thread);
}

void executor_start(device_t *device) {
  order_seed(device);
  pthread_cond_init(&device->work_ready, NULL);
  pthread_cond_init(&host_queues[device->index].filled, NULL);
  device->null_stream = stream_create(device, hipStreamDefault);
  start_thread("gpu", device, execute, device);
  start_thread("gpu host", device, call_host, &host_queues[device->index]);
}

void executor_note_call(const char *function) {
  if (strcmp(function, "hipEventQuery")) order_note_activity();
  if (is_host_thread) report_misuse(function, NULL, "called in a host function of a stream");
}

// Runs at the process's end, before report.c writes its summary. No work is started any more. Work that runs
// uses the process's memory, so it gets two seconds to end.
__attribute__((destructor(201))) static void stop(void) {
  pthread_mutex_lock(&work_lock);
  is_stopping = true;
  devices_wake();
  for (int d = 0; d < settings.num_devices; d++) pthread_cond_signal(&host_queues[d].filled);
  struct timespec until;
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += 2;
  while (num_running && !pthread_cond_timedwait(&work_finished, &work_lock, &until)) {}
  pthread_mutex_unlock(&work_lock);
}
