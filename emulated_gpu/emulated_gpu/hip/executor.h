// The threads that do a device's work.
#pragma once
#include "streams.h"

// Makes the device's null stream and starts its threads.
void executor_start(device_t *device);
// Called at the start of each call of the API.
void executor_note_call(const char *function);
// Its thread looks for something to run, or all of them do. With `work_lock` held.
void executor_wake(device_t *device);
void executor_wake_all(void);
// A device that fails: what it has been given is released without running. With `work_lock` held.
void executor_fail(device_t *device, hipError_t error);
// Whether it has nothing left to do. With `work_lock` held.
bool executor_is_idle(const device_t *device);
