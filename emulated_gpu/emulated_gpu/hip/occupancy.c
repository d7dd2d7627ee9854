// Occupancy, as LLVM computes it (AMDGPUBaseInfo: IsaInfo) from waves, registers and LDS.
//
// Workgroups share a compute unit; on RDNA, in WGP mode, a pair of them with twice the SIMDs and LDS.
#include "occupancy.h"

enum { CDNA_WORKGROUPS = 16, RDNA_WORKGROUPS = 32 };  // of several waves, per compute unit or pair: its barriers

static uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }
static uint32_t round_up(uint32_t x, uint32_t unit) { return (x + unit - 1) / unit * unit; }

static uint32_t waves_by_vgprs(const chip_t *chip, const kernel_header_t *k) {
  const bool is_wave64 = k->lanes == 64 && chip->lanes == 32;  // has half the registers per lane
  const uint32_t blocks = (k->rsrc1 & 63) + 1, half = is_wave64 ? 2 : 1;
  return chip->vgprs / half / round_up(8 / half * blocks, chip->vgpr_unit / half);
}

// Only CDNA divides scalar registers among waves (LLVM, getOccupancyWithNumSGPRs).
static uint32_t waves_by_sgprs(const chip_t *chip, const kernel_header_t *k) {
  return chip->major == 9 && k->num_sgprs > 100 ? 7 : chip->simd_waves;
}

uint32_t resident_workgroups(const chip_t *chip, const kernel_header_t *k, const launch_t *l) {
  const uint32_t pairs = chip->major > 9 && k->rsrc1 >> 29 & 1 ? 2 : 1;  // WGP_MODE
  const uint32_t waves = (l->block[0] * l->block[1] * l->block[2] + k->lanes - 1u) / k->lanes;
  const uint32_t by_registers = smaller(waves_by_vgprs(chip, k), waves_by_sgprs(chip, k));
  uint32_t workgroups = chip->simds * pairs * smaller(chip->simd_waves, by_registers) / waves;
  const uint32_t lds = round_up(k->lds_bytes + l->dynamic_lds_bytes, chip->lds_unit);
  if (lds) workgroups = smaller(workgroups, chip->lds_bytes * pairs / lds);
  if (waves > 1) workgroups = smaller(workgroups, chip->major == 9 ? CDNA_WORKGROUPS : RDNA_WORKGROUPS);
  return workgroups * (uint32_t)chip->compute_units / pairs;
}
