// Devices, and contexts. A device has one context, which is the device's address.
#include "devices.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../wave/launch.h"

static const chip_t chips[] = {
  {"gfx90a", 0x3f, 9, 0, 64, 104, 64 << 10, 512, 4, 8, 512, 8},
  {"gfx942", 0x4c, 9, 4, 64, 304, 64 << 10, 512, 4, 8, 512, 8},
  {"gfx950", 0x4f, 9, 5, 64, 256, 160 << 10, 1280, 4, 8, 512, 8},
  {"gfx1100", 0x41, 11, 0, 32, 96, 64 << 10, 1024, 2, 16, 1536, 24},
  {"gfx1101", 0x46, 11, 0, 32, 60, 64 << 10, 1024, 2, 16, 1536, 24},
  {"gfx1103", 0x44, 11, 0, 32, 12, 64 << 10, 1024, 2, 16, 1024, 16},
  {"gfx1150", 0x43, 11, 5, 32, 16, 64 << 10, 1024, 2, 16, 1024, 16},
  {"gfx1151", 0x4a, 11, 5, 32, 40, 64 << 10, 1024, 2, 16, 1536, 24},
  {"gfx1200", 0x48, 12, 0, 32, 32, 64 << 10, 1024, 2, 16, 1536, 24},
  {"gfx1201", 0x4e, 12, 0, 32, 64, 64 << 10, 1024, 2, 16, 1536, 24},
};
enum { NUM_CHIPS = sizeof chips / sizeof *chips };

settings_t settings;
device_t devices[MAX_DEVICES];

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

void devices_read_settings(void) {
  read_chip();
  settings.num_devices = (int)number_of("EMULATED_GPU_DEVICES", 1, 0, MAX_DEVICES);
  settings.memory_bytes = number_of("EMULATED_GPU_MEMORY", 4ull << 30, 0, UINT64_MAX);
  settings.seed = number_of("EMULATED_GPU_SEED", 0, 0, UINT64_MAX);
  settings.poison = (int)number_of("EMULATED_GPU_POISON", 0xff, 0, 0xff);
  settings.is_late = order_of_environment();
  settings.idle_ms = (double)number_of("EMULATED_GPU_IDLE_MS", 2, 0, 60000);
  launch_options.threads = (int)number_of("EMULATED_GPU_THREADS", 0, 0, 1024);
  launch_options.seed = settings.seed;
  launch_options.max_instructions =
      number_of("EMULATED_GPU_MAX_INSTRUCTIONS", launch_options.max_instructions, 1, UINT64_MAX);
  settings.logs_calls = number_of("EMULATED_GPU_LOG", 0, 0, 1);
  for (int i = 0; i < settings.num_devices; i++) {
    devices[i].index = i;
    devices[i].memory_bytes = settings.memory_bytes;
  }
}

device_t *device_at(int ordinal) {
  return ordinal >= 0 && ordinal < settings.num_devices ? &devices[ordinal] : NULL;
}

// ---- each thread's stack of contexts, without a limit, as IREE pushes more than it pops

static _Thread_local device_t **contexts;
static _Thread_local int num_contexts, capacity;

bool context_push(device_t *device) {
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

hipError_t context_set(device_t *device) {
  if (num_contexts) contexts[num_contexts - 1] = device;
  else if (!context_push(device)) return hipErrorOutOfMemory;
  return hipSuccess;
}

bool context_is_known(const device_t *context) {
  return !context || (context >= devices && context < devices + settings.num_devices);
}

bool context_pop(device_t **context) {
  if (!num_contexts) return false;
  num_contexts--;
  if (context) *context = contexts[num_contexts];
  return true;
}

bool device_is_lost(const device_t *device) { return device->is_lost; }
