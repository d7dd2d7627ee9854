// Running one workgroup of a launch.
#pragma once
#include "group_order.h"

// The memory of a workgroup that runs, reused for other workgroups of the same launch.
typedef struct {
  wave_t *waves;
  uint8_t *lds;
  uint32_t *scratch;
  uint64_t *scratch_defined;
  lds_word_t *lds_words;
  group_order_t *order;
  group_t group;
  uint32_t num_ended, ended_before;  // waves that have ended: now, and at the last barrier
  uint64_t executed;                 // instructions by the last group_run
  bool has_run;
} room_t;

// Allocates the memory of a workgroup; `order` and `unique` are of the launch, or NULL. Returns false if there is
// not enough memory; callers must call room_close then, too.
bool room_open(room_t *r, const kernel_t *kernel, const launch_t *launch, struct order *order,
               struct unique_bytes *unique);
void room_close(room_t *r);
uint32_t num_waves_of(const kernel_t *kernel, const launch_t *launch);

void counters_add(counters_t *sum, const counters_t *part);

// Puts the start of the workgroup with this number into the room.
void group_start(room_t *r, struct order *order, uint64_t number);
// Runs the workgroup until it ends or fails, or has executed about `budget` instructions.
void group_run(room_t *r, uint64_t budget);
// Ends a turn of group_run. One without effect does not count for the limit of its waves: they may have spun while
// the host had suspended the thread of the workgroup that they wait for.
void group_end_turn(room_t *r, bool has_effect);
bool group_has_ended(const room_t *r);
// Adds what the workgroup has counted to `counters`, and frees what the room does not reuse.
void group_end(room_t *r, counters_t *counters);
// Stops the launch: no workgroup can go on. `kind`: ENDLESS or NOT_RESIDENT.
void group_give_up(room_t *r, enum finding_kind kind);
