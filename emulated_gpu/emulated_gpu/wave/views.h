// Views: for each wave of a launch, up to which number its stores are visible (a vector clock).
#pragma once
#include <stdint.h>

typedef struct { uint32_t wave, until; } mark_t;  // `wave`: its number in the launch
typedef struct {
  mark_t *marks;  // ascending by wave
  uint32_t count;
} view_t;

// Returns up to which number the stores of a wave are visible; 0: none.
uint32_t view_until(const view_t *v, uint32_t wave);
void view_clear(view_t *v);
void view_merge(view_t *to, const view_t *from);
