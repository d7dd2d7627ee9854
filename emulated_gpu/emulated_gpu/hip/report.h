// The library's report as JSON: for a caller in this process, and in the file EMULATED_GPU_REPORT.
#pragma once
#include <stdio.h>

#include "../wave/launch.h"
#include "hip.h"

// Opens the file EMULATED_GPU_REPORT, if it is set. Aborts if the file cannot be opened.
void report_start(void);
// Reports that the process broke a rule of the API in work or in a host function, where no error can be
// returned.
void report_misuse(const char *what, const void *address, const char *text);
void report_call(const char *function);
// Adds a launch's counters to the sums of its kernel.
void report_launch(const kernel_t *kernel, const counters_t *counters);
// Writes everything collected as a JSON object. report_clear removes it, except for the numbers of calls.
void report_write(FILE *out);
void report_clear(void);
