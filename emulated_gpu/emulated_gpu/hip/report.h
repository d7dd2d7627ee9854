// The library's report as JSON: for a caller in this process, and in the file EMULATED_GPU_REPORT.
#pragma once
#include <stdio.h>

#include "../wave/launch.h"
#include "hip.h"

// Opens the file; findings are written to it as they appear, and a summary at the process's end.
void report_start(void);
// A rule of the API that the process broke, in work or in a host function, where no error can be returned.
void report_misuse(const char *what, const void *address, const char *text);
void report_call(const char *function);
// Adds a launch's counters to those of its kernel.
void report_launch(const kernel_t *kernel, const counters_t *counters);
// Writes what was seen, as a JSON object. Clearing leaves the counts of calls.
void report_write(FILE *out);
void report_clear(void);
