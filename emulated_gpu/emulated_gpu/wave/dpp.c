// Computes the lane from which DPP takes a value.
#include "wave.h"

int dpp16_lane(int l, int ctrl) {
  const int row = l & ~15, n = l & 15, by = ctrl & 15;
  if (ctrl < 0x100) return (l & ~3) | (ctrl >> 2 * (l & 3) & 3);                         // quad_perm
  if (ctrl >= 0x101 && ctrl <= 0x10f) return n + by > 15 ? -1 : row | (n + by);          // row_shl
  if (ctrl >= 0x111 && ctrl <= 0x11f) return n - by < 0 ? -1 : row | (n - by);           // row_shr
  if (ctrl >= 0x121 && ctrl <= 0x12f) return row | ((n - by) & 15);                      // row_ror
  if (ctrl == 0x130) return l + 1 < MAX_LANES ? l + 1 : -1;                              // wave_shl (CDNA)
  if (ctrl == 0x134) return (l + 1) & 63;                                                // wave_rol (CDNA)
  if (ctrl == 0x138) return l - 1;                                                       // wave_shr (CDNA)
  if (ctrl == 0x13c) return (l - 1) & 63;                                                // wave_ror (CDNA)
  if (ctrl == 0x140) return row | (15 - n);                                              // row_mirror
  if (ctrl == 0x141) return (l & ~7) | (7 - (l & 7));                                    // row_half_mirror
  if (ctrl == 0x142) return l < 16 ? -1 : row - 1;                                       // row_bcast:15 (CDNA)
  if (ctrl == 0x143) return l < 32 ? -1 : (l & ~31) - 1;                                 // row_bcast:31 (CDNA)
  if (ctrl >= 0x150 && ctrl <= 0x15f) return row | by;                                   // row_share, row_newbcast
  if (ctrl >= 0x160 && ctrl <= 0x16f) return row | (n ^ by);                             // row_xmask (RDNA)
  return -1;
}
