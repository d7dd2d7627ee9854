// Loads program files (program.h) and resolves the names of operations.
#include "program.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct program {
  uint32_t num_kernels;
  kernel_t *kernels;
  char **names;
  uint32_t num_names;
};

typedef struct { const uint8_t *at, *end; } cursor_t;

// Returns the counter that a kernel must wait for before it uses the instruction's data.
static enum wait_counter wait_counter_of(const instruction_t *i, int generation) {
  switch (i->class) {
    case CLASS_LOAD: case CLASS_SCRATCH: return WAIT_LOADS;
    case CLASS_ATOMIC: return generation == 9 || i->memory & MEMORY_RETURNS ? WAIT_LOADS : WAIT_STORES;
    case CLASS_STORE: return generation == 9 ? WAIT_LOADS : WAIT_STORES;
    case CLASS_LDS: return WAIT_LDS;
    case CLASS_SCALAR_MEMORY: return generation == 12 ? WAIT_SCALAR : WAIT_LDS;
    default: return WAIT_NONE;
  }
}

static const void *take(cursor_t *c, size_t bytes) {
  if (!c->at || (size_t)(c->end - c->at) < bytes) return c->at = NULL;
  c->at += bytes;
  return c->at - bytes;
}
static uint32_t take_uint(cursor_t *c, size_t bytes) {
  uint32_t value = 0;
  const void *p = take(c, bytes);
  if (p) memcpy(&value, p, bytes);
  return value;
}
static char *take_name(cursor_t *c, size_t length_bytes) {
  const size_t n = take_uint(c, length_bytes);
  const char *p = take(c, n);
  return p ? strndup(p, n) : NULL;
}

static void *read_file(const char *path, size_t *size) {
  FILE *file = fopen(path, "rb");
  if (!file) return NULL;
  fseek(file, 0, SEEK_END);
  const long end = ftell(file);
  rewind(file);
  void *data = end > 0 ? malloc((size_t)end) : NULL;
  if (data && fread(data, 1, (size_t)end, file) != (size_t)end) { free(data); data = NULL; }
  fclose(file);
  *size = (size_t)end;
  return data;
}

static void expand(const record_t *r, const program_t *program, const kernel_header_t *header, instruction_t *out) {
  memset(out, 0, sizeof *out);
  out->name = r->operation < program->num_names ? program->names[r->operation] : "?";
  out->run = operation_named(out->name, header->lanes);
  if (!out->run) out->run = unknown_operation;
  out->address = r->address;
  out->words = r->words;
  out->counted = r->flags & 1;
  for (int n = 0; n < NUM_OPERANDS; n++)
    out->operand[n] = (operand_t){r->operand[n].kind, r->operand[n].dwords, r->operand[n].index, r->operand[n].value};
  memcpy(&out->neg, &r->neg, offsetof(record_t, padding) - offsetof(record_t, neg));
  out->wait_counter = (uint8_t)wait_counter_of(out, header->generation);
}

static uint32_t highest_vgpr(const kernel_t *k) {
  uint32_t used = 1;
  for (uint32_t i = 0; i < k->header.num_instructions; i++)
    for (int n = 0; n < NUM_OPERANDS; n++) {
      const operand_t *o = &k->code[i].operand[n];
      const uint32_t end = o->index + (o->dwords ? o->dwords : 1u);
      if (o->kind == VGPR && end > used) used = end;
    }
  return used;
}

static bool sees_other_workgroups(const instruction_t *i) {
  return i->class == CLASS_ATOMIC ? i->memory & MEMORY_RETURNS : i->class == CLASS_LOAD && i->memory & MEMORY_FOR_DEVICE;
}

static bool may_spin(const kernel_t *k) {
  int64_t last = -1;  // index of the last instruction that sees other workgroups
  for (uint32_t i = 0; i < k->header.num_instructions; i++) {
    if (sees_other_workgroups(&k->code[i])) last = i;
    if (k->code[i].class == CLASS_BRANCH && k->code[i].target >= 0 && k->code[i].target <= last) return true;
  }
  return false;
}

static bool load_kernel(cursor_t *c, const program_t *program, kernel_t *k) {
  k->name = take_name(c, 2);
  const kernel_header_t *header = take(c, sizeof *header);
  if (!k->name || !header) return false;
  k->header = *header;
  const size_t arguments = header->num_arguments * sizeof(argument_t), count = header->num_instructions;
  const argument_t *from = take(c, arguments);
  const record_t *records = take(c, count * sizeof *records);
  if (!from || !records) return false;
  k->arguments = malloc(arguments + 1);
  memcpy(k->arguments, from, arguments);
  k->code = malloc((count + 1) * sizeof *k->code);
  for (size_t i = 0; i < count; i++) expand(&records[i], program, &k->header, &k->code[i]);
  k->code[count] = (instruction_t){.run = unknown_operation, .name = "end of the code", .wait_counter = WAIT_NONE};
  k->used_vgprs = highest_vgpr(k);
  k->may_spin = may_spin(k);
  return true;
}

static bool parse(program_t *program, cursor_t *c) {
  const char *magic = take(c, 8);
  if (!magic || memcmp(magic, "WAVEPRG1", 8)) return false;
  program->num_names = take_uint(c, 4);
  program->names = calloc(program->num_names + 1, sizeof *program->names);
  for (uint32_t i = 0; i < program->num_names; i++)
    if (!(program->names[i] = take_name(c, 1))) return false;
  program->num_kernels = take_uint(c, 4);
  program->kernels = calloc(program->num_kernels + 1, sizeof *program->kernels);
  for (uint32_t i = 0; i < program->num_kernels; i++)
    if (!load_kernel(c, program, &program->kernels[i])) return false;
  return c->at == c->end;
}

program_t *program_load(const char *path, char *error, size_t error_size) {
  size_t size = 0;
  uint8_t *data = read_file(path, &size);
  program_t *program = calloc(1, sizeof *program);
  cursor_t cursor = {data, data + size};
  if (data && parse(program, &cursor)) { free(data); return program; }
  snprintf(error, error_size, data ? "%s is not a program" : "%s cannot be read", path);
  free(data);
  program_free(program);
  return NULL;
}

void program_free(program_t *program) {
  for (uint32_t i = 0; program->kernels && i < program->num_kernels; i++) {
    free(program->kernels[i].name);
    free(program->kernels[i].arguments);
    free(program->kernels[i].code);
  }
  for (uint32_t i = 0; program->names && i < program->num_names; i++) free(program->names[i]);
  free(program->kernels);
  free(program->names);
  free(program);
}

const kernel_t *program_kernel(const program_t *program, const char *name) {
  for (uint32_t i = 0; i < program->num_kernels; i++)
    if (!strcmp(program->kernels[i].name, name)) return &program->kernels[i];
  return NULL;
}

const kernel_t *program_kernel_at(const program_t *program, uint32_t index) {
  return index < program->num_kernels ? &program->kernels[index] : NULL;
}

int64_t kernel_index_of(const kernel_t *kernel, uint64_t address) {
  int64_t low = 0, high = (int64_t)kernel->header.num_instructions - 1;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (kernel->code[middle].address < address) low = middle + 1; else high = middle;
  }
  return high >= 0 && kernel->code[low].address == address ? low : -1;
}
