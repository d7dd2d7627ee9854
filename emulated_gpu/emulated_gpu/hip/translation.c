// Translates code objects in another process, `EMULATED_GPU_PYTHON -P -m emulated_gpu.translate --serve` (-P:
// it imports nothing from the working folder). Loading the translator's tables takes ten times as long as a
// translation, so this process starts one translator and keeps it. The translator ends when the socket to it
// is closed.
//
// Program files are cached in the folder EMULATED_GPU_PROGRAMS under the code object's hash; library.py sets
// another folder for each version of the translator. If several processes or threads need the same program,
// the first to lock its lock file translates. A program gets its final name only when it is complete.
#include "translation.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

typedef struct { char code_object[PATH_MAX], program[PATH_MAX], partial[PATH_MAX], lock[PATH_MAX]; } paths_t;

// Two 64-bit FNV-1a hashes with different initial values. The second also depends on the bytes' positions.
static void hash_of(const uint8_t *data, size_t bytes, uint64_t hash[2]) {
  hash[0] = 0xcbf29ce484222325u;
  hash[1] = 0x84222325cbf29ce4u;
  for (size_t i = 0; i < bytes; i++)
    for (int n = 0; n < 2; n++) hash[n] = (hash[n] ^ data[i] ^ (n ? i & 0xff : 0)) * 0x100000001b3u;
}

static bool fill_paths(const char *cache, const uint64_t hash[2], paths_t *p) {
  char stem[PATH_MAX - 64];
  const int length = snprintf(stem, sizeof stem, "%s/%016lx%016lx", cache, hash[0], hash[1]);
  if (length >= (int)sizeof stem) return false;
  snprintf(p->code_object, PATH_MAX, "%s.hsaco", stem);
  snprintf(p->program, PATH_MAX, "%s.program", stem);
  snprintf(p->partial, PATH_MAX, "%s.partial", stem);
  snprintf(p->lock, PATH_MAX, "%s.lock", stem);
  return true;
}

static bool write_file(const char *path, const void *data, size_t bytes) {
  FILE *file = fopen(path, "we");
  if (!file) return false;
  const bool is_whole = fwrite(data, 1, bytes, file) == bytes;
  return !fclose(file) && is_whole;
}

static pthread_mutex_t lock_of_translator = PTHREAD_MUTEX_INITIALIZER;
static struct { pid_t owner, child; int socket; } translator = {.socket = -1};

static void stop_translator(void) {
  if (translator.socket < 0) return;
  close(translator.socket);
  translator.socket = -1;
  if (translator.owner == getpid())
    while (waitpid(translator.child, NULL, 0) < 0 && errno == EINTR) {}
}

static bool start_translator(const char *python) {
  char *const arguments[] = {(char *)python, "-P", "-m", "emulated_gpu.translate", "--serve", NULL};
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends)) return false;
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  for (int standard = STDIN_FILENO; standard <= STDOUT_FILENO; standard++)
    posix_spawn_file_actions_adddup2(&actions, ends[1], standard);
  pid_t child;
  const bool is_started = !posix_spawnp(&child, python, &actions, NULL, arguments, environ);
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);
  if (!is_started) {
    close(ends[0]);
    return false;
  }
  translator.owner = getpid();
  translator.child = child;
  translator.socket = ends[0];
  return true;
}

// Sends two lines, the paths of the code object and of the program. The answer is a line: 0 for success.
static bool ask_translator(const paths_t *p) {
  char request[2 * PATH_MAX + 2], answer[2];
  const size_t bytes = snprintf(request, sizeof request, "%s\n%s\n", p->code_object, p->partial);
  for (size_t sent = 0; sent < bytes;) {
    const ssize_t now = send(translator.socket, request + sent, bytes - sent, MSG_NOSIGNAL);
    if (now < 0 && errno != EINTR) return false;
    if (now > 0) sent += now;
  }
  ssize_t received;
  do received = recv(translator.socket, answer, sizeof answer, MSG_WAITALL);
  while (received < 0 && errno == EINTR);
  return received == sizeof answer && answer[0] == '0';
}

// A translator that does not answer 0 is stopped; the next request starts another. A forked process has
// inherited its parent's socket, which it closes to start a translator of its own.
static bool run_translator(const char *python, const paths_t *p) {
  pthread_mutex_lock(&lock_of_translator);
  if (translator.owner != getpid()) stop_translator();
  const bool is_translated = (translator.socket >= 0 || start_translator(python)) && ask_translator(p);
  if (!is_translated) stop_translator();
  pthread_mutex_unlock(&lock_of_translator);
  return is_translated;
}

static bool translate(const void *code_object, size_t bytes, const paths_t *p, char *error,
                      size_t error_size) {
  const char *python = getenv("EMULATED_GPU_PYTHON");
  if (!write_file(p->code_object, code_object, bytes)) {
    snprintf(error, error_size, "cannot write %s: %s", p->code_object, strerror(errno));
    return false;
  }
  if (!run_translator(python ? python : "python3", p) || rename(p->partial, p->program)) {
    snprintf(error, error_size, "the translator failed on %s", p->code_object);
    return false;
  }
  unlink(p->code_object);  // after a failure, it is kept for inspection
  return true;
}

bool translation_of(const void *code_object, size_t bytes, char *path, size_t path_size, char *error,
                    size_t error_size) {
  const char *cache = getenv("EMULATED_GPU_PROGRAMS");
  uint64_t hash[2];
  paths_t p;
  hash_of(code_object, bytes, hash);
  if (!cache || !fill_paths(cache, hash, &p)) {
    snprintf(error, error_size, "EMULATED_GPU_PROGRAMS names no folder for programs");
    return false;
  }
  mkdir(cache, 0777);
  const int lock = open(p.lock, O_CREAT | O_RDWR | O_CLOEXEC, 0666);
  if (lock < 0 || flock(lock, LOCK_EX)) {
    snprintf(error, error_size, "cannot lock %s: %s", p.lock, strerror(errno));
    if (lock >= 0) close(lock);
    return false;
  }
  const bool is_there = !access(p.program, R_OK) || translate(code_object, bytes, &p, error, error_size);
  close(lock);
  snprintf(path, path_size, "%s", p.program);
  return is_there;
}
