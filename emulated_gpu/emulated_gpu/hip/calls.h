// The start and the end of every function of the API.
#pragma once
#include "hip.h"

// Counts and logs the call. If an injected fault is due or the current device is lost, returns the error from
// the function that uses this macro.
#define ENTER(...) \
  do { \
    const hipError_t fault_ = call_enter(__func__, __VA_ARGS__); \
    if (fault_ != hipSuccess) return call_leave(fault_); \
  } while (0)

// The same, but a lost device is no error: for functions that query, select or release something.
#define ENTER_ANYWAY(...) \
  do { \
    const hipError_t fault_ = call_enter_anyway(__func__, __VA_ARGS__); \
    if (fault_ != hipSuccess) return call_leave(fault_); \
  } while (0)

hipError_t call_enter(const char *function, const char *format, ...) __attribute__((format(printf, 2, 3)));
hipError_t call_enter_anyway(const char *function, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

// Returns `error`; stores it for hipGetLastError if it is a failure.
hipError_t call_leave(hipError_t error);

// Reads the environment and starts the executors, when called for the first time.
void library_start(void);
