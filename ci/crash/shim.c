/* Preloaded into a program: counts its calls that change files, and at one of them kills the program, or fails as a full disk does.
 *
 *   CRASH_AT=N       the call, counted from 1
 *   CRASH_HOW=kill   SIGKILL before the call; `full`: the call fails with ENOSPC, and so do all after it that need room
 *   CRASH_SLOW=US    every call takes so many microseconds more
 *   CRASH_COUNT=FILE gets the number of calls when the program ends
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static atomic_long calls;
static long at, slow;
static int full;

__attribute__((constructor)) static void begin(void) {
    const char *text = getenv("CRASH_AT");
    at = text ? atol(text) : 0;
    text = getenv("CRASH_SLOW");
    slow = text ? atol(text) : 0;
    text = getenv("CRASH_HOW");
    full = text && strcmp(text, "full") == 0;
}

__attribute__((destructor)) static void end(void) {
    const char *file = getenv("CRASH_COUNT");
    if (!file) return;
    at = 0; /* Not this. */
    FILE *out = fopen(file, "w");
    if (out) {
        fprintf(out, "%ld\n", atomic_load(&calls));
        fclose(out);
    }
}

/* Whether the call is to fail. */
static int change(int needs_room) {
    long call = atomic_fetch_add(&calls, 1) + 1;
    if (slow) usleep(slow);
    if (!at || call < at) return 0;
    if (!full) {
        if (call == at) kill(getpid(), SIGKILL);
        return 0;
    }
    if (!needs_room && call != at) return 0;
    errno = ENOSPC;
    return 1;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
/* What is printed is no file. */
#define PRINTS(fd) ((fd) == 1 || (fd) == 2)

ssize_t write(int fd, const void *data, size_t n) {
    return !PRINTS(fd) && change(1) ? -1 : REAL(write)(fd, data, n);
}
ssize_t pwrite64(int fd, const void *data, size_t n, off64_t offset) { return change(1) ? -1 : REAL(pwrite64)(fd, data, n, offset); }
ssize_t writev(int fd, const struct iovec *parts, int n) {
    return !PRINTS(fd) && change(1) ? -1 : REAL(writev)(fd, parts, n);
}
ssize_t copy_file_range(int from, off64_t *a, int to, off64_t *b, size_t n, unsigned flags) {
    return change(1) ? -1 : REAL(copy_file_range)(from, a, to, b, n, flags);
}
int fsync(int fd) { return change(1) ? -1 : REAL(fsync)(fd); }
int fdatasync(int fd) { return change(1) ? -1 : REAL(fdatasync)(fd); }
int ftruncate64(int fd, off64_t length) { return change(1) ? -1 : REAL(ftruncate64)(fd, length); }
int rename(const char *from, const char *to) { return change(0) ? -1 : REAL(rename)(from, to); }
int unlink(const char *path) { return change(0) ? -1 : REAL(unlink)(path); }
int unlinkat(int fd, const char *path, int flags) { return change(0) ? -1 : REAL(unlinkat)(fd, path, flags); }
int rmdir(const char *path) { return change(0) ? -1 : REAL(rmdir)(path); }
int mkdir(const char *path, mode_t mode) { return change(1) ? -1 : REAL(mkdir)(path, mode); }
int link(const char *from, const char *to) { return change(1) ? -1 : REAL(link)(from, to); }
int symlink(const char *from, const char *to) { return change(1) ? -1 : REAL(symlink)(from, to); }

int open64(const char *path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    mode_t mode = va_arg(more, mode_t);
    va_end(more);
    return (flags & O_CREAT) && change(1) ? -1 : REAL(open64)(path, flags, mode);
}
