// Blocks of memory that kernels may touch: device and host allocations, code, kernel arguments.
#pragma once
#include "devices.h"

enum memory_kind { MEMORY_DEVICE, MEMORY_HOST, MEMORY_REGISTERED, MEMORY_CODE, MEMORY_KERNARG };

typedef struct {
  uint64_t from, to;   // exact: what rounds it up to pages is not live
  enum memory_kind kind;
  bool is_live;        // false between an asynchronous allocation and its turn in the stream
  int16_t device;      // whose memory it counts in
  uint32_t references; // registrations of host memory
  uint64_t *account;   // a pool's count of bytes in use, or NULL
} block_t;

// A live block filled with the poison; NULL when the device (for MEMORY_DEVICE) or the host is out of memory.
void *memory_allocate(enum memory_kind kind, device_t *device, size_t bytes);
// The same, but live only after memory_awake, which fills it.
void *memory_reserve(device_t *device, size_t bytes, uint64_t *account);
void memory_awake(void *start);

// Takes a block away; false where `start` is not the first byte of a block of that kind.
bool memory_free(void *start, enum memory_kind kind);

// hipSuccess, or why this range of host memory cannot be registered.
hipError_t memory_register(void *start, size_t bytes, device_t *device);
bool memory_unregister(void *start);

// The block around an address.
bool memory_find(const void *address, block_t *out);

// Whether the copying engine may touch the range: memory of this library must be one block, and live where
// `is_now`; other addresses are taken for the host's own memory.
bool memory_is_copyable(const void *start, size_t bytes, bool is_now);

// For launch.h: whether a kernel may touch the range.
bool memory_is_live(uint64_t address, uint64_t bytes);

// Around whatever runs on a device: what is freed in between stays mapped until the last one has ended.
void memory_begin_use(void);
void memory_end_use(void);
