// The choice of the stream of a device that runs next.
#pragma once
#include "streams.h"

// With `work_lock` held: a stream whose head may run now, or NULL.
stream_t *order_next(device_t *device);
// With `work_lock` held: waits until that may have changed.
void order_wait(device_t *device);
// The next draw of the device's generator, which order_seed starts from the settings' seed.
uint64_t order_random(device_t *device);
void order_seed(device_t *device);

// The host has done something other than asking whether work is done.
void order_note_activity(void);
