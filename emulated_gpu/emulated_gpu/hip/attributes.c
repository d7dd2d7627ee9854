// Properties of devices: hipDeviceGetAttribute and hipGetDeviceProperties.
#include <stdio.h>
#include <string.h>

#include "calls.h"
#include "devices.h"

// Values of hipDeviceAttribute_t.
enum {
  CAN_MAP_HOST_MEMORY = 3, CONCURRENT_MANAGED_ACCESS = 9, INTEGRATED = 16, L2_CACHE_SIZE = 19, MAJOR = 23,
  MANAGED_MEMORY = 24, MAX_BLOCK_DIM_X = 26, MAX_BLOCK_DIM_Y = 27, MAX_BLOCK_DIM_Z = 28, MAX_GRID_DIM_X = 29,
  MAX_GRID_DIM_Y = 30, MAX_GRID_DIM_Z = 31, MAX_THREADS_PER_BLOCK = 56, MAX_THREADS_PER_MULTIPROCESSOR = 57,
  MINOR = 61, MULTIPROCESSOR_COUNT = 63, MAX_REGISTERS_PER_BLOCK = 71, MAX_SHARED_MEMORY_PER_BLOCK = 74,
  WARP_SIZE = 87, MEMORY_POOLS_SUPPORTED = 88,
};

enum { BLOCK_LANES = 1024, L2_BYTES = 4 << 20, REGISTERS = 64 << 10, CLOCK_KHZ = 2100000 };

static hipError_t attribute(int *value, int number) {
  const chip_t *chip = settings.chip;
  switch (number) {
    case CAN_MAP_HOST_MEMORY: case MEMORY_POOLS_SUPPORTED: *value = 1; break;
    case CONCURRENT_MANAGED_ACCESS: case INTEGRATED: case MANAGED_MEMORY: *value = 0; break;
    case MAX_BLOCK_DIM_X: case MAX_BLOCK_DIM_Y: case MAX_BLOCK_DIM_Z: *value = BLOCK_LANES; break;
    case MAX_THREADS_PER_BLOCK: *value = BLOCK_LANES; break;
    case MAX_GRID_DIM_X: *value = INT32_MAX; break;
    case MAX_GRID_DIM_Y: case MAX_GRID_DIM_Z: *value = UINT16_MAX; break;
    case MAX_THREADS_PER_MULTIPROCESSOR: *value = 2048; break;
    case L2_CACHE_SIZE: *value = L2_BYTES; break;
    case MAJOR: *value = chip->major; break;
    case MINOR: *value = chip->minor; break;
    case MULTIPROCESSOR_COUNT: *value = chip->compute_units; break;
    case MAX_REGISTERS_PER_BLOCK: *value = REGISTERS; break;
    case MAX_SHARED_MEMORY_PER_BLOCK: *value = (int)chip->lds_bytes; break;
    case WARP_SIZE: *value = chip->lanes; break;
    default: return hipErrorNotSupported;
  }
  return hipSuccess;
}

API hipError_t hipDeviceGetAttribute(int *value, int number, int ordinal) {
  ENTER("%d %d", number, ordinal);
  if (!device_at(ordinal)) return call_leave(hipErrorInvalidDevice);
  return call_leave(attribute(value, number));
}

// hipDeviceProp_t of ROCm 5 (hipDeviceProp_tR0000), which the symbol hipGetDeviceProperties still fills.
typedef struct {
  char name[256];
  size_t totalGlobalMem, sharedMemPerBlock;
  int regsPerBlock, warpSize, maxThreadsPerBlock, maxThreadsDim[3], maxGridSize[3];
  int clockRate, memoryClockRate, memoryBusWidth;
  size_t totalConstMem;
  int major, minor, multiProcessorCount, l2CacheSize, maxThreadsPerMultiProcessor, computeMode;
  int clockInstructionRate, arch, concurrentKernels, pciDomainID, pciBusID, pciDeviceID;
  size_t maxSharedMemoryPerMultiProcessor;
  int isMultiGpuBoard, canMapHostMemory, gcnArch;
  char gcnArchName[256];
  int integrated, cooperativeLaunch;
  char others[112];
  int managedMemory, directManagedMemAccessFromHost, concurrentManagedAccess;
  char rest[8];
} properties_t;
_Static_assert(sizeof(properties_t) == 792, "the size of hipDeviceProp_t in ROCm 5");
_Static_assert(offsetof(properties_t, gcnArchName) == 396, "its place in hipDeviceProp_t in ROCm 5");
_Static_assert(offsetof(properties_t, managedMemory) == 772, "its place in hipDeviceProp_t in ROCm 5");

API hipError_t hipGetDeviceProperties(properties_t *out, int ordinal) {
  ENTER("%d", ordinal);
  const chip_t *chip = settings.chip;
  if (!device_at(ordinal)) return call_leave(hipErrorInvalidDevice);
  *out = (properties_t){
    .totalGlobalMem = devices[ordinal].memory_bytes, .sharedMemPerBlock = chip->lds_bytes,
    .regsPerBlock = REGISTERS, .warpSize = chip->lanes, .maxThreadsPerBlock = BLOCK_LANES,
    .maxThreadsDim = {BLOCK_LANES, BLOCK_LANES, BLOCK_LANES},
    .maxGridSize = {INT32_MAX, UINT16_MAX, UINT16_MAX}, .clockRate = CLOCK_KHZ, .memoryClockRate = CLOCK_KHZ,
    .memoryBusWidth = 1024, .totalConstMem = INT32_MAX, .major = chip->major, .minor = chip->minor,
    .multiProcessorCount = chip->compute_units, .l2CacheSize = L2_BYTES, .maxThreadsPerMultiProcessor = 2048,
    .concurrentKernels = 1, .pciBusID = ordinal + 1, .maxSharedMemoryPerMultiProcessor = chip->lds_bytes,
    .canMapHostMemory = 1,
  };
  snprintf(out->name, sizeof out->name, "Emulated %s", chip->name);
  snprintf(out->gcnArchName, sizeof out->gcnArchName, "%s", chip->name);
  return hipSuccess;
}
