// Makes writes below some folders fail: LD_PRELOAD=disk_faults.so DISK_FAULTS_UNDER=/a:/b DISK_FAULTS_MODE=/file
//
// The first byte of the file says how: '0' not at all, 'N' the disk is full, 'E' nothing can be changed, 'T' a write
// stores half of what it was given, and the next one finds the disk full.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <unistd.h>

static const volatile char *mode = "0";
static __thread int is_torn;

#define REAL(name) __typeof__(&name) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("DISK_FAULTS_MODE");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *mapped = mmap(NULL, 1, PROT_READ, MAP_SHARED, fd, 0);
    if (mapped != MAP_FAILED) mode = mapped;
    close(fd);
}

static int is_below(const char *path) {
    const char *folders = getenv("DISK_FAULTS_UNDER");
    if (!folders || !path) return 0;
    for (const char *at = folders; *at;) {
        size_t length = strcspn(at, ":");
        if (length && !strncmp(path, at, length)) return 1;
        at += length + (at[length] == ':');
    }
    return 0;
}

static int is_open_below(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    return is_below(path);
}

// Returns the error of a change, 0 for none. `takes_room`: whether a full disk refuses it.
static int refusal(int takes_room) {
    if (*mode == 'E') return EIO;
    return (*mode == 'N' || *mode == 'T') && takes_room ? ENOSPC : 0;
}

static int refused(int is_ours, int takes_room) {
    int error = *mode != '0' && is_ours ? refusal(takes_room) : 0;
    if (error) errno = error;
    return error;
}

// Returns how much of a write is done; 0: it is refused, with errno.
static size_t allowed(int fd, size_t count) {
    if (*mode == '0' || !is_open_below(fd)) return count;
    if (*mode == 'T' && !is_torn && count > 1) {
        is_torn = 1;
        return count / 2;
    }
    is_torn = 0;
    return refused(1, 1) ? 0 : count;
}

ssize_t write(int fd, const void *data, size_t count) {
    REAL(write);
    size_t some = allowed(fd, count);
    return count && !some ? -1 : real(fd, data, some);
}

ssize_t pwrite64(int fd, const void *data, size_t count, off64_t at) {
    REAL(pwrite64);
    size_t some = allowed(fd, count);
    return count && !some ? -1 : real(fd, data, some, at);
}

int fsync(int fd) {
    REAL(fsync);
    return refused(is_open_below(fd), 0) ? -1 : real(fd);
}

int ftruncate64(int fd, off64_t length) {
    REAL(ftruncate64);
    return refused(is_open_below(fd), 0) ? -1 : real(fd, length);
}

int rename(const char *from, const char *to) {
    REAL(rename);
    return refused(is_below(to), 0) ? -1 : real(from, to);
}

int unlink(const char *path) {
    REAL(unlink);
    return refused(is_below(path), 0) ? -1 : real(path);
}

int open64(const char *path, int flags, ...) {
    REAL(open64);
    va_list rest;
    va_start(rest, flags);
    int permissions = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, int) : 0;
    va_end(rest);
    if (flags & O_CREAT && access(path, F_OK) && refused(is_below(path), 1)) return -1;
    return real(path, flags, permissions);
}
