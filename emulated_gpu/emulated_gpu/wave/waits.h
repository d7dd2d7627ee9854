// Waits for memory: which registers still await data, as the hardware's counters would have it.
//
// The emulator delivers loaded data at once. A kernel that reads a register without the s_waitcnt that its load needs
// would still compute the right result here, so each register remembers the access that fills it until a wait covers it.
#pragma once
#include "program.h"

struct wave;

// The counters that registers depend on. Before RDNA 4, scalar loads count with LDS (lgkmcnt).
enum wait_counter { WAIT_LOADS, WAIT_LDS, WAIT_SCALAR, NUM_WAIT_COUNTERS, WAIT_NONE = NUM_WAIT_COUNTERS };

typedef struct {
  uint32_t sequence;  // of the access in its counter; 0: none outstanding
  uint8_t counter;
  uint8_t unordered;  // only a wait for 0 covers it
} wait_ticket_t;

typedef struct {
  uint32_t issued[NUM_WAIT_COUNTERS], completed[NUM_WAIT_COUNTERS];
  uint32_t unordered[NUM_WAIT_COUNTERS];  // the last access that may overtake others
  uint32_t lds;  // the last access to the memory of LDS, which exchanges between lanes do not touch
  wait_ticket_t vgpr[520][2], sgpr[128][2];  // of each half, which D16 loads fill apart
} waits_t;

// The counter that an instruction's data is waited for by.
enum wait_counter wait_counter_of(const instruction_t *i, int generation);
bool waits_outstanding(const waits_t *waits);
// Reports registers that `i` reads or overwrites before their data has arrived.
void waits_check(struct wave *w, const instruction_t *i);
// Notes an access that has been issued.
void waits_issue(struct wave *w, const instruction_t *i);
// s_waitcnt: at most `remaining` accesses of `counter` are still outstanding afterwards; -1: no wait.
void waits_for(struct wave *w, enum wait_counter counter, int32_t remaining);
// A barrier makes nothing arrive: LDS accesses must have been waited for.
void waits_check_barrier(struct wave *w, const instruction_t *i);
