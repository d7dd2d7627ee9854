// The threads that do a device's work.
#pragma once
#include "streams.h"

// Makes the device's null stream and starts its threads.
void executor_start(device_t *device);
// Called at the start of each call of the API.
void executor_note_call(const char *function);
