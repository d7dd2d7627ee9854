// The start and the end of every function of the API.
#pragma once
#include "hip.h"

// Counts and logs the call, then returns from the caller where a fault on demand or a lost device says so.
#define ENTER(...) \
  do { \
    const hipError_t fault_ = call_enter(__func__, __VA_ARGS__); \
    if (fault_ != hipSuccess) return call_leave(fault_); \
  } while (0)

// For functions that work on a lost device too: they ask about, choose or give back things.
#define ENTER_ANYWAY(...) \
  do { \
    const hipError_t fault_ = call_enter_anyway(__func__, __VA_ARGS__); \
    if (fault_ != hipSuccess) return call_leave(fault_); \
  } while (0)

hipError_t call_enter(const char *function, const char *format, ...) __attribute__((format(printf, 2, 3)));
hipError_t call_enter_anyway(const char *function, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

// Keeps a failure for hipGetLastError, and returns it.
hipError_t call_leave(hipError_t error);

// Reads the environment and starts the executors, once.
void library_start(void);
