// The exported functions that HIP does not have. control.py calls them.
#pragma once
#include "hip.h"

// Executes a command (see faults.c). Prints a message on stderr and returns false if the command is invalid.
API bool emulated_gpu_command(const char *command);

// The report so far, as a JSON object (report.c); the caller frees it with emulated_gpu_free.
API char *emulated_gpu_report(void);
API void emulated_gpu_clear_report(void);
API void emulated_gpu_free(void *text);
// The number of a stream in commands, or -1.
API int emulated_gpu_stream_number(hipStream_t stream);
