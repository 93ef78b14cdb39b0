/* Preloaded into a process: calls that change files below one folder are written down and, on demand, fail.
 *
 * A line of the trace is the call, its result (0 or an error number) and one or two paths, separated by tabs. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { SYNC = 1, WRITE = 2, LINK = 4, RENAME = 8, UNLINK = 16, MKDIR = 32, CREATE = 64, SYMLINK = 128 };

static char folder[4096];
static int trace = -1;
static unsigned failing;
static long first, seen;
static int error_number, lasting;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

void disk_watch(const char *path, const char *to) {
    snprintf(folder, sizeof folder, "%s/", path);
    if (trace >= 0) close(trace);
    trace = REAL(open)(to, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0644);
}

/* From the nth call of these kinds on, or only that one, they end with this error. */
void disk_fail(unsigned kinds, long nth, int error, int for_good) {
    failing = kinds; first = nth; error_number = error; lasting = for_good; seen = 0;
}

long disk_seen(void) { return seen; }

static int below(const char *path) {
    size_t size = strlen(folder);
    return size && (strncmp(path, folder, size) == 0 || (strlen(path) == size - 1 && strncmp(path, folder, size - 1) == 0));
}

static void where(int fd, const char *name, char *path) {
    path[0] = 0;
    if (name && (name[0] == '/' || fd == AT_FDCWD)) { snprintf(path, 4096, "%s", name); return; }
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, 4095);
    path[size < 0 ? 0 : size] = 0;
    if (name) { strncat(path, "/", 4095 - strlen(path)); strncat(path, name, 4095 - strlen(path)); }
}

static void note(const char *call, int result, const char *one, const char *two) {
    char line[9000];
    int size = snprintf(line, sizeof line, "%s\t%d\t%s\t%s\n", call, result, one, two);
    ssize_t (*real)(int, const void *, size_t) = REAL(write);
    if (trace >= 0 && real(trace, line, size) < 0) _exit(99);
}

static int fails(unsigned kind, const char *call, const char *one, const char *two) {
    if (!(failing & kind)) return 0;
    seen++;
    if (seen != first && !(lasting && seen > first)) return 0;
    note(call, error_number, one, two);
    errno = error_number;
    return 1;
}

#define PATH(path, fd, name) char path[4096]; where(fd, name, path)

#define ON_FD(kind, call, type, name, params, ...) \
    type name params { \
        PATH(path, fd, NULL); \
        if (!below(path)) return REAL(name)(__VA_ARGS__); \
        if (fails(kind, call, path, "")) return -1; \
        type done = REAL(name)(__VA_ARGS__); \
        note(call, done < 0 ? errno : 0, path, ""); \
        return done; \
    }

ON_FD(SYNC, "fsync", int, fsync, (int fd), fd)
ON_FD(SYNC, "fsync", int, fdatasync, (int fd), fd)
ON_FD(WRITE, "write", ssize_t, write, (int fd, const void *data, size_t size), fd, data, size)
ON_FD(WRITE, "write", ssize_t, writev, (int fd, const struct iovec *parts, int count), fd, parts, count)
ON_FD(WRITE, "write", ssize_t, pwrite, (int fd, const void *data, size_t size, off_t at), fd, data, size, at)
ON_FD(WRITE, "write", ssize_t, pwrite64, (int fd, const void *data, size_t size, off64_t at), fd, data, size, at)

#define ON_PATH(kind, call, name, params, atfd, path_name, ...) \
    int name params { \
        PATH(path, atfd, path_name); \
        if (!below(path)) return REAL(name)(__VA_ARGS__); \
        if (fails(kind, call, path, "")) return -1; \
        int done = REAL(name)(__VA_ARGS__); \
        note(call, done < 0 ? errno : 0, path, ""); \
        return done; \
    }

ON_PATH(UNLINK, "unlink", unlink, (const char *p), AT_FDCWD, p, p)
ON_PATH(UNLINK, "unlink", unlinkat, (int fd, const char *p, int flags), fd, p, fd, p, flags)
ON_PATH(UNLINK, "unlink", rmdir, (const char *p), AT_FDCWD, p, p)
ON_PATH(MKDIR, "mkdir", mkdir, (const char *p, mode_t mode), AT_FDCWD, p, p, mode)
ON_PATH(MKDIR, "mkdir", mkdirat, (int fd, const char *p, mode_t mode), fd, p, fd, p, mode)
ON_PATH(SYMLINK, "symlink", symlink, (const char *to, const char *p), AT_FDCWD, p, to, p)

#define ON_TWO(kind, call, name, params, fd1, p1, fd2, p2, ...) \
    int name params { \
        PATH(one, fd1, p1); PATH(two, fd2, p2); \
        if (!below(two)) return REAL(name)(__VA_ARGS__); \
        if (fails(kind, call, one, two)) return -1; \
        int done = REAL(name)(__VA_ARGS__); \
        note(call, done < 0 ? errno : 0, one, two); \
        return done; \
    }

ON_TWO(LINK, "link", link, (const char *a, const char *b), AT_FDCWD, a, AT_FDCWD, b, a, b)
ON_TWO(LINK, "link", linkat, (int fa, const char *a, int fb, const char *b, int flags), fa, a, fb, b, fa, a, fb, b, flags)
ON_TWO(RENAME, "rename", rename, (const char *a, const char *b), AT_FDCWD, a, AT_FDCWD, b, a, b)
ON_TWO(RENAME, "rename", renameat, (int fa, const char *a, int fb, const char *b), fa, a, fb, b, fa, a, fb, b)

#define ON_OPEN(name, params, atfd, p, ...) \
    int name params { \
        va_list rest; va_start(rest, flags); mode_t mode = (flags & O_CREAT) ? va_arg(rest, mode_t) : 0; va_end(rest); \
        PATH(path, atfd, p); \
        struct stat found; \
        if (!(flags & O_CREAT) || !below(path) || stat(path, &found) == 0) return REAL(name)(__VA_ARGS__, mode); \
        if (fails(CREATE, "create", path, "")) return -1; \
        int done = REAL(name)(__VA_ARGS__, mode); \
        note("create", done < 0 ? errno : 0, path, ""); \
        return done; \
    }

ON_OPEN(open, (const char *p, int flags, ...), AT_FDCWD, p, p, flags)
ON_OPEN(open64, (const char *p, int flags, ...), AT_FDCWD, p, p, flags)
ON_OPEN(openat, (int fd, const char *p, int flags, ...), fd, p, fd, p, flags)
ON_OPEN(openat64, (int fd, const char *p, int flags, ...), fd, p, fd, p, flags)
