// Blocks of memory that kernels may access: device and host allocations, code, kernel arguments.
#pragma once
#include "devices.h"

enum memory_kind { MEMORY_DEVICE, MEMORY_HOST, MEMORY_REGISTERED, MEMORY_CODE, MEMORY_KERNARG };

typedef struct {
  uint64_t from, to;   // to the byte: the rest of the last page is not live
  enum memory_kind kind;
  bool is_live;        // false for a stream-ordered allocation until the stream has reached it
  int16_t device;      // the device whose memory it uses
  uint32_t references; // how often host memory is registered
  uint64_t *account;   // its pool's number of bytes in use, or NULL
} block_t;

// Allocates a live block filled with `settings.poison`. Returns NULL if the device (MEMORY_DEVICE) or the
// host is out of memory.
void *memory_allocate(enum memory_kind kind, device_t *device, size_t bytes);
// Allocates a block of device memory that is not live before memory_awake, which also fills it.
void *memory_reserve(device_t *device, size_t bytes, uint64_t *account);
void memory_awake(void *start);

// Frees a block. Returns false unless `start` is the first byte of a block of this kind.
bool memory_free(void *start, enum memory_kind kind);

// Registers host memory; the same range may be registered several times. Returns an error if the range
// overlaps another one or a block.
hipError_t memory_register(void *start, size_t bytes, device_t *device);
bool memory_unregister(void *start);

// Writes the block that contains an address to `out`; returns false if there is none.
bool memory_find(const void *address, block_t *out);

// Whether a copy or fill may access the range. In this library's window it must be inside of one block, which
// must be live if `is_now`. Other addresses are assumed to be the host's own memory.
bool memory_is_copyable(const void *start, size_t bytes, bool is_now);

// Whether a kernel may access the range (declared in launch.h, too).
bool memory_is_live(uint64_t address, uint64_t bytes);

// Must be called before and after work runs on a device. Memory freed in between stays mapped until no work
// runs.
void memory_begin_use(void);
void memory_end_use(void);
