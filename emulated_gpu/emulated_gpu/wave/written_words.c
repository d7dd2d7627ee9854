// A tree over the 48 bits of an address: 3 levels of 4,096 pages or tables each, and pages of 4,096 bytes.
#include "written_words.h"

#include <stdlib.h>

enum { LEVELS = 3, BITS = 12, FANOUT = 1 << BITS, WORDS = PAGE_BYTES / 4 };

// A packed word_t: `bytes` has a bit for each byte of the word that the store changed; 0: no store.
typedef union {
  struct { uint64_t writer : 20, number : 20, instruction : 19, is_device : 1, bytes : 4; };
  uint64_t bits;
} packed_t;
_Static_assert(sizeof(packed_t) == 8, "packed_t is stored atomically");

struct page {
  uint64_t words[WORDS];  // packed_t
  view_t *views[WORDS];
};

struct pages {
  void *root[FANOUT];
  bool has_pages;
};

struct pages *pages_open(void) { return calloc(1, sizeof(struct pages)); }
bool pages_are_empty(const struct pages *pages) { return !__atomic_load_n(&pages->has_pages, __ATOMIC_RELAXED); }

static void free_page(struct page *page) {
  for (unsigned n = 0; n < WORDS; n++) {
    if (page->views[n]) free(page->views[n]->marks);
    free(page->views[n]);
  }
  free(page);
}

static void free_table(void **table, int level) {
  for (unsigned n = 0; n < FANOUT; n++) {
    if (!table[n]) continue;
    if (level + 1 == LEVELS) free_page(table[n]);
    else free_table(table[n], level + 1);
  }
  if (level) free(table);
}

void pages_close(struct pages *pages) {
  free_table(pages->root, 0);
  free(pages);
}

static void **slot_in(void **table, int level, uint64_t address) {
  return &table[address >> (BITS * (LEVELS - level)) & (FANOUT - 1)];
}

struct page *pages_find(const struct pages *pages, uint64_t address) {
  void *at = (void *)pages->root;
  for (int level = 0; level < LEVELS && at; level++)
    at = __atomic_load_n(slot_in(at, level, address), __ATOMIC_ACQUIRE);
  return at;
}

// Returns the memory in the slot; allocates it, zeroed, if the slot is empty.
static void *made(void **slot, size_t bytes) {
  void *there = __atomic_load_n(slot, __ATOMIC_ACQUIRE);
  if (there) return there;
  void *fresh = calloc(1, bytes);
  if (__atomic_compare_exchange_n(slot, &there, fresh, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) return fresh;
  free(fresh);
  return there;
}

struct page *pages_make(struct pages *pages, uint64_t address) {
  void *at = pages->root;
  for (int level = 0; level < LEVELS; level++)
    at = made(slot_in(at, level, address), level + 1 < LEVELS ? FANOUT * sizeof(void *) : sizeof(struct page));
  __atomic_store_n(&pages->has_pages, true, __ATOMIC_RELAXED);
  return at;
}

static unsigned word_of(uint64_t address) { return (unsigned)(address % PAGE_BYTES / 4); }
static unsigned byte_mask(uint64_t address, unsigned bytes) { return ((1u << bytes) - 1) << (address & 3); }

void page_record(struct page *page, uint64_t address, unsigned bytes, const word_t *word) {
  packed_t packed = {.bits = 0};
  packed.writer = word->writer;
  packed.number = word->number;
  packed.instruction = word->instruction;
  packed.is_device = word->is_device;
  const bool fits = packed.number == word->number && packed.instruction == word->instruction;
  for (uint64_t at = address; at < address + bytes; at = (at | 3) + 1) {
    const uint64_t end = (at | 3) + 1 < address + bytes ? (at | 3) + 1 : address + bytes;
    packed.bytes = fits ? byte_mask(at, (unsigned)(end - at)) : 0;  // too large: as if nothing was stored
    __atomic_store_n(&page->words[word_of(at)], packed.bits, __ATOMIC_RELAXED);
  }
}

bool page_word(const struct page *page, uint64_t address, unsigned bytes, word_t *word) {
  const packed_t packed = {.bits = __atomic_load_n(&page->words[word_of(address)], __ATOMIC_RELAXED)};
  if (!(packed.bytes & byte_mask(address, bytes))) return false;
  *word = (word_t){packed.writer, packed.number, packed.instruction, packed.is_device};
  return true;
}

const view_t *page_published(const struct page *page, uint64_t address) { return page->views[word_of(address)]; }

view_t *page_view(struct page *page, uint64_t address) {
  view_t **view = &page->views[word_of(address)];
  if (!*view) *view = calloc(1, sizeof **view);
  return *view;
}
