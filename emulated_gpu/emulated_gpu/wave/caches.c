// Cache operations. No cache is emulated, but order between workgroups depends on them (group_order.c).
#include "group_order.h"

static void cache_write_back(wave_t *w, const instruction_t *i) {
  (void)i;
  order_write_back(w);
}

// `offset`: 1 for caches that compute units share, 2 for a compute unit's own, 3 for both.
static void cache_invalidate(wave_t *w, const instruction_t *i) {
  order_invalidate(w, i->offset & 1, i->offset & 2);
}

OPERATIONS(caches) = {
  {"cache_write_back", cache_write_back},
  {"cache_invalidate", cache_invalidate},
  {NULL, NULL},
};
