// The emulated devices, their properties (chip, memory), and each thread's current device.
#pragma once
#include <pthread.h>

#include "hip.h"

typedef struct {
  const char *name;      // as in `gcnArchName`
  uint32_t machine;      // EF_AMDGPU_MACH in code objects for this chip
  int major, minor, lanes, compute_units;
  uint32_t lds_bytes;    // maximum per workgroup, and of a compute unit
  uint32_t lds_unit;     // in which LDS is allocated
  uint32_t simds, simd_waves;  // SIMDs of a compute unit, and the most waves of each
  uint32_t vgprs, vgpr_unit;   // per lane of a SIMD, and the unit in which a wave takes them
} chip_t;

enum { MAX_DEVICES = 16 };

typedef struct device {
  int index;
  uint64_t peers;              // bit i: access to device i is enabled; atomic
  // Guarded by the lock of memory.c:
  uint64_t memory_bytes, used_bytes, peak_bytes;
  // Guarded by `work_lock` (streams.h):
  hipError_t error;            // of the first work that failed; waiting for this device then returns it
  bool is_lost, is_stalled;
  struct stream *streams;      // list of all streams, newest first
  struct stream *null_stream;
  int num_streams;             // created so far
  uint64_t random;             // state of the generator that orders the device's work
  pthread_cond_t work_ready;   // wakes the device's executor when a stream may have work to run
} device_t;

typedef struct {
  const chip_t *chip;
  int num_devices;
  uint64_t memory_bytes;  // per device
  uint64_t seed;
  bool is_late;           // see order.c
  double idle_ms;
  int poison;             // the byte that fresh memory is filled with
  bool logs_calls;
} settings_t;

extern settings_t settings;
extern device_t devices[MAX_DEVICES];

// Reads the settings from environment variables; aborts for an invalid value.
void devices_read_settings(void);
// The current device is the top of the thread's stack of contexts. An empty stack, or NULL, means device 0.
device_t *current_device(void);
bool context_push(device_t *device);  // false if the host is out of memory
bool context_pop(device_t **context);  // false if the stack is empty; `context` may be NULL
hipError_t context_set(device_t *device);  // replaces the top
bool context_is_known(const device_t *context);
bool device_is_lost(const device_t *device);
// Changes the chip of all devices, for modules loaded later. Returns false for an unknown name.
bool device_set_chip(const char *name);
// Returns the device with this number, or NULL.
device_t *device_at(int ordinal);
