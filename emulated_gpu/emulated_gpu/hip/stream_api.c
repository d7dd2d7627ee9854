// The API's functions for streams and events.
#include <stdlib.h>

#include "calls.h"
#include "streams.h"

// ---- streams

API hipError_t hipStreamCreateWithFlags(hipStream_t *out, unsigned flags) {
  ENTER("%u", flags);
  if (flags > hipStreamNonBlocking) return call_leave(hipErrorInvalidValue);
  *out = stream_create(current_device(), flags);
  return hipSuccess;
}
API hipError_t hipStreamCreate(hipStream_t *out) {
  ENTER(" ");
  *out = stream_create(current_device(), hipStreamDefault);
  return hipSuccess;
}

// Work already in the stream still runs; the handle is invalid from now on.
API hipError_t hipStreamDestroy(hipStream_t handle) {
  ENTER_ANYWAY("%p", (void *)handle);
  stream_t *stream = handle ? stream_of(handle) : NULL;
  if (!stream) return call_leave(hipErrorInvalidHandle);
  stream_retire(stream);
  return hipSuccess;
}

API hipError_t hipStreamSynchronize(hipStream_t handle) {
  ENTER("%p", (void *)handle);
  stream_t *stream = stream_of(handle);
  return call_leave(stream ? stream_synchronise(stream) : hipErrorInvalidHandle);
}
API hipError_t hipDeviceSynchronize(void) {
  ENTER(" ");
  return call_leave(device_synchronise(current_device()));
}

API hipError_t hipLaunchHostFunc(hipStream_t handle, hipHostFn_t call, void *data) {
  ENTER("%p", (void *)handle);
  stream_t *stream = stream_of(handle);
  if (!stream) return call_leave(hipErrorInvalidHandle);
  if (!call) return call_leave(hipErrorInvalidValue);
  return call_leave(stream_call_host(stream, call, data));
}

// ---- events: an event's handle refers to the mark of its latest hipEventRecord

static const uint64_t EVENT_MAGIC = 0x746e657665706968;

typedef struct event {
  uint64_t magic;  // 0 once the event is destroyed. It is never freed, so that a stale handle is recognised.
  unsigned flags;
  mark_t *mark;
} event_t;

static event_t *event_of(hipEvent_t handle) { return handle && handle->magic == EVENT_MAGIC ? handle : NULL; }

static hipError_t create_event(hipEvent_t *out, unsigned flags) {
  event_t *event = calloc(1, sizeof *event);
  if (!event) return call_leave(hipErrorOutOfMemory);
  *event = (event_t){.magic = EVENT_MAGIC, .flags = flags};
  *out = event;
  return hipSuccess;
}

API hipError_t hipEventCreateWithFlags(hipEvent_t *out, unsigned flags) {
  ENTER("%u", flags);
  return create_event(out, flags);
}
API hipError_t hipEventCreate(hipEvent_t *out) {
  ENTER(" ");
  return create_event(out, 0);
}

static void replace_mark(event_t *event, mark_t *mark) {
  pthread_mutex_lock(&work_lock);
  if (event->mark) mark_release(event->mark);
  event->mark = mark;
  pthread_mutex_unlock(&work_lock);
}

// Returns the event's latest mark, with a reference that the caller owns; NULL if none was recorded.
static mark_t *latest(event_t *event) {
  pthread_mutex_lock(&work_lock);
  mark_t *mark = event->mark;
  if (mark) mark->references++;
  pthread_mutex_unlock(&work_lock);
  return mark;
}

API hipError_t hipEventDestroy(hipEvent_t handle) {
  ENTER_ANYWAY("%p", (void *)handle);
  event_t *event = event_of(handle);
  if (!event) return call_leave(hipErrorInvalidHandle);
  event->magic = 0;
  replace_mark(event, NULL);
  return hipSuccess;
}

API hipError_t hipEventRecord(hipEvent_t handle, hipStream_t stream_handle) {
  ENTER("%p %p", (void *)handle, (void *)stream_handle);
  event_t *event = event_of(handle);
  stream_t *stream = stream_of(stream_handle);
  if (!event || !stream) return call_leave(hipErrorInvalidHandle);
  replace_mark(event, stream_mark(stream));
  return hipSuccess;
}

API hipError_t hipEventQuery(hipEvent_t handle) {
  ENTER("%p", (void *)handle);
  event_t *event = event_of(handle);
  if (!event) return call_leave(hipErrorInvalidHandle);
  pthread_mutex_lock(&work_lock);
  const mark_t *r = event->mark;
  const hipError_t error = !r ? hipSuccess : r->is_done ? r->error : hipErrorNotReady;
  pthread_mutex_unlock(&work_lock);
  return call_leave(error);
}

API hipError_t hipEventSynchronize(hipEvent_t handle) {
  ENTER("%p", (void *)handle);
  event_t *event = event_of(handle);
  if (!event) return call_leave(hipErrorInvalidHandle);
  mark_t *mark = latest(event);
  if (!mark) return hipSuccess;
  const hipError_t error = mark_wait(mark);
  mark_drop(mark);
  return call_leave(error);
}

API hipError_t hipStreamWaitEvent(hipStream_t stream_handle, hipEvent_t handle, unsigned flags) {
  ENTER("%p %p", (void *)stream_handle, (void *)handle);
  event_t *event = event_of(handle);
  stream_t *stream = stream_of(stream_handle);
  if (!event || !stream) return call_leave(hipErrorInvalidHandle);
  if (flags) return call_leave(hipErrorInvalidValue);
  mark_t *mark = latest(event);
  if (!mark) return hipSuccess;
  stream_wait(stream, mark);
  mark_drop(mark);
  return hipSuccess;
}

static double milliseconds(const struct timespec *from, const struct timespec *to) {
  return (double)(to->tv_sec - from->tv_sec) * 1e3 + (double)(to->tv_nsec - from->tv_nsec) * 1e-6;
}

static hipError_t elapsed(float *out, const event_t *start, const event_t *stop) {
  if (!start || !stop || !start->mark || !stop->mark) return hipErrorInvalidHandle;
  if ((start->flags | stop->flags) & hipEventDisableTiming) return hipErrorInvalidHandle;
  if (!start->mark->is_done || !stop->mark->is_done) return hipErrorNotReady;
  *out = (float)milliseconds(&start->mark->when, &stop->mark->when);
  return hipSuccess;
}

API hipError_t hipEventElapsedTime(float *out, hipEvent_t start, hipEvent_t stop) {
  ENTER("%p %p", (void *)start, (void *)stop);
  pthread_mutex_lock(&work_lock);
  const hipError_t error = elapsed(out, event_of(start), event_of(stop));
  pthread_mutex_unlock(&work_lock);
  return call_leave(error);
}
