// What every function of the API does when it is called and when it fails: starts the library, counts and
// logs the call (EMULATED_GPU_LOG=1), injects faults, and stores the thread's last error.
#include "calls.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>

#include "devices.h"
#include "executor.h"
#include "faults.h"
#include "report.h"

static pthread_once_t started = PTHREAD_ONCE_INIT;
static _Thread_local hipError_t last_error;

static void write_log(const char *function, const char *format, va_list arguments) {
  if (!settings.logs_calls) return;
  flockfile(stderr);
  fprintf(stderr, "emulated_gpu: %s ", function);
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  funlockfile(stderr);
}

static void start(void) {
  devices_read_settings();
  report_start();
  for (int i = 0; i < settings.num_devices; i++) executor_start(&devices[i]);
  faults_start();
}

void library_start(void) { pthread_once(&started, start); }

static hipError_t enter(const char *function, const char *format, va_list arguments) {
  library_start();
  report_call(function);
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

API hipError_t hipGetLastError(void) {
  const hipError_t error = last_error;
  last_error = hipSuccess;
  return error;
}
API hipError_t hipPeekAtLastError(void) { return last_error; }
