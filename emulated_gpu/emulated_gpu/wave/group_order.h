// Order between the workgroups of a launch: which stores a wave may rely on when it loads from global memory.
//
// A store has a number, the number of its access among those of its wave's counter of stores. See views.h.
#pragma once
#include "views.h"
#include "wave.h"

#define MAX_WAVES 32  // of a workgroup

// What a wave knows and has released since the last barrier of its workgroup.
typedef struct {
  view_t pending;    // seen in memory by a load that may not have returned: number `pending_until`
  view_t known;      // seen in memory, and waited for: order is certain, but a cache may still have old data
  view_t unshared;   // of `known`, when caches that several compute units share were invalidated
  view_t acquired;   // of `known`, when all caches were invalidated
  uint32_t pending_until;
  uint32_t writeback;  // number of the last write-back of the L2 cache; 0: none that is outstanding
  uint32_t writing_back[MAX_WAVES], written_back[MAX_WAVES];  // stores of the workgroup's waves
} wave_order_t;

// The state of a workgroup. `completed`, `written_back`, `known` and `acquired` are of its last barrier.
typedef struct group_order {
  struct order *launch;
  uint32_t first;  // number of the workgroup's first wave in the launch
  uint32_t completed[MAX_WAVES], written_back[MAX_WAVES];
  view_t known, acquired;
  wave_order_t waves[MAX_WAVES];
} group_order_t;

// Returns NULL if order need not be, or cannot be, checked: for one workgroup, or too many waves.
struct order *order_open(const kernel_t *kernel, const launch_t *launch);
void order_close(struct order *order);

// Call this when a workgroup starts, with its number in the launch, and with order_end when it has ended.
void order_start(group_order_t *g, struct order *launch, const group_t *group, uint64_t number);
void order_end(group_order_t *g);

// Call this before lanes access global memory: it checks loads, and records and publishes stores and atomics.
void order_before(wave_t *w, const instruction_t *i, const lanes64_t *address, uint64_t lanes, unsigned bytes);
// Call this after lanes have accessed global memory, so that a load for the device, or an atomic, sees what
// was published at its address.
void order_after(wave_t *w, const instruction_t *i, const lanes64_t *address, uint64_t lanes);
void order_scalar_load(wave_t *w, const instruction_t *i, uint64_t address, unsigned bytes);
// A write-back of the L2 cache to memory; invalidation of caches that compute units share, and of a compute
// unit's own caches.
void order_write_back(wave_t *w);
void order_invalidate(wave_t *w, bool shared, bool own);
// Call this when all waves of a workgroup are at a barrier.
void order_meet(wave_t *waves, uint32_t num_waves);
