// Waits for memory: tracks which registers would still be waiting for data on hardware, and reports missing
// waits.
//
// The emulator delivers loaded data at once. So a kernel that reads a register without the s_waitcnt that its
// load needs would still compute the right result. Therefore each register stores the access that fills it,
// until a wait covers this access. Order of arrival: LLVM, "User Guide for AMDGPU Backend", memory model, and
// SIInsertWaitcnts.
#include "wave.h"

bool waits_outstanding(const waits_t *waits) {
  for (int c = 0; c < WAIT_STORES; c++)  // stores on RDNA fill no registers
    if (waits->issued[c] != waits->completed[c]) return true;
  return false;
}

static bool is_pending(const waits_t *waits, const wait_ticket_t *t) {
  return t->sequence && (int32_t)(t->sequence - waits->completed[t->counter]) > 0;
}

typedef wait_ticket_t dword_tickets_t[2];

static dword_tickets_t *tickets(waits_t *waits, const operand_t *o) {
  return o->kind == VGPR ? &waits->vgpr[o->index] : o->kind == SGPR ? &waits->sgpr[o->index] : NULL;
}

static int num_dwords(const operand_t *o) { return o->dwords ? o->dwords : 1; }

// Whether `i` reads or writes this half (0: lower, 1: upper) of an operand's registers. D16 loads, and stores
// of at most 16 bits, only use one half of their data register.
static bool takes_half(const instruction_t *i, const operand_t *o, int half) {
  if (o == &i->operand[DST]) return !i->d16 || i->d16 == half + 1;
  const bool is_data = (i->class == CLASS_STORE && o == &i->operand[SRC2]) ||
                       (i->class == CLASS_LDS && o == &i->operand[SRC1]);
  return !is_data || i->bytes == 0 || i->bytes > 2 || (i->d16 == 2) == half;
}

static void check_operand(wave_t *w, const instruction_t *i, const operand_t *o, enum wait_counter same) {
  dword_tickets_t *t = tickets(&w->waits, o);
  for (int n = 0; t && n < 2 * num_dwords(o); n++) {
    wait_ticket_t *half = &t[n / 2][n % 2];
    if (!takes_half(i, o, n % 2)) continue;
    if (!is_pending(&w->waits, half) || (half->counter == same && !half->unordered)) continue;
    report(w, i, MISSING_WAIT, -1, (uint64_t)(o->index + n / 2), w->index);
    t[n / 2][0].sequence = t[n / 2][1].sequence = 0;  // report each access only once
  }
}

void waits_check(wave_t *w, const instruction_t *i) {
  for (int n = SRC0; n < NUM_OPERANDS; n++) check_operand(w, i, &i->operand[n], WAIT_NONE);
  // Data of one counter arrive in order, so an instruction may overwrite the register of an earlier load
  // without a wait if both have the same counter.
  check_operand(w, i, &i->operand[DST], (enum wait_counter)i->wait_counter);
  check_operand(w, i, &i->operand[DST2], WAIT_NONE);
}

void waits_issue(wave_t *w, const instruction_t *i) {
  waits_t *waits = &w->waits;
  const enum wait_counter c = (enum wait_counter)i->wait_counter;
  const bool unordered = i->class == CLASS_SCALAR_MEMORY;
  const uint32_t sequence = ++waits->issued[c];
  if (unordered) waits->unordered[c] = sequence;
  if (i->class == CLASS_LDS && i->bytes) waits->lds = sequence;
  const operand_t *o = &i->operand[DST];
  dword_tickets_t *t = tickets(waits, o);
  for (int n = 0; t && n < 2 * num_dwords(o); n++)
    if (takes_half(i, o, n % 2)) t[n / 2][n % 2] = (wait_ticket_t){sequence, (uint8_t)c, unordered};
}

void waits_for(wave_t *w, enum wait_counter c, int32_t remaining) {
  waits_t *waits = &w->waits;
  if (remaining < 0) return;
  const bool overtaken = waits->unordered[c] > waits->completed[c];
  if (overtaken && remaining > 0) return;  // accesses complete in any order: all of them may be outstanding
  const uint32_t covered = waits->issued[c] - (uint32_t)remaining;
  if ((int32_t)(covered - waits->completed[c]) > 0) waits->completed[c] = covered;
}

void waits_check_barrier(wave_t *w, const instruction_t *i) {
  const waits_t *waits = &w->waits;
  if ((int32_t)(waits->lds - waits->completed[WAIT_LDS]) > 0) report(w, i, MISSING_WAIT, -1, 0, w->index);
}
