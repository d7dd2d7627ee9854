// The emulated devices, what they are (chip, memory), and which one a thread is using.
#pragma once
#include <pthread.h>

#include "hip.h"

typedef struct {
  const char *name;      // as in `gcnArchName`
  uint32_t machine;      // EF_AMDGPU_MACH of its code objects
  int major, minor, lanes, compute_units;
  uint32_t lds_bytes;    // that a workgroup can have
} chip_t;

enum { MAX_DEVICES = 16 };

typedef struct device {
  int index;
  uint64_t peers;              // bit by device: access enabled; atomic
  // Guarded by the lock of memory.c:
  uint64_t memory_bytes, used_bytes, peak_bytes;
  // Guarded by `work_lock` (streams.h):
  hipError_t error;            // once work has failed, what everything that waits for this device returns
  bool is_lost, is_stalled;
  struct stream *streams;      // all, newest first
  struct stream *null_stream;
  int num_streams;             // ever made
  uint64_t random;             // state of the generator that orders its work
  pthread_cond_t work_ready;   // for its executor: a stream may have got something to run
} device_t;

typedef struct {
  const chip_t *chip;
  int num_devices;
  uint64_t memory_bytes;  // of one device
  uint64_t seed;
  bool is_late;           // see order.c
  double idle_ms;
  int poison;             // the byte that fresh memory is filled with
  bool logs_calls;
} settings_t;

extern settings_t settings;
extern device_t devices[MAX_DEVICES];

// Reads the environment.
void devices_read_settings(void);
// The stack of contexts that each thread has, whose top is the current device; NULL is device 0.
device_t *current_device(void);
bool context_push(device_t *device);  // false where the host is out of memory
bool context_pop(device_t **context);  // false where there is none; `context` may be NULL
hipError_t context_set(device_t *device);  // in place of the top
bool context_is_known(const device_t *context);
bool device_is_lost(const device_t *device);
// Makes all devices another chip for modules that are loaded from now on; false where the name is none.
bool device_set_chip(const char *name);
// The device of an ordinal, or NULL.
device_t *device_at(int ordinal);
