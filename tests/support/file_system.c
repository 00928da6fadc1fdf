// Preloaded into a process, this makes file systems behave like those of other sites.
// CLOUDJOB_TEST_FS lists, with commas, what the files below CLOUDJOB_TEST_FS_ROOT lack:
//   no-locks=ERRNO   every lock fails with this error number
//   local-locks      locks of other processes are invisible, and every lock is granted
//   no-links, no-fsync, no-tmpfile, no-replace
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

static const char *setting(const char *name) {
    const char *all = getenv("CLOUDJOB_TEST_FS");
    const char *found = all ? strstr(all, name) : NULL;
    return found ? found + strlen(name) : NULL;
}

static int is_below(const char *path) {
    const char *root = getenv("CLOUDJOB_TEST_FS_ROOT");
    return root && path && strncmp(path, root, strlen(root)) == 0;
}

static int is_open_below(int descriptor) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return is_below(path);
}

static int fails(int number) {
    errno = number;
    return -1;
}

static int is_lock(int command) {
    return command == F_SETLK || command == F_SETLKW || command == F_GETLK
        || command == F_OFD_SETLK || command == F_OFD_SETLKW || command == F_OFD_GETLK;
}

#define FCNTL(name)                                                                   \
    int name(int descriptor, int command, ...) {                                      \
        static int (*real)(int, int, ...);                                            \
        va_list rest;                                                                 \
        va_start(rest, command);                                                      \
        void *argument = va_arg(rest, void *);                                        \
        va_end(rest);                                                                 \
        if (!real) real = dlsym(RTLD_NEXT, #name);                                    \
        if (is_lock(command) && is_open_below(descriptor)) {                          \
            const char *number = setting("no-locks=");                                \
            if (number) return fails(atoi(number));                                   \
            if (setting("local-locks")) {                                             \
                if (command == F_OFD_GETLK || command == F_GETLK)                     \
                    ((struct flock *)argument)->l_type = F_UNLCK;                     \
                return 0;                                                             \
            }                                                                         \
        }                                                                             \
        return real(descriptor, command, argument);                                   \
    }
FCNTL(fcntl)
FCNTL(fcntl64)

int flock(int descriptor, int operation) {
    static int (*real)(int, int);
    if (!real) real = dlsym(RTLD_NEXT, "flock");
    const char *number = setting("no-locks=");
    if (number && is_open_below(descriptor)) return fails(atoi(number));
    if (setting("local-locks") && is_open_below(descriptor)) return 0;
    return real(descriptor, operation);
}

int link(const char *from, const char *to) {
    static int (*real)(const char *, const char *);
    if (!real) real = dlsym(RTLD_NEXT, "link");
    return setting("no-links") && is_below(to) ? fails(EPERM) : real(from, to);
}

int linkat(int from_folder, const char *from, int to_folder, const char *to, int flags) {
    static int (*real)(int, const char *, int, const char *, int);
    if (!real) real = dlsym(RTLD_NEXT, "linkat");
    int is_refused = setting("no-links") && is_below(to);
    return is_refused ? fails(EPERM) : real(from_folder, from, to_folder, to, flags);
}

int rename(const char *from, const char *to) {
    static int (*real)(const char *, const char *);
    struct stat old, new;
    if (!real) real = dlsym(RTLD_NEXT, "rename");
    int is_refused = setting("no-replace") && is_below(to) && lstat(to, &old) == 0;
    // Linux does not ask the file system to replace a file by a hard link to it.
    if (is_refused && lstat(from, &new) == 0 && old.st_ino == new.st_ino) return 0;
    return is_refused ? fails(EEXIST) : real(from, to);
}

int fsync(int descriptor) {
    static int (*real)(int);
    if (!real) real = dlsym(RTLD_NEXT, "fsync");
    return setting("no-fsync") && is_open_below(descriptor) ? fails(EINVAL) : real(descriptor);
}

int fdatasync(int descriptor) {
    static int (*real)(int);
    if (!real) real = dlsym(RTLD_NEXT, "fdatasync");
    return setting("no-fsync") && is_open_below(descriptor) ? fails(EINVAL) : real(descriptor);
}

#define OPEN(name)                                                                    \
    int name(const char *path, int flags, ...) {                                      \
        static int (*real)(const char *, int, ...);                                   \
        va_list rest;                                                                 \
        va_start(rest, flags);                                                        \
        int mode = va_arg(rest, int);                                                 \
        va_end(rest);                                                                 \
        if (!real) real = dlsym(RTLD_NEXT, #name);                                    \
        int is_refused = (flags & O_TMPFILE) == O_TMPFILE && setting("no-tmpfile");   \
        return is_refused && is_below(path) ? fails(EOPNOTSUPP) : real(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)
