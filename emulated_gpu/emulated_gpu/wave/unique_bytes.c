// Counts the different bytes of global memory that a launch loads and stores, in a hash table of 64-byte
// lines with a mask of bytes each.
#include "unique_bytes.h"

#include <pthread.h>
#include <stdlib.h>

typedef struct { uint64_t line, loaded, stored; } line_t;  // `line`: address / 64 + 1; 0: this entry is free

struct unique_bytes {
  line_t *lines;
  size_t capacity, used;  // capacity is a power of two
  pthread_mutex_t lock;
};

struct unique_bytes *unique_bytes_open(void) {
  struct unique_bytes *set = calloc(1, sizeof *set);
  set->capacity = 1 << 12;
  set->lines = calloc(set->capacity, sizeof *set->lines);
  pthread_mutex_init(&set->lock, NULL);
  return set;
}

static line_t *find(line_t *lines, size_t capacity, uint64_t line) {
  size_t n = (size_t)(line * 0x9e3779b97f4a7c15ull >> 20) & (capacity - 1);
  while (lines[n].line && lines[n].line != line) n = (n + 1) & (capacity - 1);
  return &lines[n];
}

static void grow(struct unique_bytes *set) {
  line_t *lines = calloc(2 * set->capacity, sizeof *lines);
  for (size_t n = 0; n < set->capacity; n++)
    if (set->lines[n].line) *find(lines, 2 * set->capacity, set->lines[n].line) = set->lines[n];
  free(set->lines);
  set->lines = lines;
  set->capacity *= 2;
}

static void note_in_line(struct unique_bytes *set, uint64_t line, uint64_t mask, bool is_store) {
  if (4 * set->used > 3 * set->capacity) grow(set);
  line_t *found = find(set->lines, set->capacity, line);
  if (!found->line) { found->line = line; set->used++; }
  *(is_store ? &found->stored : &found->loaded) |= mask;
}

void unique_bytes_note(struct unique_bytes *set, uint64_t address, uint32_t bytes, bool is_store) {
  const unsigned from = address & 63, first = bytes < 64 - from ? bytes : 64 - from;
  pthread_mutex_lock(&set->lock);
  note_in_line(set, address / 64 + 1, (first == 64 ? ~0ull : (1ull << first) - 1) << from, is_store);
  if (first < bytes) note_in_line(set, address / 64 + 2, (1ull << (bytes - first)) - 1, is_store);
  pthread_mutex_unlock(&set->lock);
}

void unique_bytes_close(struct unique_bytes *set, counters_t *counters) {
  for (size_t n = 0; n < set->capacity; n++) {
    counters->unique_loaded_bytes += (uint64_t)__builtin_popcountll(set->lines[n].loaded);
    counters->unique_stored_bytes += (uint64_t)__builtin_popcountll(set->lines[n].stored);
  }
  pthread_mutex_destroy(&set->lock);
  free(set->lines);
  free(set);
}
