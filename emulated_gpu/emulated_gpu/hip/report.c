// Collects findings, misuses, numbers of calls and counters of kernels, and writes them as JSON.
//
// If EMULATED_GPU_REPORT names a file, each finding or misuse is appended as a line {"finding": {...}} or
// {"misuse": {...}} when it occurs, and {"summary": {...}} at the process's end.
#include "report.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "devices.h"

typedef struct { char *name; uint64_t launches; counters_t counters; } kernel_sum_t;
typedef struct { char what[64], text[128]; uint64_t address, repetitions; } misuse_t;

enum { MAX_MISUSES = 1000, MAX_FINDINGS = 1000, MAX_FUNCTIONS = 128 };
static struct { const char *name; uint64_t calls; } functions[MAX_FUNCTIONS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static FILE *file;
static kernel_sum_t *kernels;
static size_t num_kernels;
static misuse_t misuses[MAX_MISUSES];
static size_t num_misuses;

// ---- writing

static void write_string(FILE *out, const char *text) {
  fputc('"', out);
  for (; *text; text++) {
    if (*text == '"' || *text == '\\') fputc('\\', out);
    if ((unsigned char)*text >= ' ') fputc(*text, out);
  }
  fputc('"', out);
}

static void write_finding(FILE *out, const finding_t *f) {
  fprintf(out, "{\"kind\": \"%s\", \"kernel\": ", finding_name((enum finding_kind)f->kind));
  write_string(out, f->kernel);
  fputs(", \"instruction\": ", out);
  write_string(out, f->instruction);
  const uint32_t *g = f->workgroup;
  fprintf(out, ", \"workgroup\": [%u, %u, %u], \"wave\": %u, \"other_wave\": %u", g[0], g[1], g[2], f->wave,
          f->other_wave);
  g = f->other_workgroup;
  fprintf(out, ", \"other_workgroup\": [%u, %u, %u], \"other_code_address\": %lu, \"other_instruction\": ", g[0],
          g[1], g[2], f->other_code_address);
  write_string(out, f->other_instruction);
  fprintf(out, ", \"lane\": %d, \"code_address\": %lu, \"address\": %lu, \"repetitions\": %lu}", f->lane,
          f->code_address, f->address, f->repetitions);
}

static void write_misuse(FILE *out, const misuse_t *m) {
  fputs("{\"what\": ", out);
  write_string(out, m->what);
  fputs(", \"text\": ", out);
  write_string(out, m->text);
  fprintf(out, ", \"address\": %lu, \"repetitions\": %lu}", m->address, m->repetitions);
}

static void write_findings(FILE *out) {
  finding_t *findings = malloc(MAX_FINDINGS * sizeof *findings);
  const size_t all = findings ? findings_read(findings, MAX_FINDINGS) : 0;
  for (size_t i = 0; i < all && i < MAX_FINDINGS; i++) {
    if (i) fputs(", ", out);
    write_finding(out, &findings[i]);
  }
  free(findings);
}

static const char *const class_names[NUM_CLASSES] = {
  "other", "scalar", "scalar_memory", "vector", "transcendental", "matrix", "load", "store",
  "lds", "scratch", "branch", "barrier", "wait", "atomic", "message",
};

static void write_counters(FILE *out, const counters_t *c) {
  fputs("\"instructions\": {", out);
  for (int i = 0; i < NUM_CLASSES; i++)
    fprintf(out, "%s\"%s\": %lu", i ? ", " : "", class_names[i], c->instructions[i]);
  fprintf(out, "}, \"loaded_bytes\": %lu, \"stored_bytes\": %lu", c->loaded_bytes, c->stored_bytes);
  fprintf(out, ", \"loaded_lines\": %lu, \"stored_lines\": %lu", c->loaded_lines, c->stored_lines);
  fprintf(out, ", \"unique_loaded_bytes\": %lu, \"unique_stored_bytes\": %lu", c->unique_loaded_bytes,
          c->unique_stored_bytes);
  fprintf(out, ", \"lds_bytes\": %lu, \"lds_conflict_cycles\": %lu, \"matrix_operations\": %lu", c->lds_bytes,
          c->lds_conflict_cycles, c->matrix_operations);
}

static void write_kernels(FILE *out) {
  for (size_t i = 0; i < num_kernels; i++) {
    if (i) fputs(", ", out);
    write_string(out, kernels[i].name);
    fprintf(out, ": {\"launches\": %lu, ", kernels[i].launches);
    write_counters(out, &kernels[i].counters);
    fputc('}', out);
  }
}

static void write_devices(FILE *out) {
  for (int i = 0; i < settings.num_devices; i++) {
    const device_t *d = &devices[i];
    fprintf(out, "%s{\"memory_bytes\": %lu, \"used_bytes\": %lu, \"peak_bytes\": %lu, \"error\": \"%s\"}",
            i ? ", " : "", d->memory_bytes, d->used_bytes, d->peak_bytes, hipGetErrorName(d->error));
  }
}

static void write_calls(FILE *out) {
  fputc('{', out);
  for (int i = 0; i < MAX_FUNCTIONS && functions[i].name; i++)
    fprintf(out, "%s\"%s\": %lu", i ? ", " : "", functions[i].name, functions[i].calls);
  fputc('}', out);
}

void report_write(FILE *out) {
  pthread_mutex_lock(&lock);
  fputs("{\"calls\": ", out);
  write_calls(out);
  fputs(", \"devices\": [", out);
  write_devices(out);
  fputs("], \"kernels\": {", out);
  write_kernels(out);
  fputs("}, \"findings\": [", out);
  write_findings(out);
  fputs("], \"misuses\": [", out);
  for (size_t i = 0; i < num_misuses; i++) {
    if (i) fputs(", ", out);
    write_misuse(out, &misuses[i]);
  }
  fputs("]}", out);
  pthread_mutex_unlock(&lock);
}

// ---- collecting

void report_call(const char *name) {
  pthread_mutex_lock(&lock);
  int i = 0;
  while (functions[i].name && functions[i].name != name && i + 1 < MAX_FUNCTIONS) i++;
  functions[i].name = name;
  functions[i].calls++;
  pthread_mutex_unlock(&lock);
}

static void note_finding(const finding_t *finding) {
  pthread_mutex_lock(&lock);
  fputs("{\"finding\": ", file);
  write_finding(file, finding);
  fputs("}\n", file);
  fflush(file);
  pthread_mutex_unlock(&lock);
}

void report_misuse(const char *what, const void *address, const char *text) {
  pthread_mutex_lock(&lock);
  size_t i = 0;
  while (i < num_misuses && (strcmp(misuses[i].what, what) || strcmp(misuses[i].text, text))) i++;
  if (i < MAX_MISUSES) {
    misuse_t *m = &misuses[i];
    const bool is_new = i == num_misuses;
    if (is_new) num_misuses++;
    snprintf(m->what, sizeof m->what, "%s", what);
    snprintf(m->text, sizeof m->text, "%s", text);
    m->address = (uint64_t)address;
    m->repetitions++;
    if (is_new && file) {
      fputs("{\"misuse\": ", file);
      write_misuse(file, m);
      fputs("}\n", file);
      fflush(file);
    }
  }
  pthread_mutex_unlock(&lock);
}

static kernel_sum_t *sum_of(const kernel_t *kernel) {
  for (size_t i = 0; i < num_kernels; i++)
    if (!strcmp(kernels[i].name, kernel->name)) return &kernels[i];
  kernels = realloc(kernels, (num_kernels + 1) * sizeof *kernels);
  if (!kernels) abort();
  kernels[num_kernels] = (kernel_sum_t){.name = strdup(kernel->name)};
  return &kernels[num_kernels++];
}

void report_launch(const kernel_t *kernel, const counters_t *counters) {
  pthread_mutex_lock(&lock);
  kernel_sum_t *sum = sum_of(kernel);
  sum->launches++;
  for (size_t i = 0; i < sizeof *counters / sizeof(uint64_t); i++)
    ((uint64_t *)&sum->counters)[i] += ((const uint64_t *)counters)[i];
  pthread_mutex_unlock(&lock);
}

// ---- start and end of the process

void report_start(void) {
  const char *path = getenv("EMULATED_GPU_REPORT");
  if (!path || !*path) return;
  file = fopen(path, "ae");
  if (!file) {
    fprintf(stderr, "emulated_gpu: EMULATED_GPU_REPORT=%s cannot be written\n", path);
    abort();
  }
  findings_set_listener(note_finding);
}

void report_clear(void) {
  findings_clear();
  pthread_mutex_lock(&lock);
  for (size_t i = 0; i < num_kernels; i++) free(kernels[i].name);
  num_kernels = num_misuses = 0;
  memset(misuses, 0, sizeof misuses);
  pthread_mutex_unlock(&lock);
}

__attribute__((destructor(200))) static void write_at_end(void) {
  if (!file) return;
  fputs("{\"summary\": ", file);
  report_write(file);
  fputs("}\n", file);
  fflush(file);
}
