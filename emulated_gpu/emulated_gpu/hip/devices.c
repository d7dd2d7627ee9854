// Devices and contexts: a device has one context, its address.
#include "devices.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "calls.h"
#include "executor.h"
#include "faults.h"
#include "report.h"

static const chip_t chips[] = {
  {"gfx942", 0x4c, 9, 4, 64, 304, 64 << 10},
  {"gfx950", 0x4f, 9, 5, 64, 256, 160 << 10},
  {"gfx1100", 0x41, 11, 0, 32, 96, 64 << 10},
  {"gfx1201", 0x4e, 12, 0, 32, 64, 64 << 10},
};
enum { NUM_CHIPS = sizeof chips / sizeof *chips };

settings_t settings;
device_t devices[MAX_DEVICES];
static pthread_once_t started = PTHREAD_ONCE_INIT;

static _Noreturn void refuse(const char *variable, const char *value) {
  fprintf(stderr, "emulated_gpu: %s=%s is not understood\n", variable, value);
  abort();
}

static uint64_t number_of(const char *variable, uint64_t standard, uint64_t low, uint64_t high) {
  const char *text = getenv(variable);
  if (!text || !*text) return standard;
  char *end;
  const uint64_t value = strtoull(text, &end, 0);
  if (*end || value < low || value > high) refuse(variable, text);
  return value;
}

bool device_set_chip(const char *name) {
  for (int i = 0; i < NUM_CHIPS; i++) {
    if (strcmp(name, chips[i].name)) continue;
    settings.chip = &chips[i];
    return true;
  }
  return false;
}

static void read_chip(void) {
  const char *name = getenv("EMULATED_GPU_CHIP");
  if (!device_set_chip(name && *name ? name : "gfx942")) refuse("EMULATED_GPU_CHIP", name);
}

static bool order_of_environment(void) {
  const char *order = getenv("EMULATED_GPU_ORDER");
  if (!order || !*order || !strcmp(order, "random")) return false;
  if (strcmp(order, "late")) refuse("EMULATED_GPU_ORDER", order);
  return true;
}

static void read_settings(void) {
  read_chip();
  settings.num_devices = (int)number_of("EMULATED_GPU_DEVICES", 1, 0, MAX_DEVICES);
  settings.memory_bytes = number_of("EMULATED_GPU_MEMORY", 4ull << 30, 0, UINT64_MAX);
  settings.seed = number_of("EMULATED_GPU_SEED", 0, 0, UINT64_MAX);
  settings.poison = (int)number_of("EMULATED_GPU_POISON", 0xff, 0, 0xff);
  settings.is_late = order_of_environment();
  settings.idle_ms = (double)number_of("EMULATED_GPU_IDLE_MS", 2, 0, 60000);
  launch_options.threads = (int)number_of("EMULATED_GPU_THREADS", 0, 0, 1024);
  launch_options.max_instructions =
      number_of("EMULATED_GPU_MAX_INSTRUCTIONS", launch_options.max_instructions, 1, UINT64_MAX);
  settings.logs_calls = number_of("EMULATED_GPU_LOG", 0, 0, 1);
}

static void start(void) {
  read_settings();
  report_start();
  for (int i = 0; i < settings.num_devices; i++) {
    devices[i].index = i;
    devices[i].memory_bytes = settings.memory_bytes;
    executor_start(&devices[i]);
  }
  faults_start();
}

void devices_start(void) { pthread_once(&started, start); }

device_t *device_at(int ordinal) {
  return ordinal >= 0 && ordinal < settings.num_devices ? &devices[ordinal] : NULL;
}

// ---- contexts, of which each thread has a stack; it has no limit, as IREE pushes more than it pops

static _Thread_local device_t **contexts;
static _Thread_local int num_contexts, capacity;

static bool push_context(device_t *device) {
  if (num_contexts == capacity) {
    const int wanted = capacity ? 2 * capacity : 64;
    device_t **grown = realloc(contexts, (size_t)wanted * sizeof *grown);
    if (!grown) return false;
    contexts = grown;
    capacity = wanted;
  }
  contexts[num_contexts++] = device;
  return true;
}

device_t *current_device(void) {
  device_t *context = num_contexts ? contexts[num_contexts - 1] : NULL;
  return context ? context : &devices[0];
}

static hipError_t make_current(device_t *device) {
  if (num_contexts) contexts[num_contexts - 1] = device;
  else if (!push_context(device)) return hipErrorOutOfMemory;
  return hipSuccess;
}

static bool is_context(const device_t *context) {
  return !context || (context >= devices && context < devices + settings.num_devices);
}

API hipError_t hipCtxSetCurrent(hipCtx_t context) {
  ENTER_ANYWAY("%p", (void *)context);
  if (!is_context(context)) return call_leave(hipErrorInvalidContext);
  return make_current(context);
}
API hipError_t hipCtxGetCurrent(hipCtx_t *context) {
  ENTER_ANYWAY(" ");
  *context = settings.num_devices ? current_device() : NULL;
  return hipSuccess;
}
API hipError_t hipCtxPushCurrent(hipCtx_t context) {
  ENTER_ANYWAY("%p", (void *)context);
  if (!is_context(context)) return call_leave(hipErrorInvalidContext);
  return push_context(context) ? hipSuccess : call_leave(hipErrorOutOfMemory);
}
API hipError_t hipCtxPopCurrent(hipCtx_t *context) {
  ENTER_ANYWAY(" ");
  if (!num_contexts) return call_leave(hipErrorInvalidContext);
  num_contexts--;
  if (context) *context = contexts[num_contexts];
  return hipSuccess;
}
API hipError_t hipSetDevice(int ordinal) {
  ENTER_ANYWAY("%d", ordinal);
  device_t *device = device_at(ordinal);
  return device ? make_current(device) : call_leave(hipErrorInvalidDevice);
}
API hipError_t hipDevicePrimaryCtxRetain(hipCtx_t *context, hipDevice_t ordinal) {
  ENTER_ANYWAY("%d", ordinal);
  *context = device_at(ordinal);
  return *context ? hipSuccess : call_leave(hipErrorInvalidDevice);
}
API hipError_t hipDevicePrimaryCtxRelease(hipDevice_t ordinal) {
  ENTER_ANYWAY("%d", ordinal);
  return device_at(ordinal) ? hipSuccess : call_leave(hipErrorInvalidDevice);
}

// ---- devices

API hipError_t hipInit(unsigned flags) {
  ENTER_ANYWAY("%u", flags);
  if (flags) return call_leave(hipErrorInvalidValue);
  return settings.num_devices ? hipSuccess : call_leave(hipErrorNoDevice);
}
API hipError_t hipGetDeviceCount(int *count) {
  ENTER_ANYWAY(" ");
  *count = settings.num_devices;
  return *count ? hipSuccess : call_leave(hipErrorNoDevice);
}
API hipError_t hipDeviceGet(hipDevice_t *device, int ordinal) {
  ENTER_ANYWAY("%d", ordinal);
  if (!device_at(ordinal)) return call_leave(hipErrorInvalidDevice);
  *device = ordinal;
  return hipSuccess;
}
API hipError_t hipDeviceGetName(char *name, int size, hipDevice_t ordinal) {
  ENTER_ANYWAY("%d", ordinal);
  if (!device_at(ordinal)) return call_leave(hipErrorInvalidDevice);
  snprintf(name, (size_t)size, "Emulated %s", settings.chip->name);
  return hipSuccess;
}
API hipError_t hipDeviceGetUuid(hipUUID *uuid, hipDevice_t ordinal) {
  ENTER_ANYWAY("%d", ordinal);
  if (!device_at(ordinal)) return call_leave(hipErrorInvalidDevice);
  char text[32];  // 16 characters, as AMD's are: "GPU-" and hexadecimal digits without it
  snprintf(text, sizeof text, "%016x", 0xe0000000u + (unsigned)ordinal);
  memcpy(uuid->bytes, text, sizeof uuid->bytes);
  return hipSuccess;
}

// ---- peers

bool device_is_lost(const device_t *device) { return device->is_lost; }

API hipError_t hipDeviceCanAccessPeer(int *can, int ordinal, int peer) {
  ENTER("%d %d", ordinal, peer);
  if (!device_at(ordinal) || !device_at(peer)) return call_leave(hipErrorInvalidDevice);
  *can = ordinal != peer;
  return hipSuccess;
}
API hipError_t hipDeviceEnablePeerAccess(int peer, unsigned flags) {
  ENTER("%d %u", peer, flags);
  device_t *device = current_device();
  if (!device_at(peer) || peer == device->index) return call_leave(hipErrorInvalidDevice);
  if (flags) return call_leave(hipErrorInvalidValue);
  const uint64_t bit = 1ull << peer;
  const uint64_t before = __atomic_fetch_or(&device->peers, bit, __ATOMIC_RELAXED);
  return before & bit ? call_leave(hipErrorPeerAccessAlreadyEnabled) : hipSuccess;
}
