// Injected faults, and the commands that inject them and change settings:
//
//   fail FUNCTION N ERROR         the N-th call of FUNCTION from now on does nothing and returns ERROR (a
//                                 number); FUNCTION `allocation` means all functions that allocate
//   fail-launch N ERROR [KERNEL]  the N-th launch from now on (of kernels whose name contains KERNEL) fails
//                                 when it runs; functions that wait for the device then return ERROR
//   stall DEVICE [STREAM]         the device, or one of its streams (numbered by creation, 0 is the null
//                                 stream), starts no more work until `resume`
//   resume DEVICE [STREAM]        ends `stall`
//   lose DEVICE                   queued work is dropped, and functions return hipErrorNoDevice
//   revive DEVICE                 makes a device usable that was lost or had a failed launch
//   order random|late, chip NAME, seed N, idle MILLISECONDS, memory DEVICE BYTES,
//   threads N, unique-bytes 0|1, max-instructions N
//                                 change a setting from now on; `chip` only affects modules loaded later
//   forget                        removes faults that have not happened yet
//
// Commands are read from EMULATED_GPU_FAULTS (separated by semicolons) when the library starts, from lines in
// the named pipe EMULATED_GPU_CONTROL while it runs, and from emulated_gpu_command.
#include "faults.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../wave/launch.h"
#include "devices.h"
#include "order.h"

typedef struct {
  bool is_launch;
  char name[128];  // the function's name, or a part of the kernel's name
  uint64_t remaining;  // calls until the fault happens, which is included; 0: this entry is free
  hipError_t error;
} fault_t;

enum { MAX_FAULTS = 64, MAX_WORDS = 5, MAX_COMMAND = 512 };
static fault_t faults[MAX_FAULTS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

// ---- faults that are due

static bool is_allocation(const char *function) {
  return !strncmp(function, "hipMalloc", 9) || !strcmp(function, "hipHostMalloc");
}

static bool concerns(const fault_t *f, const char *name) {
  if (f->is_launch) return strstr(name, f->name) != NULL;
  return !strcmp(f->name, name) || (!strcmp(f->name, "allocation") && is_allocation(name));
}

static hipError_t strike(bool is_launch, const char *name) {
  hipError_t error = hipSuccess;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < MAX_FAULTS; i++) {
    fault_t *f = &faults[i];
    if (!f->remaining || f->is_launch != is_launch || !concerns(f, name)) continue;
    if (!--f->remaining) error = f->error;
  }
  pthread_mutex_unlock(&lock);
  return error;
}

hipError_t fault_of_call(const char *function) { return strike(false, function); }
hipError_t fault_of_launch(const char *kernel) { return strike(true, kernel); }

// ---- commands

typedef struct { int count; char *word[MAX_WORDS]; } words_t;

static bool number(const words_t *w, int index, uint64_t *out) {
  if (index >= w->count) return false;
  char *end;
  *out = strtoull(w->word[index], &end, 0);
  return end != w->word[index] && !*end;
}

static device_t *device_of(const words_t *w, int index) {
  uint64_t ordinal;
  return number(w, index, &ordinal) && ordinal < MAX_DEVICES ? device_at((int)ordinal) : NULL;
}

static bool arm(fault_t fault) {
  bool is_armed = false;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < MAX_FAULTS && !is_armed; i++) {
    if (faults[i].remaining) continue;
    faults[i] = fault;
    is_armed = true;
  }
  pthread_mutex_unlock(&lock);
  return is_armed;
}

static bool fail_call(const words_t *w) {
  uint64_t n, error;
  if (w->count != 4 || !number(w, 2, &n) || !number(w, 3, &error) || !n) return false;
  fault_t fault = {.remaining = n, .error = (hipError_t)error};
  snprintf(fault.name, sizeof fault.name, "%s", w->word[1]);
  return arm(fault);
}

static bool fail_launch(const words_t *w) {
  uint64_t n, error;
  if (w->count < 3 || w->count > 4 || !number(w, 1, &n) || !number(w, 2, &error) || !n) return false;
  fault_t fault = {.is_launch = true, .remaining = n, .error = (hipError_t)error};
  snprintf(fault.name, sizeof fault.name, "%s", w->count == 4 ? w->word[3] : "");
  return arm(fault);
}

static bool set_stalled(const words_t *w, bool is_stalled) {
  device_t *device = device_of(w, 1);
  uint64_t stream_number = 0;
  if (!device || (w->count > 2 && !number(w, 2, &stream_number))) return false;
  bool is_found = w->count == 2;
  pthread_mutex_lock(&work_lock);
  if (is_found) device->is_stalled = is_stalled;
  for (stream_t *s = device->streams; s && w->count > 2; s = s->next) {
    if ((uint64_t)s->number != stream_number) continue;
    s->is_stalled = is_stalled;
    is_found = true;
  }
  device_wake(device);
  pthread_mutex_unlock(&work_lock);
  return is_found;
}

static bool lose(const words_t *w) {
  device_t *device = device_of(w, 1);
  if (!device) return false;
  pthread_mutex_lock(&work_lock);
  device->is_lost = true;
  device_fail(device, hipErrorNoDevice);
  pthread_mutex_unlock(&work_lock);
  return true;
}

static bool revive(const words_t *w) {
  device_t *device = device_of(w, 1);
  if (!device) return false;
  pthread_mutex_lock(&work_lock);
  while (!device_is_idle(device)) pthread_cond_wait(&work_finished, &work_lock);
  device->is_lost = false;
  device->error = hipSuccess;
  pthread_mutex_unlock(&work_lock);
  return true;
}

static bool set_order(const words_t *w) {
  const bool is_late = w->count == 2 && !strcmp(w->word[1], "late");
  if (w->count != 2 || (!is_late && strcmp(w->word[1], "random"))) return false;
  pthread_mutex_lock(&work_lock);
  settings.is_late = is_late;
  devices_wake();
  pthread_mutex_unlock(&work_lock);
  return true;
}

static bool set_seed(uint64_t seed) {
  pthread_mutex_lock(&work_lock);
  settings.seed = launch_options.seed = seed;
  for (int i = 0; i < settings.num_devices; i++) order_seed(&devices[i]);
  pthread_mutex_unlock(&work_lock);
  return true;
}

static bool set_memory(const words_t *w) {
  device_t *device = device_of(w, 1);
  uint64_t bytes;
  if (!device || !number(w, 2, &bytes)) return false;
  device->memory_bytes = bytes;
  return true;
}

static bool set_number(const char *name, uint64_t value) {
  if (!strcmp(name, "seed")) return set_seed(value);
  if (!strcmp(name, "idle")) settings.idle_ms = (double)value;
  else if (!strcmp(name, "threads")) launch_options.threads = (int)value;
  else if (!strcmp(name, "unique-bytes")) launch_options.counts_unique_bytes = value;
  else if (!strcmp(name, "max-instructions")) launch_options.max_instructions = value;
  else return false;
  return true;
}

static bool forget(void) {
  pthread_mutex_lock(&lock);
  memset(faults, 0, sizeof faults);
  pthread_mutex_unlock(&lock);
  return true;
}

static bool carry_out(const words_t *w) {
  const char *verb = w->word[0];
  if (!strcmp(verb, "fail")) return fail_call(w);
  if (!strcmp(verb, "fail-launch")) return fail_launch(w);
  if (!strcmp(verb, "stall")) return set_stalled(w, true);
  if (!strcmp(verb, "resume")) return set_stalled(w, false);
  if (!strcmp(verb, "lose")) return lose(w);
  if (!strcmp(verb, "revive")) return revive(w);
  if (!strcmp(verb, "order")) return set_order(w);
  if (!strcmp(verb, "chip")) return w->count == 2 && device_set_chip(w->word[1]);
  if (!strcmp(verb, "memory")) return set_memory(w);
  if (!strcmp(verb, "forget")) return forget();
  uint64_t value;
  return w->count == 2 && number(w, 1, &value) && set_number(verb, value);
}

static bool command(const char *text) {
  char copy[MAX_COMMAND], *rest = copy;
  if (snprintf(copy, sizeof copy, "%s", text) >= (int)sizeof copy) return false;
  words_t words = {0};
  for (char *word; (word = strtok_r(rest, " \t\n", &rest));) {
    if (words.count == MAX_WORDS) return false;
    words.word[words.count++] = word;
  }
  return !words.count || carry_out(&words);
}

bool fault_command(const char *text) {
  const bool is_understood = command(text);
  if (!is_understood) fprintf(stderr, "emulated_gpu: the command '%s' is not understood\n", text);
  return is_understood;
}

// ---- sources of commands

static void *read_pipe(void *path) {
  char line[MAX_COMMAND];
  for (;;) {  // the pipe ends when its last writer closes it: open it again
    FILE *pipe = fopen(path, "re");
    if (!pipe) return NULL;
    while (fgets(line, sizeof line, pipe)) fault_command(line);
    fclose(pipe);
  }
}

void faults_start(void) {
  const char *commands = getenv("EMULATED_GPU_FAULTS");
  char *copy = strdup(commands ? commands : ""), *rest = copy;
  for (char *text; (text = strtok_r(rest, ";", &rest));)
    if (!fault_command(text)) abort();
  free(copy);
  char *path = getenv("EMULATED_GPU_CONTROL");
  pthread_t thread;
  if (!path || !*path) return;
  if (pthread_create(&thread, NULL, read_pipe, path)) abort();
  pthread_detach(thread);
}
