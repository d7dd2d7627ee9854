// The threads that run a device's work.
#pragma once
#include "streams.h"

// Creates the device's null stream and starts the device's threads.
void executor_start(device_t *device);
// Must be called at the start of each API function: notes that the host is active, and reports a call from a
// host function of a stream as misuse.
void executor_note_call(const char *function);
