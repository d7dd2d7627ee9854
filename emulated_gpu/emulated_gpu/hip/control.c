// The exported functions that HIP does not have.
#include "control.h"

#include <stdio.h>
#include <stdlib.h>

#include "calls.h"
#include "faults.h"
#include "report.h"
#include "streams.h"

API bool emulated_gpu_command(const char *text) {
  library_start();
  return fault_command(text);
}

API char *emulated_gpu_report(void) {
  library_start();
  char *text = NULL;
  size_t size = 0;
  FILE *out = open_memstream(&text, &size);
  if (!out) return NULL;
  report_write(out);
  fclose(out);
  return text;
}

API void emulated_gpu_clear_report(void) { report_clear(); }

API void emulated_gpu_free(void *text) { free(text); }

API int emulated_gpu_stream_number(hipStream_t handle) {
  const stream_t *stream = stream_of(handle);
  return stream ? stream->number : -1;
}
