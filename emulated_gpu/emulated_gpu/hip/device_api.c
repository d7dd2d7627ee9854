// The API's functions for contexts and devices.
#include <stdio.h>
#include <string.h>

#include "calls.h"
#include "devices.h"

// ---- contexts

API hipError_t hipCtxSetCurrent(hipCtx_t context) {
  ENTER_ANYWAY("%p", (void *)context);
  if (!context_is_known(context)) return call_leave(hipErrorInvalidContext);
  return context_set(context);
}
API hipError_t hipCtxGetCurrent(hipCtx_t *context) {
  ENTER_ANYWAY(" ");
  *context = settings.num_devices ? current_device() : NULL;
  return hipSuccess;
}
API hipError_t hipCtxPushCurrent(hipCtx_t context) {
  ENTER_ANYWAY("%p", (void *)context);
  if (!context_is_known(context)) return call_leave(hipErrorInvalidContext);
  return context_push(context) ? hipSuccess : call_leave(hipErrorOutOfMemory);
}
API hipError_t hipCtxPopCurrent(hipCtx_t *context) {
  ENTER_ANYWAY(" ");
  return context_pop(context) ? hipSuccess : call_leave(hipErrorInvalidContext);
}
API hipError_t hipSetDevice(int ordinal) {
  ENTER_ANYWAY("%d", ordinal);
  device_t *device = device_at(ordinal);
  return device ? context_set(device) : call_leave(hipErrorInvalidDevice);
}
API hipError_t hipDevicePrimaryCtxRetain(hipCtx_t *context, hipDevice_t ordinal) {
  ENTER_ANYWAY("%d", ordinal);
  *context = device_at(ordinal);
  return *context ? hipSuccess : call_leave(hipErrorInvalidDevice);
}
API hipError_t hipDevicePrimaryCtxRelease(hipDevice_t ordinal) {
  ENTER_ANYWAY("%d", ordinal);
  return device_at(ordinal) ? hipSuccess : call_leave(hipErrorInvalidDevice);
}

// ---- devices

API hipError_t hipInit(unsigned flags) {
  ENTER_ANYWAY("%u", flags);
  if (flags) return call_leave(hipErrorInvalidValue);
  return settings.num_devices ? hipSuccess : call_leave(hipErrorNoDevice);
}
API hipError_t hipGetDeviceCount(int *count) {
  ENTER_ANYWAY(" ");
  *count = settings.num_devices;
  return *count ? hipSuccess : call_leave(hipErrorNoDevice);
}
API hipError_t hipDeviceGet(hipDevice_t *device, int ordinal) {
  ENTER_ANYWAY("%d", ordinal);
  if (!device_at(ordinal)) return call_leave(hipErrorInvalidDevice);
  *device = ordinal;
  return hipSuccess;
}
API hipError_t hipDeviceGetName(char *name, int size, hipDevice_t ordinal) {
  ENTER_ANYWAY("%d", ordinal);
  if (!device_at(ordinal)) return call_leave(hipErrorInvalidDevice);
  snprintf(name, (size_t)size, "Emulated %s", settings.chip->name);
  return hipSuccess;
}
API hipError_t hipDeviceGetPCIBusId(char *name, int size, int ordinal) {
  ENTER_ANYWAY("%d", ordinal);
  if (!device_at(ordinal)) return call_leave(hipErrorInvalidDevice);
  snprintf(name, (size_t)size, "ffff:%02x:00.0", ordinal + 1);  // no machine has this domain
  return hipSuccess;
}
API hipError_t hipDeviceGetUuid(hipUUID *uuid, hipDevice_t ordinal) {
  ENTER_ANYWAY("%d", ordinal);
  if (!device_at(ordinal)) return call_leave(hipErrorInvalidDevice);
  char text[32];  // 16 hexadecimal digits, as in AMD's "GPU-" UUIDs, without that prefix
  snprintf(text, sizeof text, "%016x", 0xe0000000u + (unsigned)ordinal);
  memcpy(uuid->bytes, text, sizeof uuid->bytes);
  return hipSuccess;
}

// ---- peers

API hipError_t hipDeviceCanAccessPeer(int *can, int ordinal, int peer) {
  ENTER("%d %d", ordinal, peer);
  if (!device_at(ordinal) || !device_at(peer)) return call_leave(hipErrorInvalidDevice);
  *can = ordinal != peer;
  return hipSuccess;
}
API hipError_t hipDeviceEnablePeerAccess(int peer, unsigned flags) {
  ENTER("%d %u", peer, flags);
  device_t *device = current_device();
  if (!device_at(peer) || peer == device->index) return call_leave(hipErrorInvalidDevice);
  if (flags) return call_leave(hipErrorInvalidValue);
  const uint64_t bit = 1ull << peer;
  const uint64_t before = __atomic_fetch_or(&device->peers, bit, __ATOMIC_RELAXED);
  return before & bit ? call_leave(hipErrorPeerAccessAlreadyEnabled) : hipSuccess;
}
