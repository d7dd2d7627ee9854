#include "views.h"

#include <stdbool.h>
#include <stdlib.h>

uint32_t view_until(const view_t *v, uint32_t wave) {
  uint32_t low = 0, high = v->count;
  while (low < high) {
    const uint32_t middle = (low + high) / 2;
    if (v->marks[middle].wave < wave) low = middle + 1;
    else high = middle;
  }
  return low < v->count && v->marks[low].wave == wave ? v->marks[low].until : 0;
}

static bool covers(const view_t *v, const view_t *part) {
  uint32_t n = 0;
  for (uint32_t m = 0; m < part->count; m++) {
    while (n < v->count && v->marks[n].wave < part->marks[m].wave) n++;
    if (n == v->count || v->marks[n].wave != part->marks[m].wave) return false;
    if (v->marks[n].until < part->marks[m].until) return false;
  }
  return true;
}

void view_clear(view_t *v) {
  free(v->marks);
  *v = (view_t){.marks = NULL};
}

void view_merge(view_t *to, const view_t *from) {
  if (covers(to, from)) return;
  view_t sum = {malloc((to->count + from->count) * sizeof *sum.marks), 0};
  uint32_t a = 0, b = 0;
  while (a < to->count || b < from->count) {
    const bool takes_a = b == from->count || (a < to->count && to->marks[a].wave <= from->marks[b].wave);
    const bool takes_b = a == to->count || (b < from->count && from->marks[b].wave <= to->marks[a].wave);
    mark_t *m = &sum.marks[sum.count++];
    *m = takes_a ? to->marks[a] : from->marks[b];
    if (takes_b) m->until = from->marks[b].until > m->until ? from->marks[b].until : m->until;
    a += takes_a;
    b += takes_b;
  }
  free(to->marks);
  *to = sum;
}
