// Copies and fills in stream order. Source and destination, also on the host, are accessed only when the
// operation runs, not when it is submitted.
#include <string.h>

#include "calls.h"
#include "memory.h"
#include "report.h"
#include "streams.h"

typedef struct { void *to; const void *from; size_t bytes; } copy_t;
typedef struct { void *to; size_t count; uint32_t value; uint8_t width; } fill_t;

static hipError_t outside(const char *what, const void *start) {
  report_misuse(what, start, "touches memory that is no longer (or not yet) allocated");
  return hipErrorIllegalAddress;
}

static hipError_t run_copy(void *payload) {
  const copy_t *c = payload;
  if (!memory_is_copyable(c->to, c->bytes, true)) return outside("a copy", c->to);
  if (!memory_is_copyable(c->from, c->bytes, true)) return outside("a copy", c->from);
  memmove(c->to, c->from, c->bytes);
  return hipSuccess;
}

static hipError_t run_fill(void *payload) {
  const fill_t *f = payload;
  if (!memory_is_copyable(f->to, f->count * f->width, true)) return outside("a fill", f->to);
  uint8_t *at = f->to;
  if (f->width == 1) memset(at, (int)(f->value & 0xff), f->count);
  else
    for (size_t i = 0; i < f->count; i++) memcpy(at + i * f->width, &f->value, f->width);
  return hipSuccess;
}

static hipError_t copy(void *to, const void *from, size_t bytes, stream_t *stream) {
  if (!stream) return hipErrorInvalidHandle;
  const bool is_possible = memory_is_copyable(to, bytes, false) && memory_is_copyable(from, bytes, false);
  if (!is_possible) return hipErrorInvalidValue;
  if (!bytes) return hipSuccess;
  return stream_submit(stream, run_copy, NULL, &(copy_t){to, from, bytes}, sizeof(copy_t));
}

static hipError_t fill(void *to, size_t count, uint32_t value, uint8_t width, stream_t *stream) {
  if (!stream) return hipErrorInvalidHandle;
  if (!memory_is_copyable(to, count * width, false)) return hipErrorInvalidValue;
  if (!count) return hipSuccess;
  return stream_submit(stream, run_fill, NULL, &(fill_t){to, count, value, width}, sizeof(fill_t));
}

// Waits for a synchronous call, which was submitted to the null stream.
static hipError_t finish(hipError_t error) {
  return error == hipSuccess ? stream_synchronise(current_device()->null_stream) : error;
}

enum { HIGHEST_COPY_KIND = 4 };  // hipMemcpyDefault. Kinds are only checked: addresses tell the direction.

API hipError_t hipMemcpy(void *to, const void *from, size_t bytes, int kind) {
  ENTER("%p %p %zu", to, from, bytes);
  if (kind < 0 || kind > HIGHEST_COPY_KIND) return call_leave(hipErrorInvalidValue);
  return call_leave(finish(copy(to, from, bytes, current_device()->null_stream)));
}
API hipError_t hipMemcpyAsync(void *to, const void *from, size_t bytes, int kind, hipStream_t stream) {
  ENTER("%p %p %zu %p", to, from, bytes, (void *)stream);
  if (kind < 0 || kind > HIGHEST_COPY_KIND) return call_leave(hipErrorInvalidValue);
  return call_leave(copy(to, from, bytes, stream_of(stream)));
}
API hipError_t hipMemcpyHtoDAsync(void *to, void *from, size_t bytes, hipStream_t stream) {
  ENTER("%p %p %zu %p", to, from, bytes, (void *)stream);
  return call_leave(copy(to, from, bytes, stream_of(stream)));
}
API hipError_t hipMemset(void *to, int value, size_t bytes) {
  ENTER("%p %d %zu", to, value, bytes);
  return call_leave(finish(fill(to, bytes, (uint32_t)value, 1, current_device()->null_stream)));
}
API hipError_t hipMemsetAsync(void *to, int value, size_t bytes, hipStream_t stream) {
  ENTER("%p %d %zu %p", to, value, bytes, (void *)stream);
  return call_leave(fill(to, bytes, (uint32_t)value, 1, stream_of(stream)));
}
API hipError_t hipMemsetD8Async(void *to, unsigned char value, size_t count, hipStream_t stream) {
  ENTER("%p %d %zu %p", to, value, count, (void *)stream);
  return call_leave(fill(to, count, value, 1, stream_of(stream)));
}
API hipError_t hipMemsetD16Async(void *to, unsigned short value, size_t count, hipStream_t stream) {
  ENTER("%p %d %zu %p", to, value, count, (void *)stream);
  return call_leave(fill(to, count, value, 2, stream_of(stream)));
}
API hipError_t hipMemsetD32Async(void *to, int value, size_t count, hipStream_t stream) {
  ENTER("%p %d %zu %p", to, value, count, (void *)stream);
  return call_leave(fill(to, count, (uint32_t)value, 4, stream_of(stream)));
}
API hipError_t hipMemPrefetchAsync(const void *start, size_t bytes, int device, hipStream_t stream) {
  ENTER("%p %zu %d", start, bytes, device);
  if (!stream_of(stream)) return call_leave(hipErrorInvalidHandle);
  return call_leave(hipErrorNotSupported);  // there is no managed memory
}
