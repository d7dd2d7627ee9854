// Streams as queues: submits work and marks, and waits for marks. order.c decides when work runs.
#include "streams.h"

#include <stdlib.h>
#include <string.h>

static const uint64_t STREAM_MAGIC = 0x6d61657274736968;

pthread_mutex_t work_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t mark_finished = PTHREAD_COND_INITIALIZER;
pthread_cond_t work_finished = PTHREAD_COND_INITIALIZER;
static mark_t *wanted;

stream_t *stream_create(device_t *device, unsigned flags) {
  stream_t *s = calloc(1, sizeof *s);
  if (!s) abort();
  *s = (stream_t){.magic = STREAM_MAGIC, .device = device, .flags = flags, .tail = &s->head};
  pthread_mutex_lock(&work_lock);
  s->number = device->num_streams++;
  s->next = device->streams;
  device->streams = s;
  pthread_mutex_unlock(&work_lock);
  return s;
}

stream_t *stream_of(hipStream_t handle) {
  if (!handle) return current_device()->null_stream;
  if ((uintptr_t)handle <= 2) return NULL;  // hipStreamLegacy and hipStreamPerThread are not supported
  stream_t *s = handle;
  return s->magic == STREAM_MAGIC && !s->is_destroyed ? s : NULL;
}

// ---- callers must hold `work_lock`

void device_wake(device_t *device) { pthread_cond_signal(&device->work_ready); }

void devices_wake(void) {
  for (int d = 0; d < settings.num_devices; d++) device_wake(&devices[d]);
}

void device_fail(device_t *device, hipError_t error) {
  if (device->error == hipSuccess) device->error = error;
  device_wake(device);
}

bool device_is_idle(const device_t *device) {
  for (const stream_t *s = device->streams; s; s = s->next)
    if (s->head || s->is_busy) return false;
  return true;
}

static bool is_idle(const stream_t *s) { return !s->head && !s->is_busy; }

static void append(stream_t *stream, work_t *work) {
  *stream->tail = work;
  stream->tail = &work->next;
}

work_t *stream_take_head(stream_t *stream) {
  work_t *work = stream->head;
  stream->head = work->next;
  if (!stream->head) stream->tail = &stream->head;
  return work;
}

// The stream is only removed from the list and never freed, so that a stale handle is recognised.
void stream_sweep(stream_t *stream) {
  if (!stream->is_destroyed || !is_idle(stream)) return;
  stream_t **link = &stream->device->streams;
  while (*link && *link != stream) link = &(*link)->next;
  if (*link) *link = stream->next;
}

void stream_retire(stream_t *stream) {
  pthread_mutex_lock(&work_lock);
  stream->is_destroyed = true;
  stream_sweep(stream);
  pthread_mutex_unlock(&work_lock);
}

static work_t *new_work(enum work_kind kind, size_t payload_bytes) {
  work_t *work = calloc(1, sizeof *work + payload_bytes);
  if (!work) abort();
  work->kind = kind;
  return work;
}

static void append_wait(stream_t *stream, mark_t *mark) {
  if (mark->is_done) return;
  work_t *work = new_work(WORK_WAIT, 0);
  work->mark = mark;
  mark->references++;
  append(stream, work);
}

static mark_t *append_mark(stream_t *stream) {
  mark_t *mark = calloc(1, sizeof *mark);
  if (!mark) abort();
  *mark = (mark_t){.references = 2, .stream = stream};  // one of the queue and one of the caller
  work_t *work = new_work(WORK_MARK, 0);
  work->mark = mark;
  append(stream, work);
  return mark;
}

static void follow(stream_t *stream, stream_t *before) {
  if (stream == before || is_idle(before)) return;
  mark_t *mark = append_mark(before);
  append_wait(stream, mark);
  mark_release(mark);
}

// HIP's rule for the null stream: its work waits for work submitted earlier to the device's other streams,
// and their work waits for earlier work of the null stream. Streams with hipStreamNonBlocking are exempt.
static void follow_null_stream(stream_t *stream) {
  device_t *device = stream->device;
  if (stream != device->null_stream) {
    if (!(stream->flags & hipStreamNonBlocking)) follow(stream, device->null_stream);
    return;
  }
  for (stream_t *s = device->streams; s; s = s->next)
    if (!(s->flags & hipStreamNonBlocking)) follow(stream, s);
}

mark_t *wanted_marks(void) { return wanted; }

static void set_wanted(mark_t *mark) {
  mark->next_wanted = wanted;
  mark->wanted_by = &wanted;
  if (wanted) wanted->wanted_by = &mark->next_wanted;
  wanted = mark;
}

static void set_unwanted(mark_t *mark) {
  *mark->wanted_by = mark->next_wanted;
  if (mark->next_wanted) mark->next_wanted->wanted_by = mark->wanted_by;
}

void mark_finish(mark_t *mark, hipError_t error) {
  mark->is_done = true;
  mark->error = error;
  clock_gettime(CLOCK_MONOTONIC, &mark->when);
  if (mark->num_waiting) pthread_cond_broadcast(&mark_finished);
}

void mark_release(mark_t *mark) {
  if (!--mark->references) free(mark);
}

// ---- for the API

static hipError_t submit(stream_t *stream, work_t *work) {
  pthread_mutex_lock(&work_lock);
  const hipError_t error = stream->device->error;
  if (error == hipSuccess) {
    follow_null_stream(stream);
    append(stream, work);
    device_wake(stream->device);
  }
  pthread_mutex_unlock(&work_lock);
  if (error == hipSuccess) return hipSuccess;
  if (work->release) work->release(work->payload);
  free(work);
  return error;
}

hipError_t stream_submit(stream_t *stream, hipError_t (*run)(void *), void (*release)(void *),
                         const void *payload, size_t bytes) {
  work_t *work = new_work(WORK_RUN, bytes);
  work->run = run;
  work->release = release;
  memcpy(work->payload, payload, bytes);
  return submit(stream, work);
}

hipError_t stream_call_host(stream_t *stream, hipHostFn_t call, void *data) {
  work_t *work = new_work(WORK_HOST, 0);
  work->call = call;
  work->data = data;
  return submit(stream, work);
}

void stream_wait(stream_t *stream, mark_t *mark) {
  pthread_mutex_lock(&work_lock);
  append_wait(stream, mark);
  device_wake(stream->device);
  pthread_mutex_unlock(&work_lock);
}

mark_t *stream_mark(stream_t *stream) {
  pthread_mutex_lock(&work_lock);
  follow_null_stream(stream);
  mark_t *mark = append_mark(stream);
  device_wake(stream->device);
  pthread_mutex_unlock(&work_lock);
  return mark;
}

void mark_drop(mark_t *mark) {
  pthread_mutex_lock(&work_lock);
  mark_release(mark);
  pthread_mutex_unlock(&work_lock);
}

hipError_t mark_wait(mark_t *mark) {
  pthread_mutex_lock(&work_lock);
  mark->references++;
  if (!mark->num_waiting++) set_wanted(mark);
  if (settings.is_late) devices_wake();  // executors may have work that this host now needs
  while (!mark->is_done) pthread_cond_wait(&mark_finished, &work_lock);
  if (!--mark->num_waiting) set_unwanted(mark);
  const hipError_t error = mark->error;
  mark_release(mark);
  pthread_mutex_unlock(&work_lock);
  return error;
}

hipError_t stream_synchronise(stream_t *stream) {
  mark_t *mark = stream_mark(stream);
  const hipError_t error = mark_wait(mark);
  mark_drop(mark);
  return error;
}

hipError_t device_synchronise(device_t *device) {
  hipError_t error = hipSuccess;
  pthread_mutex_lock(&work_lock);
  const stream_t *newest = device->streams;
  pthread_mutex_unlock(&work_lock);
  for (stream_t *s = (stream_t *)newest; s; s = s->next) {
    const hipError_t of_stream = stream_synchronise(s);
    if (of_stream != hipSuccess) error = of_stream;
  }
  return error;
}
