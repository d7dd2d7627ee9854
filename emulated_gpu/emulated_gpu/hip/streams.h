// Streams as queues of work, and events as marks in a queue.
#pragma once
#include <pthread.h>
#include <time.h>

#include "devices.h"

// One lock for all queues; work itself runs without it. Each kind of waiter has a condition of its own, so that a
// change wakes only the threads that can continue: one condition for all made every thread take the processor, which
// on a loaded machine each had to wait for.
extern pthread_mutex_t work_lock;
extern pthread_cond_t mark_finished;  // for hosts that wait for a mark
extern pthread_cond_t work_finished;  // for what waits until a device is idle

// A place in a stream's order, made by hipEventRecord or by a host that waits. Counted references.
typedef struct mark {
  int references;
  bool is_done;
  hipError_t error;        // that the device had when the mark was reached
  struct timespec when;
  struct stream *stream;
  int num_waiting;         // host threads
  struct mark *next_wanted, **wanted_by;  // in the list of marks that hosts wait for
} mark_t;

enum work_kind { WORK_RUN, WORK_MARK, WORK_WAIT, WORK_HOST };

typedef struct work {
  struct work *next;
  enum work_kind kind;
  mark_t *mark;                      // WORK_MARK, WORK_WAIT
  hipError_t (*run)(void *payload);      // WORK_RUN
  void (*release)(void *payload);        // at the end, whether it ran or not; may be NULL
  hipHostFn_t call;                      // WORK_HOST
  void *data;
  _Alignas(16) char payload[];
} work_t;

typedef struct stream {
  uint64_t magic;
  device_t *device;
  int number;              // of its device's streams, by creation; 0 is the null stream
  unsigned flags;
  bool is_busy;            // something taken from the queue is running
  bool is_stalled, is_destroyed, is_needed;
  work_t *head, **tail;
  struct stream *next;     // of the device
} stream_t;

stream_t *stream_create(device_t *device, unsigned flags);
// Refuses the handle from now on; what the stream has been given still runs.
void stream_retire(stream_t *stream);
// The stream of a handle (NULL: the current device's null stream), or NULL.
stream_t *stream_of(hipStream_t handle);

// Queues a call of `run` with a copy of `payload`. Work after a failure on the device is not run, only
// released.
hipError_t stream_submit(stream_t *stream, hipError_t (*run)(void *), void (*release)(void *),
                         const void *payload, size_t bytes);
hipError_t stream_call_host(stream_t *stream, hipHostFn_t call, void *data);
void stream_wait(stream_t *stream, mark_t *mark);

// A mark at the stream's end. The caller owns a reference.
mark_t *stream_mark(stream_t *stream);
void mark_drop(mark_t *mark);
hipError_t mark_wait(mark_t *mark);

// Waits for all that has been given to one stream, or to all streams of a device.
hipError_t stream_synchronise(stream_t *stream);
hipError_t device_synchronise(device_t *device);

// With `work_lock` held:
mark_t *wanted_marks(void);
work_t *stream_take_head(stream_t *stream);
// Forgets a stream that was destroyed and has nothing left to do.
void stream_sweep(stream_t *stream);
void mark_finish(mark_t *mark, hipError_t error);
void mark_release(mark_t *mark);
// The device's thread looks for something to run, or all devices' threads do.
void device_wake(device_t *device);
void devices_wake(void);
// A device that fails: what it has been given is released without running.
void device_fail(device_t *device, hipError_t error);
// Whether it has nothing left to do.
bool device_is_idle(const device_t *device);
