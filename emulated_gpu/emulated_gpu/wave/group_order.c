// Checks order between the workgroups of a launch (group_order.h), as a data race detector with vector clocks does.
//
// A store is released if it has completed, on CDNA 3 and 4 an L2 cache was written back since, and then an atomic or a
// store for the device publishes this at an address. A load acquires if a load or an atomic for the device has
// seen that address, has returned, and then caches are invalidated. Source: LLVM, "User Guide for AMDGPU
// Backend", memory models of GFX90A, GFX942, GFX10-GFX11 and GFX12, at agent scope.
#include "group_order.h"

#include <pthread.h>
#include <stdlib.h>

#include "views.h"
#include "written_words.h"

struct order {
  const kernel_t *kernel;
  uint32_t num_waves;  // of a workgroup
  struct pages *pages;
  pthread_mutex_t lock;  // of the views in `pages`
};

static bool counts_stores_with_loads(const kernel_t *k) { return k->header.generation == 9; }
static enum wait_counter store_counter(const kernel_t *k) {
  return counts_stores_with_loads(k) ? WAIT_LOADS : WAIT_STORES;
}
static bool has_completed(const wave_t *w, enum wait_counter c, uint32_t number) {
  return (int32_t)(w->waits.completed[c] - number) >= 0;
}
static wave_order_t *order_of(const wave_t *w) { return &w->group->order->waves[w->index]; }
static uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

// ---- launch and workgroup

struct order *order_open(const kernel_t *kernel, const launch_t *launch) {
  const uint64_t groups = (uint64_t)launch->grid[0] * launch->grid[1] * launch->grid[2];
  const uint32_t lanes = kernel->header.lanes, size = launch->block[0] * launch->block[1] * launch->block[2];
  const uint32_t num_waves = (size + lanes - 1) / lanes;
  if (groups < 2 || num_waves > MAX_WAVES || groups * num_waves > MAX_WRITERS) return NULL;
  struct order *order = calloc(1, sizeof *order);
  order->kernel = kernel;
  order->num_waves = num_waves;
  order->pages = pages_open();
  pthread_mutex_init(&order->lock, NULL);
  return order;
}

void order_close(struct order *order) {
  if (!order) return;
  pages_close(order->pages);
  pthread_mutex_destroy(&order->lock);
  free(order);
}

void order_start(group_order_t *g, struct order *launch, const group_t *group, uint64_t number) {
  const size_t waves = group->num_waves * sizeof *g->waves;
  memset(g, 0, offsetof(group_order_t, waves) + waves);
  g->launch = launch;
  g->first = (uint32_t)number * group->num_waves;
}

void order_end(group_order_t *g) {
  view_clear(&g->known);
  view_clear(&g->acquired);
  for (uint32_t n = 0; n < g->launch->num_waves; n++) {
    wave_order_t *o = &g->waves[n];
    view_t *const views[] = {&o->pending, &o->known, &o->unshared, &o->acquired};
    for (size_t v = 0; v < sizeof views / sizeof *views; v++) view_clear(views[v]);
  }
}

// ---- what a wave knows

// Takes over what has returned: loads of published views, and write-backs.
static void settle(wave_t *w) {
  wave_order_t *o = order_of(w);
  if (o->pending.count && has_completed(w, WAIT_LOADS, o->pending_until)) {
    view_merge(&o->known, &o->pending);
    view_clear(&o->pending);
  }
  if (!o->writeback || !has_completed(w, WAIT_LOADS, o->writeback)) return;
  for (uint32_t n = 0; n < w->group->num_waves; n++)
    o->written_back[n] = larger(o->written_back[n], o->writing_back[n]);
  o->writeback = 0;
}

// Up to which number the stores of wave `n` have left the caches of this compute unit, as wave `w` can know it.
static uint32_t completed_until(const wave_t *w, uint32_t n) {
  const enum wait_counter c = store_counter(w->group->kernel);
  return n == w->index ? w->waits.completed[c] : w->group->order->completed[n];
}

// Up to which number the stores of wave `n` are visible to the device.
static uint32_t released_until(const wave_t *w, uint32_t n) {
  if (!w->group->kernel->header.writes_back) return completed_until(w, n);
  return larger(order_of(w)->written_back[n], w->group->order->written_back[n]);
}

static void publish(wave_t *w, struct page *page, uint64_t address, bool replaces) {
  group_order_t *g = w->group->order;
  mark_t marks[MAX_WAVES];
  view_t own = {marks, 0};
  settle(w);
  for (uint32_t n = 0; n < w->group->num_waves; n++) {
    const uint32_t until = released_until(w, n);
    if (until) marks[own.count++] = (mark_t){g->first + n, until};
  }
  const view_t *const parts[] = {&own, &g->known, &order_of(w)->known};
  if (!replaces && !own.count && !g->known.count && !order_of(w)->known.count) return;
  pthread_mutex_lock(&g->launch->lock);
  view_t *at = page_view(page, address);
  if (replaces) view_clear(at);
  for (size_t n = 0; n < sizeof parts / sizeof *parts; n++) view_merge(at, parts[n]);
  pthread_mutex_unlock(&g->launch->lock);
}

static void observe(wave_t *w, const view_t *published) {
  wave_order_t *o = order_of(w);
  settle(w);
  view_merge(&o->pending, published);
  o->pending_until = w->waits.issued[WAIT_LOADS] + 1;
}

// ---- accesses

static bool is_atomic(const instruction_t *i) { return i->class == CLASS_ATOMIC; }
static bool is_store(const instruction_t *i) { return i->class == CLASS_STORE; }

// Whether an access is made where all compute units see it. Stores of CDNA 2 and RDNA 3 have no bit for this, as
// all go through to the L2 cache: one of a single lane counts as a signal to other workgroups.
static bool is_for_device(const wave_t *w, const instruction_t *i, uint64_t lanes) {
  if (is_atomic(i) || i->memory & MEMORY_FOR_DEVICE) return true;
  const kernel_header_t *h = &w->group->kernel->header;
  return is_store(i) && h->generation < 12 && !h->writes_back && !(lanes & (lanes - 1));
}

// The checks return false after they have reported a finding, as one for an instruction is enough.
static bool check_word(wave_t *w, const instruction_t *i, int lane, uint64_t address, word_t word) {
  const group_order_t *g = w->group->order;
  const uint32_t waves = w->group->num_waves;
  if (word.writer / waves == g->first / waves) return true;
  const bool is_device = i->memory & MEMORY_FOR_DEVICE;
  if (is_device && word.is_device) return true;
  settle(w);
  const view_t *met = is_device ? &g->known : &g->acquired;
  const view_t *own = is_device ? &order_of(w)->known : &order_of(w)->acquired;
  if (larger(view_until(met, word.writer), view_until(own, word.writer)) >= word.number) return true;
  const uint64_t group = word.writer / waves, x = w->group->launch->grid[0], y = w->group->launch->grid[1];
  const writer_t writer = {
    .workgroup = {(uint32_t)(group % x), (uint32_t)(group / x % y), (uint32_t)(group / x / y)},
    .wave = word.writer % waves,
    .instruction = &w->group->kernel->code[word.instruction],
  };
  report_unordered(w, i, lane, address, &writer);
  return false;
}

static bool check_bytes(wave_t *w, const instruction_t *i, int lane, const struct page *page, uint64_t address,
                        unsigned bytes) {
  word_t word;
  for (uint64_t at = address; at < address + bytes; at = (at | 3) + 1) {
    const uint64_t end = (at | 3) + 1 < address + bytes ? (at | 3) + 1 : address + bytes;
    if (page_word(page, at, (unsigned)(end - at), &word) && !check_word(w, i, lane, at, word)) return false;
  }
  return true;
}

static void record(wave_t *w, const instruction_t *i, struct page *page, uint64_t address, unsigned bytes,
                   bool is_device) {
  const word_t word = {
    .writer = w->group->order->first + w->index,
    .number = w->waits.issued[store_counter(w->group->kernel)] + 1,
    .instruction = (uint32_t)(i - w->group->kernel->code),
    .is_device = is_device,
  };
  page_record(page, address, bytes, &word);
}

// An access that crosses a page is treated as two.
static unsigned bytes_in_page(uint64_t address, unsigned bytes) {
  const uint64_t left = PAGE_BYTES - address % PAGE_BYTES;
  return left < bytes ? (unsigned)left : bytes;
}

static bool load_before(wave_t *w, const instruction_t *i, int lane, uint64_t address, unsigned bytes) {
  struct pages *pages = w->group->order->launch->pages;
  const unsigned first = bytes_in_page(address, bytes);
  const struct page *page = pages_find(pages, address);
  if (page && !check_bytes(w, i, lane, page, address, first)) return false;
  return first == bytes || load_before(w, i, lane, address + first, bytes - first);
}

static void store_before(wave_t *w, const instruction_t *i, uint64_t address, unsigned bytes, bool is_device) {
  struct pages *pages = w->group->order->launch->pages;
  const unsigned first = bytes_in_page(address, bytes);
  struct page *page = pages_make(pages, address);
  record(w, i, page, address, first, is_device);
  if (is_device) publish(w, page, address, is_store(i));
  if (first < bytes) store_before(w, i, address + first, bytes - first, is_device);
}

void order_before(wave_t *w, const instruction_t *i, const lanes64_t *address, uint64_t lanes, unsigned bytes) {
  struct pages *pages = w->group->order->launch->pages;
  const bool changes = is_store(i) || is_atomic(i), is_device = is_for_device(w, i, lanes);
  if (!changes && pages_are_empty(pages)) return;
  for (; lanes; lanes &= lanes - 1) {
    const int l = __builtin_ctzll(lanes);
    if (changes) store_before(w, i, address->lane[l], bytes, is_device);
    else if (!load_before(w, i, l, address->lane[l], bytes)) return;
  }
}

void order_after(wave_t *w, const instruction_t *i, const lanes64_t *address, uint64_t lanes) {
  struct order *order = w->group->order->launch;
  if (!(is_atomic(i) ? i->memory & MEMORY_RETURNS : i->memory & MEMORY_FOR_DEVICE)) return;
  for (; lanes; lanes &= lanes - 1) {
    const uint64_t at = address->lane[__builtin_ctzll(lanes)];
    const struct page *page = pages_find(order->pages, at);
    if (!page) continue;
    pthread_mutex_lock(&order->lock);
    const view_t *published = page_published(page, at);
    if (published) observe(w, published);
    pthread_mutex_unlock(&order->lock);
  }
}

void order_scalar_load(wave_t *w, const instruction_t *i, uint64_t address, unsigned bytes) {
  if (!pages_are_empty(w->group->order->launch->pages)) load_before(w, i, -1, address, bytes);
}

// ---- caches and barriers

void order_write_back(wave_t *w) {
  group_order_t *g = w->group->order;
  if (!g) return;
  wave_order_t *o = order_of(w);
  settle(w);
  for (uint32_t n = 0; n < w->group->num_waves; n++)
    o->writing_back[n] = n == w->index ? w->waits.issued[WAIT_LOADS] : g->completed[n];
  o->writeback = w->waits.issued[WAIT_LOADS] + 1;
}

void order_invalidate(wave_t *w, bool shared, bool own) {
  group_order_t *g = w->group->order;
  if (!g) return;
  wave_order_t *o = order_of(w);
  settle(w);
  if (shared) {
    view_merge(&o->unshared, &g->known);
    view_merge(&o->unshared, &o->known);
  }
  if (own) view_merge(&o->acquired, &o->unshared);
}

void order_meet(wave_t *waves, uint32_t num_waves) {
  group_order_t *g = waves->group->order;
  for (uint32_t n = 0; n < num_waves; n++) {
    wave_order_t *o = order_of(&waves[n]);
    settle(&waves[n]);
    g->completed[n] = waves[n].waits.completed[store_counter(g->launch->kernel)];
    view_merge(&g->known, &o->known);
    view_merge(&g->acquired, &o->acquired);
    for (uint32_t other = 0; other < num_waves; other++)
      g->written_back[other] = larger(g->written_back[other], o->written_back[other]);
  }
}
