// Allocates blocks of memory, and tells which addresses are live (may be accessed).
//
// Each block has its own pages, with inaccessible pages around them (red zones). Blocks get ascending
// addresses in a window of the address space. An address is reused only when the window is used up, so an
// access to freed memory does not hit another block.
//
// Kernels call `memory_is_live` for every access from several threads without a lock, so a table of blocks
// never changes: each change publishes a new table. Old tables and the pages of freed blocks are released
// only when no work runs on any device.
#include "memory.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

static const uint64_t WINDOW_FROM = 1ull << 44, WINDOW_TO = 1ull << 46;
enum { PAGE = 4096, RED_ZONE = 64 << 10 };

typedef struct {
  uint64_t generation;
  size_t count;
  block_t blocks[];  // by ascending address
} table_t;

static table_t first_table;
static _Atomic(table_t *) table = &first_table;
static _Atomic uint64_t current_generation;

// Memory to release once nothing runs: pages to unmap, or (pages == 0) a table to free.
typedef struct { void *start; size_t pages_bytes; } retired_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;  // guards all variables below, and writes to `table`
static uint64_t next_address = WINDOW_FROM;
static retired_t *retired;
static size_t num_retired, retired_capacity;
static int num_users;

static uint64_t pages_of(uint64_t bytes) { return (bytes + PAGE - 1) & ~(uint64_t)(PAGE - 1); }

// ---- pages

static void *map_at(uint64_t address, uint64_t bytes) {
  void *at = mmap((void *)address, bytes, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
  if (at == MAP_FAILED) return NULL;
  if (at == (void *)address) return at;
  munmap(at, bytes);  // Linux before 4.17 treats the address as a hint
  errno = EEXIST;
  return NULL;
}

// Maps new pages in the window, after a red zone. Returns NULL if the host has no memory or addresses left.
static void *map_pages(uint64_t bytes) {
  if (bytes > WINDOW_TO - WINDOW_FROM - RED_ZONE) return NULL;
  for (int attempt = 0; attempt < 1 << 16; attempt++) {
    if (next_address + RED_ZONE + bytes > WINDOW_TO) next_address = WINDOW_FROM;
    void *at = map_at(next_address + RED_ZONE, bytes);
    next_address += RED_ZONE + bytes;
    if (at || errno != EEXIST) return at;
  }
  return NULL;
}

static void retire(void *start, size_t pages_bytes) {
  if (num_retired == retired_capacity) {
    retired_capacity = retired_capacity ? 2 * retired_capacity : 64;
    retired = realloc(retired, retired_capacity * sizeof *retired);
    if (!retired) abort();
  }
  retired[num_retired++] = (retired_t){start, pages_bytes};
}

static void drain_retired(void) {
  if (num_users) return;
  for (size_t i = 0; i < num_retired; i++) {
    if (retired[i].pages_bytes) munmap(retired[i].start, retired[i].pages_bytes);
    else free(retired[i].start);
  }
  num_retired = 0;
}

void memory_begin_use(void) {
  pthread_mutex_lock(&lock);
  num_users++;
  pthread_mutex_unlock(&lock);
}

void memory_end_use(void) {
  pthread_mutex_lock(&lock);
  num_users--;
  drain_retired();
  pthread_mutex_unlock(&lock);
}

// ---- the table

// Returns the index of the first block that ends after `address`.
static size_t place_of(const table_t *t, uint64_t address) {
  size_t low = 0, high = t->count;
  while (low < high) {
    const size_t middle = (low + high) / 2;
    if (t->blocks[middle].to <= address) low = middle + 1;
    else high = middle;
  }
  return low;
}

static const block_t *block_around(const table_t *t, uint64_t address) {
  const size_t i = place_of(t, address);
  return i < t->count && t->blocks[i].from <= address ? &t->blocks[i] : NULL;
}

static const block_t *block_starting(const table_t *t, const void *start) {
  const block_t *b = block_around(t, (uint64_t)start);
  return b && b->from == (uint64_t)start ? b : NULL;
}

// Returns a copy of the table in which `removed` blocks from index `at` on are replaced by `added`
// uninitialised ones.
static table_t *copy_table(size_t at, size_t removed, size_t added) {
  const table_t *old = table;
  const size_t count = old->count - removed + added;
  table_t *t = malloc(sizeof *t + count * sizeof *t->blocks);
  if (!t) abort();
  t->generation = old->generation + 1;
  t->count = count;
  memcpy(t->blocks, old->blocks, at * sizeof *t->blocks);
  memcpy(t->blocks + at + added, old->blocks + at + removed, (old->count - at - removed) * sizeof *t->blocks);
  return t;
}

static void publish(table_t *t) {
  table_t *old = table;
  table = t;
  current_generation = t->generation;
  if (old != &first_table) retire(old, 0);
  drain_retired();
}

static void add_block(block_t block) {
  const size_t at = place_of(table, block.from);
  table_t *t = copy_table(at, 0, 1);
  t->blocks[at] = block;
  publish(t);
}

static void change_block(const block_t *old, block_t block) {
  const size_t at = (size_t)(old - ((const table_t *)table)->blocks);
  table_t *t = copy_table(at, 1, 1);
  t->blocks[at] = block;
  publish(t);
}

static void remove_block(const block_t *block) {
  publish(copy_table((size_t)(block - ((const table_t *)table)->blocks), 1, 0));
}

bool memory_find(const void *address, block_t *out) {
  pthread_mutex_lock(&lock);
  const block_t *b = block_around(table, (uint64_t)address);
  if (b) *out = *b;
  pthread_mutex_unlock(&lock);
  return b != NULL;
}

bool memory_is_live(uint64_t address, uint64_t bytes) {
  static _Thread_local struct { uint64_t generation, from, to; } last;
  const uint64_t generation = atomic_load_explicit(&current_generation, memory_order_acquire);
  if (last.generation != generation || address < last.from || address >= last.to) {
    const table_t *t = table;
    const block_t *b = block_around(t, address);
    if (!b || !b->is_live) return false;
    last.generation = t->generation;
    last.from = b->from;
    last.to = b->to;
  }
  return bytes <= last.to - address;
}

bool memory_is_copyable(const void *start, size_t bytes, bool is_now) {
  const uint64_t address = (uint64_t)start;
  if (!bytes) return true;
  if (address + bytes < address || !start) return false;
  if (address + bytes <= WINDOW_FROM || address >= WINDOW_TO) return true;
  block_t b;
  return memory_find(start, &b) && bytes <= b.to - address && (b.is_live || !is_now);
}

// ---- blocks

static void charge(const block_t *b, uint64_t bytes) {
  device_t *device = &devices[b->device];
  device->used_bytes += bytes;
  if ((int64_t)bytes > 0 && device->used_bytes > device->peak_bytes) device->peak_bytes = device->used_bytes;
  if (b->account) *b->account += bytes;
}

static bool has_room(const device_t *device, uint64_t bytes) {
  return device->used_bytes <= device->memory_bytes && bytes <= device->memory_bytes - device->used_bytes;
}

// Maps pages for a block, whose addresses are relative to its start, and adds it to the table.
static void *make_block(block_t block) {
  const uint64_t bytes = block.to;
  pthread_mutex_lock(&lock);
  const bool fits = block.kind != MEMORY_DEVICE || has_room(&devices[block.device], bytes);
  void *start = fits ? map_pages(pages_of(bytes)) : NULL;
  block.from += (uint64_t)start;
  block.to += (uint64_t)start;
  if (start && block.kind == MEMORY_DEVICE) charge(&block, bytes);
  if (start) add_block(block);
  pthread_mutex_unlock(&lock);
  return start;
}

static void poison(void *start, size_t bytes) { memset(start, settings.poison, pages_of(bytes)); }

void *memory_allocate(enum memory_kind kind, device_t *device, size_t bytes) {
  const int16_t index = (int16_t)device->index;
  void *start = make_block((block_t){.to = bytes, .kind = kind, .is_live = true, .device = index});
  if (start) poison(start, bytes);
  return start;
}

void *memory_reserve(device_t *device, size_t bytes, uint64_t *account) {
  return make_block(
      (block_t){.to = bytes, .kind = MEMORY_DEVICE, .device = (int16_t)device->index, .account = account});
}

void memory_awake(void *start) {
  block_t b;
  if (!memory_find(start, &b)) return;
  poison(start, b.to - b.from);
  pthread_mutex_lock(&lock);
  const block_t *old = block_starting(table, start);
  b.is_live = true;
  if (old) change_block(old, b);
  pthread_mutex_unlock(&lock);
}

bool memory_free(void *start, enum memory_kind kind) {
  pthread_mutex_lock(&lock);
  const block_t *b = block_starting(table, start);
  const bool is_ours = b && b->kind == kind;
  const uint64_t bytes = is_ours ? b->to - b->from : 0;
  if (is_ours) {
    if (kind == MEMORY_DEVICE) charge(b, -bytes);
    retire(start, pages_of(bytes));
    remove_block(b);
  }
  pthread_mutex_unlock(&lock);
  return is_ours;
}

// ---- registered host memory

static hipError_t register_locked(uint64_t from, uint64_t to, const device_t *device) {
  const table_t *t = table;
  const size_t at = place_of(t, from);
  const block_t *b = at < t->count && t->blocks[at].from < to ? &t->blocks[at] : NULL;
  if (!b) {
    add_block((block_t){from, to, MEMORY_REGISTERED, true, (int16_t)device->index, 1, NULL});
    return hipSuccess;
  }
  const bool is_same = b->kind == MEMORY_REGISTERED && b->from == from && b->to == to;
  if (!is_same) return hipErrorHostMemoryAlreadyRegistered;
  block_t again = *b;
  again.references++;
  change_block(b, again);
  return hipSuccess;
}

hipError_t memory_register(void *start, size_t bytes, device_t *device) {
  pthread_mutex_lock(&lock);
  const hipError_t error = register_locked((uint64_t)start, (uint64_t)start + bytes, device);
  pthread_mutex_unlock(&lock);
  return error;
}

bool memory_unregister(void *start) {
  pthread_mutex_lock(&lock);
  const block_t *b = block_starting(table, start);
  const bool is_ours = b && b->kind == MEMORY_REGISTERED;
  if (is_ours && b->references > 1) {
    block_t less = *b;
    less.references--;
    change_block(b, less);
  } else if (is_ours) {
    remove_block(b);
  }
  pthread_mutex_unlock(&lock);
  return is_ours;
}
