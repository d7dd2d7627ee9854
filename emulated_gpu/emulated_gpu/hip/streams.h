// Streams as queues of work, and events as marks in these queues.
#pragma once
#include <pthread.h>
#include <time.h>

#include "devices.h"

// `work_lock` guards all queues; work runs without holding it. Each kind of waiting thread has its own
// condition variable, so that a change wakes only threads that can continue. With a single one, every change
// woke all threads, which took long on a busy machine.
extern pthread_mutex_t work_lock;
extern pthread_cond_t mark_finished;  // for host threads that wait for a mark
extern pthread_cond_t work_finished;  // for threads that wait until a device is idle

// A position in a stream, which is done when the work before it is done. hipEventRecord and waiting hosts
// create marks. They are reference-counted.
typedef struct mark {
  int references;
  bool is_done;
  hipError_t error;        // the device's error when the mark was reached
  struct timespec when;
  struct stream *stream;
  int num_waiting;         // host threads that wait for the mark
  struct mark *next_wanted, **wanted_by;  // in the list of marks that hosts wait for
} mark_t;

enum work_kind { WORK_RUN, WORK_MARK, WORK_WAIT, WORK_HOST };

typedef struct work {
  struct work *next;
  enum work_kind kind;
  mark_t *mark;                      // WORK_MARK, WORK_WAIT
  hipError_t (*run)(void *payload);      // WORK_RUN
  void (*release)(void *payload);        // called at the end, whether the work ran or not; may be NULL
  hipHostFn_t call;                      // WORK_HOST
  void *data;
  _Alignas(16) char payload[];
} work_t;

typedef struct stream {
  uint64_t magic;
  device_t *device;
  int number;              // counts the device's streams in order of creation; 0 is the null stream
  unsigned flags;
  bool is_busy;            // work that was taken from the queue is running
  bool is_stalled, is_destroyed, is_needed;
  work_t *head, **tail;
  struct stream *next;     // in the device's list of streams
} stream_t;

stream_t *stream_create(device_t *device, unsigned flags);
// Makes the handle invalid. Work that was submitted to the stream still runs.
void stream_retire(stream_t *stream);
// Returns the stream of a handle, or NULL if it is invalid. The handle NULL is the current device's null
// stream.
stream_t *stream_of(hipStream_t handle);

// Submits a call of `run` with a copy of `payload`. After a failure of the device, work is released without
// running.
hipError_t stream_submit(stream_t *stream, hipError_t (*run)(void *), void (*release)(void *),
                         const void *payload, size_t bytes);
hipError_t stream_call_host(stream_t *stream, hipHostFn_t call, void *data);
void stream_wait(stream_t *stream, mark_t *mark);

// Appends a mark to the stream. The caller owns a reference, which mark_drop releases.
mark_t *stream_mark(stream_t *stream);
void mark_drop(mark_t *mark);
hipError_t mark_wait(mark_t *mark);

// Wait for all work submitted so far to a stream, or to all streams of a device; return the device's error.
hipError_t stream_synchronise(stream_t *stream);
hipError_t device_synchronise(device_t *device);

// Callers of the following functions must hold `work_lock`.
mark_t *wanted_marks(void);
work_t *stream_take_head(stream_t *stream);
// Removes a stream from its device's list if it was destroyed and has no work left.
void stream_sweep(stream_t *stream);
void mark_finish(mark_t *mark, hipError_t error);
void mark_release(mark_t *mark);
// Make the executor of one device, or of all devices, look for work.
void device_wake(device_t *device);
void devices_wake(void);
// Sets the device's error, unless it has one. Its queued work is then released without running.
void device_fail(device_t *device, hipError_t error);
// Whether the device has no work queued or running.
bool device_is_idle(const device_t *device);
