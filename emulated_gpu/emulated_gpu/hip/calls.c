// Every call of the API passes here: counts by name, the log (EMULATED_GPU_LOG=1), faults on demand, and the
// thread's last error.
#include "calls.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdlib.h>

#include "devices.h"
#include "executor.h"
#include "faults.h"

enum { MAX_FUNCTIONS = 128 };
static struct { const char *name; uint64_t calls; } functions[MAX_FUNCTIONS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local hipError_t last_error;

static void count(const char *name) {
  pthread_mutex_lock(&lock);
  int i = 0;
  while (functions[i].name && functions[i].name != name && i + 1 < MAX_FUNCTIONS) i++;
  functions[i].name = name;
  functions[i].calls++;
  pthread_mutex_unlock(&lock);
}

static void write_log(const char *function, const char *format, va_list arguments) {
  if (!settings.logs_calls) return;
  flockfile(stderr);
  fprintf(stderr, "emulated_gpu: %s ", function);
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  funlockfile(stderr);
}

static hipError_t enter(const char *function, const char *format, va_list arguments) {
  devices_start();
  count(function);
  write_log(function, format, arguments);
  executor_note_call(function);
  return fault_of_call(function);
}

hipError_t call_enter_anyway(const char *function, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const hipError_t error = enter(function, format, arguments);
  va_end(arguments);
  return error;
}

hipError_t call_enter(const char *function, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const hipError_t error = enter(function, format, arguments);
  va_end(arguments);
  return error == hipSuccess && device_is_lost(current_device()) ? hipErrorNoDevice : error;
}

hipError_t call_leave(hipError_t error) {
  if (error != hipSuccess) last_error = error;
  return error;
}

void calls_write_counts(FILE *out) {
  pthread_mutex_lock(&lock);
  fputc('{', out);
  for (int i = 0; i < MAX_FUNCTIONS && functions[i].name; i++)
    fprintf(out, "%s\"%s\": %lu", i ? ", " : "", functions[i].name, functions[i].calls);
  fputc('}', out);
  pthread_mutex_unlock(&lock);
}

API hipError_t hipGetLastError(void) {
  const hipError_t error = last_error;
  last_error = hipSuccess;
  return error;
}
API hipError_t hipPeekAtLastError(void) { return last_error; }

API const char *hipGetErrorName(hipError_t error) {
  switch (error) {
#define X(name, number, text) case name: return #name;
    HIP_ERRORS(X)
#undef X
  }
  return "hipErrorUnknown";
}

API const char *hipGetErrorString(hipError_t error) {
  switch (error) {
#define X(name, number, text) case name: return text;
    HIP_ERRORS(X)
#undef X
  }
  return "unknown error";
}
