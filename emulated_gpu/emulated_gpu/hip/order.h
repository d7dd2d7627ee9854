// The choice of the stream of a device that runs next.
#pragma once
#include "streams.h"

// Returns a stream whose first work item may run now, or NULL. Callers must hold `work_lock`.
stream_t *order_next(device_t *device);
// Waits until the result of order_next may have changed. Callers must hold `work_lock`.
void order_wait(device_t *device);
// Returns the next number of the device's random generator. order_seed restarts it from `settings.seed`.
uint64_t order_random(device_t *device);
void order_seed(device_t *device);

// Notes that the host is active. Must be called for all API functions but hipEventQuery, which hosts poll.
void order_note_activity(void);
