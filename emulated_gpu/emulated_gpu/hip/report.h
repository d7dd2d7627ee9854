// What the library has seen, as JSON: for a caller in this process and in the file EMULATED_GPU_REPORT.
#pragma once
#include "../wave/launch.h"
#include "hip.h"

// Opens the file; findings are written to it as they appear, and a summary at the process's end.
void report_start(void);
// A rule of the API that the process broke, in work or in a host function, where no error can be returned.
void report_misuse(const char *what, const void *address, const char *text);
// Adds a launch's counters to those of its kernel.
void report_launch(const kernel_t *kernel, const counters_t *counters);
