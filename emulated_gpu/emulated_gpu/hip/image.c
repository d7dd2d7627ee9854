// Loads an AMD code object as the HSA loader does: copies segments to their addresses, then applies dynamic
// relocations.
// The format is LLVM's "User Guide for AMDGPU Backend", section "ELF Code Object".
#include "image.h"

#include <elf.h>
#include <stdio.h>
#include <string.h>

#include "memory.h"

#ifndef EM_AMDGPU
#define EM_AMDGPU 224
#endif
enum { EF_AMDGPU_MACH = 0xff, R_AMDGPU_ABS64 = 3, R_AMDGPU_RELATIVE64 = 13 };

typedef struct {
  const uint8_t *file;
  const Elf64_Ehdr *header;
  const Elf64_Phdr *segments;
  const Elf64_Shdr *sections;
} elf_t;

static elf_t elf_of(const void *file) {
  const uint8_t *bytes = file;
  const Elf64_Ehdr *header = file;
  const void *segments = bytes + header->e_phoff, *sections = bytes + header->e_shoff;
  return (elf_t){bytes, header, segments, sections};
}

static uint64_t larger(uint64_t a, uint64_t b) { return a > b ? a : b; }

size_t code_object_size(const void *data) {
  const elf_t e = elf_of(data);
  if (memcmp(e.header->e_ident, ELFMAG, SELFMAG) || e.header->e_ident[EI_CLASS] != ELFCLASS64) return 0;
  if (e.header->e_machine != EM_AMDGPU) return 0;
  uint64_t size = e.header->e_shoff + (uint64_t)e.header->e_shnum * sizeof(Elf64_Shdr);
  for (int i = 0; i < e.header->e_phnum; i++)
    size = larger(size, e.segments[i].p_offset + e.segments[i].p_filesz);
  for (int i = 0; i < e.header->e_shnum; i++) {
    const Elf64_Shdr *section = &e.sections[i];
    if (section->sh_type != SHT_NOBITS) size = larger(size, section->sh_offset + section->sh_size);
  }
  return size;
}

uint32_t code_object_machine(const void *data) { return elf_of(data).header->e_flags & EF_AMDGPU_MACH; }

static uint64_t bytes_in_memory(const elf_t *e) {
  uint64_t bytes = 0;
  for (int i = 0; i < e->header->e_phnum; i++) {
    const Elf64_Phdr *segment = &e->segments[i];
    if (segment->p_type == PT_LOAD) bytes = larger(bytes, segment->p_vaddr + segment->p_memsz);
  }
  return bytes;
}

static void load_segments(const elf_t *e, const image_t *image) {
  for (int i = 0; i < e->header->e_phnum; i++) {
    const Elf64_Phdr *segment = &e->segments[i];
    if (segment->p_type == PT_LOAD)
      memcpy(image->start + segment->p_vaddr, e->file + segment->p_offset, segment->p_filesz);
  }
}

static const Elf64_Shdr *section_of_type(const elf_t *e, uint32_t type) {
  for (int i = 0; i < e->header->e_shnum; i++)
    if (e->sections[i].sh_type == type) return &e->sections[i];
  return NULL;
}

static const Elf64_Sym *symbol_at(const elf_t *e, uint64_t index) {
  const Elf64_Shdr *symbols = section_of_type(e, SHT_DYNSYM);
  if (!symbols || index >= symbols->sh_size / sizeof(Elf64_Sym)) return NULL;
  return (const Elf64_Sym *)(e->file + symbols->sh_offset) + index;
}

static bool relocate(const elf_t *e, const image_t *image, const Elf64_Rela *r) {
  uint64_t value = (uint64_t)image->start + (uint64_t)r->r_addend;
  if (ELF64_R_TYPE(r->r_info) == R_AMDGPU_ABS64) {
    const Elf64_Sym *symbol = symbol_at(e, ELF64_R_SYM(r->r_info));
    if (!symbol || !symbol->st_shndx) return false;
    value += symbol->st_value;
  } else if (ELF64_R_TYPE(r->r_info) != R_AMDGPU_RELATIVE64) {
    return false;
  }
  if (r->r_offset + sizeof value > image->bytes) return false;
  memcpy(image->start + r->r_offset, &value, sizeof value);
  return true;
}

static const Elf64_Rela *refused_relocation(const elf_t *e, const image_t *image) {
  for (int i = 0; i < e->header->e_shnum; i++) {
    if (e->sections[i].sh_type != SHT_RELA) continue;
    const Elf64_Rela *r = (const void *)(e->file + e->sections[i].sh_offset);
    for (const Elf64_Rela *end = r + e->sections[i].sh_size / sizeof *r; r < end; r++)
      if (!relocate(e, image, r)) return r;
  }
  return NULL;
}

hipError_t image_load(const void *file, device_t *device, image_t *out, char *error, size_t error_size) {
  const elf_t e = elf_of(file);
  const uint64_t bytes = bytes_in_memory(&e);
  if (!bytes) {
    snprintf(error, error_size, "the code object has nothing to load");
    return hipErrorInvalidImage;
  }
  *out = (image_t){memory_allocate(MEMORY_CODE, device, bytes), bytes};
  if (!out->start) return hipErrorOutOfMemory;
  memset(out->start, 0, bytes);
  load_segments(&e, out);
  const Elf64_Rela *refused = refused_relocation(&e, out);
  if (!refused) return hipSuccess;
  snprintf(error, error_size, "a relocation of type %u at 0x%lx is not understood",
           (unsigned)ELF64_R_TYPE(refused->r_info), refused->r_offset);
  image_free(out);
  return hipErrorInvalidImage;
}

void image_free(image_t *image) {
  memory_free(image->start, MEMORY_CODE);
  image->start = NULL;
}

void *image_symbol(const image_t *image, const void *file, const char *name, uint64_t *bytes) {
  const elf_t e = elf_of(file);
  const Elf64_Shdr *symbols = section_of_type(&e, SHT_DYNSYM);
  if (!symbols) return NULL;
  const char *strings = (const char *)e.file + e.sections[symbols->sh_link].sh_offset;
  const Elf64_Sym *symbol = (const void *)(e.file + symbols->sh_offset);
  for (const Elf64_Sym *end = symbol + symbols->sh_size / sizeof *symbol; symbol < end; symbol++) {
    const bool is_variable = ELF64_ST_TYPE(symbol->st_info) == STT_OBJECT && symbol->st_shndx;
    if (!is_variable || strcmp(strings + symbol->st_name, name)) continue;
    *bytes = symbol->st_size;
    return image->start + symbol->st_value;
  }
  return NULL;
}
