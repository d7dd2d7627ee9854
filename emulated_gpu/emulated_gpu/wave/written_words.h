// The writers of global memory during a launch: for each word, the last store to it. Thread-safe without locks.
#pragma once
#include <stdbool.h>
#include <stddef.h>

#include "views.h"

#define PAGE_BYTES 4096u
#define MAX_WRITERS (1u << 20)

// The last store to a word.
typedef struct {
  uint32_t writer;       // the wave's number in the launch
  uint32_t number;       // of the store, see group_order.h
  uint32_t instruction;  // index in the kernel's code
  bool is_device;        // whether all compute units see it at once
} word_t;

struct pages;
struct page;

struct pages *pages_open(void);
void pages_close(struct pages *pages);
bool pages_are_empty(const struct pages *pages);
// Returns the page of an address; NULL if nothing was stored there.
struct page *pages_find(const struct pages *pages, uint64_t address);
struct page *pages_make(struct pages *pages, uint64_t address);

// Records a store of `bytes` bytes within a page. If two stores change parts of a word, the last one is kept.
void page_record(struct page *page, uint64_t address, unsigned bytes, const word_t *word);
// Whether one of `bytes` bytes within a word was stored; if so, writes by which store to `word`.
bool page_word(const struct page *page, uint64_t address, unsigned bytes, word_t *word);

// Returns what was published at the word of an address; NULL if nothing was. Callers must lock views.
const view_t *page_published(const struct page *page, uint64_t address);
// Returns the same view, made if it does not exist.
view_t *page_view(struct page *page, uint64_t address);
