// Counts the different bytes of global memory that a launch loads and stores.
#pragma once
#include "launch.h"

struct unique_bytes *unique_bytes_open(void);
void unique_bytes_note(struct unique_bytes *set, uint64_t address, uint32_t bytes, bool is_store);
// Adds the numbers of bytes to `counters` and frees the set.
void unique_bytes_close(struct unique_bytes *set, counters_t *counters);
