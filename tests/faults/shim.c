/* Counts, writes down, fails and kills at the calls by which a process changes files below one folder.
 *
 * Loaded with LD_PRELOAD by tests/support/faults.py, which also says what the variables mean. Linux with glibc on 64 bits.
 *
 * No table of descriptors is kept: whenever one is used, the kernel is asked for its path and its flags. So it doesn't
 * matter when, how and under which relative name it was opened, or how often it was duplicated.
 *
 * Everything is carried out with raw system calls, so nothing here meets itself. One lock is held from the number of an
 * operation to its record: records are in the order in which things happened, and an operation's record is in the page
 * cache before the next one begins.
 */

#undef _FORTIFY_SOURCE
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

_Static_assert(sizeof(long) == 8, "offsets are passed to system calls as one word");

#define EXPORT __attribute__((visibility("default")))

enum kind { CREATE = 1, WRITE, TRUNCATE, ALLOCATE, FSYNC, FDATASYNC, MSYNC, RENAME, UNLINK, MKDIR, RMDIR };

enum { DURABLE = 1, FOLDER = 2 };

struct operation {
    enum kind kind;
    int flags;
    int grows;            /* takes room on the disk */
    const char *path;     /* relative to the root */
    const char *target;   /* of a rename */
    int64_t offset;       /* of a write; the new size of a truncation or allocation */
    const void *data;
    size_t length;
    uint64_t inode;
    uint32_t mode;
    long number;
    int shortened;        /* only the first half of a write is carried out */
};

/* As faults.py reads it: "<QqqqQIIHHBB", then path, target and data. */
struct __attribute__((packed)) record {
    uint64_t number;
    int64_t offset, result, length;
    uint64_t inode;
    uint32_t mode, error;
    uint16_t path_length, target_length;
    uint8_t kind, flags;
};

static char root[PATH_MAX];
static size_t root_length;
static int journal = -1;
static long kill_at, fail_at, fail_count = 1, count;
static int fail_errno, torn;
static volatile int armed;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static long number_of(const char *name, long otherwise)
{
    const char *value = getenv(name);
    return value && *value ? atol(value) : otherwise;
}

static void hold(void) { pthread_mutex_lock(&lock); }
static void let_go(void) { pthread_mutex_unlock(&lock); }

/* A forked child is another process, with operations that nobody has asked about. */
static void let_go_in_child(void)
{
    pthread_mutex_unlock(&lock);
    armed = 0;
}

/* Count from here on, from 1, below this folder. Returns 0, or -1 if there is no such folder. */
EXPORT int kvfault_begin(const char *folder, const char *log, long kill_number, long fail_number, long n_failing, int error,
                         int half, int at_once)
{
    static int is_first = 1;
    armed = 0;
    if (!realpath(folder, root))
        return -1;
    root_length = strlen(root);
    kill_at = kill_number;
    fail_at = fail_number;
    fail_count = n_failing;
    fail_errno = error;
    torn = half;
    count = 0;
    if (log && *log) {
        int fd = (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        /* Out of the way of those who count on the lowest numbers. */
        journal = fd < 0 ? fd : fcntl(fd, F_DUPFD_CLOEXEC, 500);
        syscall(SYS_close, fd);
        if (journal < 0) {
            fprintf(stderr, "kvfault: %s can't be written\n", log);
            abort();
        }
    }
    if (is_first)
        pthread_atfork(hold, let_go, let_go_in_child);
    is_first = 0;
    armed = at_once;
    return 0;
}

__attribute__((constructor)) static void begin(void)
{
    const char *folder = getenv("KVFAULT_ROOT");
    if (folder)
        kvfault_begin(folder, getenv("KVFAULT_LOG"), number_of("KVFAULT_KILL_AT", 0), number_of("KVFAULT_FAIL_AT", 0),
                      number_of("KVFAULT_FAIL_COUNT", 1), (int)number_of("KVFAULT_ERRNO", 0),
                      (int)number_of("KVFAULT_TORN", 0), (int)number_of("KVFAULT_ARMED", 1));
    /* Programs that this one starts are left alone. */
    static const char *const ours[] = {
        "LD_PRELOAD", "KVFAULT_ROOT", "KVFAULT_LOG", "KVFAULT_KILL_AT", "KVFAULT_TORN",
        "KVFAULT_FAIL_AT", "KVFAULT_FAIL_COUNT", "KVFAULT_ERRNO", "KVFAULT_ARMED",
    };
    for (size_t i = 0; i < sizeof ours / sizeof *ours; i++)
        unsetenv(ours[i]);
}

EXPORT void kvfault_arm(void) { armed = root_length > 0; }

EXPORT void kvfault_rest(void) { armed = 0; }

EXPORT long kvfault_count(void)
{
    hold();
    long now = count;
    let_go();
    return now;
}

/* -- paths -------------------------------------------------------------------------------------------------------- */

/* The part below the root, "." for the root itself, NULL for anything else or a file that is never looked at. */
static const char *below(char *path)
{
    if (strncmp(path, root, root_length) != 0 || (path[root_length] != '/' && path[root_length] != '\0'))
        return NULL;
    if (!path[root_length])
        return ".";
    const char *name = strrchr(path, '/') + 1;
    size_t length = strlen(name);
    /* Shared memory and reader tables: they say what running processes do, and nothing after the last one has ended. */
    if (strcmp(name, "lock.mdb") == 0 || (length > 4 && strcmp(name + length - 4, "-shm") == 0))
        return NULL;
    return path + root_length + 1;
}

static int path_of_descriptor(int fd, char *path)
{
    char link[40];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    if (length < 0 || path[0] != '/')
        return 0;
    path[length] = '\0';
    return 1;
}

/* Where a name leads whose last part needn't exist, and isn't followed. */
static const char *named(int folder, const char *name, char *path)
{
    char full[2 * PATH_MAX + 2], parent[PATH_MAX];
    if (!armed || !name || !*name || strlen(name) >= PATH_MAX)
        return NULL;
    if (*name == '/') {
        strcpy(full, name);
    } else {
        if (folder == AT_FDCWD ? !getcwd(full, PATH_MAX) : !path_of_descriptor(folder, full))
            return NULL;
        strcat(strcat(full, "/"), name);
    }
    size_t length = strlen(full);
    while (length > 1 && full[length - 1] == '/')
        full[--length] = '\0';
    char *last = strrchr(full, '/');
    *last++ = '\0';
    if (!*last || strcmp(last, ".") == 0 || strcmp(last, "..") == 0)
        return NULL;
    if (!realpath(*full ? full : "/", parent) || strlen(parent) + strlen(last) + 2 > PATH_MAX)
        return NULL;
    strcpy(path, strcmp(parent, "/") == 0 ? "" : parent);
    strcat(strcat(path, "/"), last);
    return below(path);
}

/* The file behind a descriptor, if it is one that counts. */
static const char *opened(int fd, char *path, struct stat *found)
{
    if (!armed || !path_of_descriptor(fd, path) || fstat(fd, found) != 0)
        return NULL;
    if (!S_ISREG(found->st_mode) && !S_ISDIR(found->st_mode))
        return NULL;
    if (found->st_nlink == 0) {
        char *mark = strrchr(path, ' ');
        if (mark && strcmp(mark, " (deleted)") == 0)
            *mark = '\0';
    }
    return below(path);
}

/* -- operations --------------------------------------------------------------------------------------------------- */

static void record(const struct operation *op, long result, int error)
{
    if (journal < 0)
        return;
    size_t length = op->kind == WRITE && result > 0 ? (size_t)result : 0;
    const char *target = op->target ? op->target : "";
    struct record head = {
        .number = (uint64_t)op->number, .offset = op->offset, .result = result, .length = (int64_t)length,
        .inode = op->inode, .mode = op->mode, .error = (uint32_t)error, .path_length = (uint16_t)strlen(op->path),
        .target_length = (uint16_t)strlen(target), .kind = (uint8_t)op->kind, .flags = (uint8_t)op->flags,
    };
    struct iovec parts[] = {
        {&head, sizeof head},
        {(void *)op->path, head.path_length},
        {(void *)target, head.target_length},
        {(void *)op->data, length},
    };
    if (syscall(SYS_writev, journal, parts, 4) != (long)(sizeof head + head.path_length + head.target_length + length)) {
        static const char message[] = "kvfault: the journal can't be written\n";
        syscall(SYS_write, 2, message, sizeof message - 1);
        abort();
    }
}

static int can_fail(const struct operation *op)
{
    return fail_errno == EIO || op->grows;
}

/* Takes a number. Returns 0 if the operation is to be carried out, which `end` must follow, or -1 if it has failed. */
static int start(struct operation *op)
{
    hold();
    op->number = ++count;
    op->shortened = 0;
    if (op->number == kill_at) {
        if (torn && op->kind == WRITE)
            op->shortened = 1;
        else
            for (;;)
                kill(getpid(), SIGKILL);
    }
    if (fail_at && op->number >= fail_at && (fail_count == 0 || op->number < fail_at + fail_count) && can_fail(op)) {
        if (torn && op->kind == WRITE && op->number == fail_at && op->length > 1) {
            op->shortened = 1;
            return 0;
        }
        record(op, -1, fail_errno);
        let_go();
        errno = fail_errno;
        return -1;
    }
    return 0;
}

static long end(struct operation *op, long result)
{
    int error = result < 0 ? errno : 0;
    record(op, result, error);
    if (op->number == kill_at)
        for (;;)
            kill(getpid(), SIGKILL);
    let_go();
    errno = error ? error : errno;
    return result;
}

/* Better a loud end than an image from which something is missing. */
static void unknown(const char *what)
{
    fprintf(stderr, "kvfault: %s below the root isn't modelled\n", what);
    abort();
}

/* -- files: open, write, resize, sync ------------------------------------------------------------------------------- */

static int open_(int folder, const char *name, int flags, mode_t mode)
{
    char path[PATH_MAX];
    const char *below_root = NULL;
    struct stat found;
    int unnamed = (flags & O_TMPFILE) == O_TMPFILE;
    if (unnamed && armed && folder == AT_FDCWD && realpath(name, path) && below(path)) {
        errno = EOPNOTSUPP;
        return -1;
    }
    if (!unnamed && flags & (O_CREAT | O_TRUNC))
        below_root = named(folder, name, path);
    if (!below_root)
        return (int)syscall(SYS_openat, folder, name, flags, mode);
    struct operation op = {.path = below_root};
    if (fstatat(folder, name, &found, 0) != 0) {
        if (!(flags & O_CREAT))
            return (int)syscall(SYS_openat, folder, name, flags, mode);
        op.kind = CREATE;
        op.grows = 1;
    } else if (flags & O_TRUNC && !(flags & O_EXCL && flags & O_CREAT) && S_ISREG(found.st_mode) && found.st_size) {
        op.kind = TRUNCATE;
        op.inode = found.st_ino;
    } else {
        return (int)syscall(SYS_openat, folder, name, flags, mode);
    }
    if (start(&op) != 0)
        return -1;
    long fd = syscall(SYS_openat, folder, name, flags, mode);
    if (fd >= 0 && fstat((int)fd, &found) == 0) {
        op.inode = found.st_ino;
        op.mode = found.st_mode & 07777;
    }
    return (int)end(&op, fd);
}

static mode_t mode_of(int flags, va_list more)
{
    return flags & (O_CREAT | (O_TMPFILE & ~O_DIRECTORY)) ? va_arg(more, mode_t) : 0;
}

#define OPEN(name) \
    EXPORT int name(const char *path, int flags, ...) \
    { \
        va_list more; \
        va_start(more, flags); \
        mode_t mode = mode_of(flags, more); \
        va_end(more); \
        return open_(AT_FDCWD, path, flags, mode); \
    }
#define OPENAT(name) \
    EXPORT int name(int folder, const char *path, int flags, ...) \
    { \
        va_list more; \
        va_start(more, flags); \
        mode_t mode = mode_of(flags, more); \
        va_end(more); \
        return open_(folder, path, flags, mode); \
    }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
EXPORT int __open_2(const char *path, int flags) { return open_(AT_FDCWD, path, flags, 0); }
EXPORT int __open64_2(const char *path, int flags) { return open_(AT_FDCWD, path, flags, 0); }
EXPORT int __openat_2(int folder, const char *path, int flags) { return open_(folder, path, flags, 0); }
EXPORT int __openat64_2(int folder, const char *path, int flags) { return open_(folder, path, flags, 0); }
EXPORT int creat(const char *path, mode_t mode) { return open_(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }
EXPORT int creat64(const char *path, mode_t mode) { return open_(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }

static long raw_write(int fd, const void *data, size_t length, int64_t at)
{
    return at < 0 ? syscall(SYS_write, fd, data, length) : syscall(SYS_pwrite64, fd, data, length, at);
}

/* `at` is negative for a write where the descriptor stands. */
static ssize_t write_(int fd, const void *data, size_t length, int64_t at)
{
    char path[PATH_MAX];
    struct stat found;
    const char *below_root = length ? opened(fd, path, &found) : NULL;
    if (!below_root)
        return raw_write(fd, data, length, at);
    int flags = fcntl(fd, F_GETFL);
    struct operation op = {
        .kind = WRITE, .grows = 1, .path = below_root, .inode = found.st_ino, .data = data, .length = length,
        .flags = flags & O_DSYNC ? DURABLE : 0, .offset = at < 0 ? lseek(fd, 0, SEEK_CUR) : at,
    };
    if (start(&op) != 0)
        return -1;
    /* Asked again under the lock: another thread may have made it longer. */
    if (flags & O_APPEND && fstat(fd, &found) == 0)
        op.offset = found.st_size;
    return end(&op, raw_write(fd, data, op.shortened ? length / 2 : length, at));
}

static ssize_t write_parts(int fd, const struct iovec *parts, int n_parts, int64_t at)
{
    char path[PATH_MAX];
    struct stat found;
    if (n_parts < 0 || !opened(fd, path, &found))
        return at < 0 ? syscall(SYS_writev, fd, parts, n_parts) : syscall(SYS_pwritev, fd, parts, n_parts, at, 0L);
    size_t length = 0, done = 0;
    for (int i = 0; i < n_parts; i++)
        length += parts[i].iov_len;
    char *data = malloc(length + 1);
    if (!data)
        abort();
    for (int i = 0; i < n_parts; done += parts[i++].iov_len)
        memcpy(data + done, parts[i].iov_base, parts[i].iov_len);
    ssize_t result = write_(fd, data, length, at);
    int error = errno;
    free(data);
    errno = error;
    return result;
}

EXPORT ssize_t write(int fd, const void *data, size_t length) { return write_(fd, data, length, -1); }

static ssize_t invalid(void)
{
    errno = EINVAL;
    return -1;
}

#define PWRITE(name) \
    EXPORT ssize_t name(int fd, const void *data, size_t length, off_t at) \
    { \
        return at < 0 ? invalid() : write_(fd, data, length, at); \
    }
#define PWRITEV(name) \
    EXPORT ssize_t name(int fd, const struct iovec *parts, int n_parts, off_t at) \
    { \
        return at < 0 ? invalid() : write_parts(fd, parts, n_parts, at); \
    }
#define PWRITEV2(name) \
    EXPORT ssize_t name(int fd, const struct iovec *parts, int n_parts, off_t at, int flags) \
    { \
        char path[PATH_MAX]; \
        struct stat found; \
        if (flags && opened(fd, path, &found)) \
            unknown("a write with flags"); \
        return flags ? syscall(SYS_pwritev2, fd, parts, n_parts, at, 0L, flags) : write_parts(fd, parts, n_parts, at); \
    }
PWRITE(pwrite)
PWRITE(pwrite64)
EXPORT ssize_t writev(int fd, const struct iovec *parts, int n_parts) { return write_parts(fd, parts, n_parts, -1); }
PWRITEV(pwritev)
PWRITEV(pwritev64)
PWRITEV2(pwritev2)
PWRITEV2(pwritev64v2)

/* Copies within the kernel, whose bytes wouldn't be seen. Who uses them knows how to do without. */
static ssize_t copy_(int out, long number, long a, long b, long c, long d, long e, long f)
{
    char path[PATH_MAX];
    struct stat found;
    return opened(out, path, &found) ? invalid() : syscall(number, a, b, c, d, e, f);
}

EXPORT ssize_t sendfile(int out, int in, off_t *at, size_t length)
{
    return copy_(out, SYS_sendfile, out, in, (long)at, (long)length, 0, 0);
}

EXPORT ssize_t sendfile64(int out, int in, off_t *at, size_t length)
{
    return copy_(out, SYS_sendfile, out, in, (long)at, (long)length, 0, 0);
}

EXPORT ssize_t copy_file_range(int in, off_t *from, int out, off_t *to, size_t length, unsigned flags)
{
    return copy_(out, SYS_copy_file_range, in, (long)from, out, (long)to, (long)length, flags);
}

EXPORT ssize_t splice(int in, off_t *from, int out, off_t *to, size_t length, unsigned flags)
{
    return copy_(out, SYS_splice, in, (long)from, out, (long)to, (long)length, flags);
}

static int resize(int fd, off_t size)
{
    char path[PATH_MAX];
    struct stat found;
    const char *below_root = opened(fd, path, &found);
    if (!below_root)
        return (int)syscall(SYS_ftruncate, fd, size);
    struct operation op = {
        .kind = TRUNCATE, .grows = size > found.st_size, .path = below_root, .inode = found.st_ino, .offset = size,
    };
    return start(&op) != 0 ? -1 : (int)end(&op, syscall(SYS_ftruncate, fd, size));
}

static int resize_by_name(const char *name, off_t size)
{
    char path[PATH_MAX];
    struct stat found;
    const char *below_root = named(AT_FDCWD, name, path);
    if (!below_root || stat(name, &found) != 0)
        return (int)syscall(SYS_truncate, name, size);
    struct operation op = {
        .kind = TRUNCATE, .grows = size > found.st_size, .path = below_root, .inode = found.st_ino, .offset = size,
    };
    return start(&op) != 0 ? -1 : (int)end(&op, syscall(SYS_truncate, name, size));
}

EXPORT int ftruncate(int fd, off_t size) { return resize(fd, size); }
EXPORT int ftruncate64(int fd, off_t size) { return resize(fd, size); }
EXPORT int truncate(const char *name, off_t size) { return resize_by_name(name, size); }
EXPORT int truncate64(const char *name, off_t size) { return resize_by_name(name, size); }

static int allocate(int fd, int mode, off_t at, off_t length)
{
    char path[PATH_MAX];
    struct stat found;
    const char *below_root = opened(fd, path, &found);
    if (!below_root)
        return (int)syscall(SYS_fallocate, fd, mode, at, length);
    if (mode & ~FALLOC_FL_KEEP_SIZE)
        unknown("an allocation that changes what is there");
    int grows = !(mode & FALLOC_FL_KEEP_SIZE) && at + length > found.st_size;
    struct operation op = {
        .kind = ALLOCATE, .grows = 1, .path = below_root, .inode = found.st_ino,
        .offset = grows ? at + length : found.st_size,
    };
    return start(&op) != 0 ? -1 : (int)end(&op, syscall(SYS_fallocate, fd, mode, at, length));
}

EXPORT int fallocate(int fd, int mode, off_t at, off_t length) { return allocate(fd, mode, at, length); }
EXPORT int fallocate64(int fd, int mode, off_t at, off_t length) { return allocate(fd, mode, at, length); }
EXPORT int posix_fallocate(int fd, off_t at, off_t length) { return allocate(fd, 0, at, length) == 0 ? 0 : errno; }
EXPORT int posix_fallocate64(int fd, off_t at, off_t length) { return allocate(fd, 0, at, length) == 0 ? 0 : errno; }

static int sync_(int fd, enum kind kind)
{
    long call = kind == FSYNC ? SYS_fsync : SYS_fdatasync;
    char path[PATH_MAX];
    struct stat found;
    const char *below_root = opened(fd, path, &found);
    if (!below_root)
        return (int)syscall(call, fd);
    struct operation op = {
        .kind = kind, .path = below_root, .inode = found.st_ino, .flags = S_ISDIR(found.st_mode) ? FOLDER : 0,
    };
    /* Not carried out: who is killed doesn't need it, power is cut on paper only, and it is most of a test's time. */
    return start(&op) != 0 ? -1 : (int)end(&op, 0);
}

EXPORT int fsync(int fd) { return sync_(fd, FSYNC); }
EXPORT int fdatasync(int fd) { return sync_(fd, FDATASYNC); }

EXPORT int msync(void *address, size_t length, int flags)
{
    char line[PATH_MAX + 200], *path = NULL;
    FILE *maps = armed ? fopen("/proc/self/maps", "re") : NULL;
    uint64_t inode = 0;
    while (maps && !path && fgets(line, sizeof line, maps)) {
        unsigned long first, past;
        int at = 0;
        line[strcspn(line, "\n")] = '\0';
        if (sscanf(line, "%lx-%lx %*s %*s %*s %lu %n", &first, &past, &inode, &at) == 3 && at
            && first <= (unsigned long)address && (unsigned long)address < past)
            path = line + at;
    }
    if (maps)
        fclose(maps);
    const char *below_root = path ? below(path) : NULL;
    if (!below_root)
        return (int)syscall(SYS_msync, address, length, flags);
    struct operation op = {.kind = MSYNC, .path = below_root, .inode = inode};
    return start(&op) != 0 ? -1 : (int)end(&op, syscall(SYS_msync, address, length, flags));
}

/* -- names ---------------------------------------------------------------------------------------------------------- */

static int remove_(int folder, const char *name, int flags)
{
    char path[PATH_MAX];
    struct stat found;
    const char *below_root = named(folder, name, path);
    if (!below_root || fstatat(folder, name, &found, AT_SYMLINK_NOFOLLOW) != 0)
        return (int)syscall(SYS_unlinkat, folder, name, flags);
    struct operation op = {
        .kind = flags & AT_REMOVEDIR ? RMDIR : UNLINK, .path = below_root, .inode = found.st_ino,
    };
    return start(&op) != 0 ? -1 : (int)end(&op, syscall(SYS_unlinkat, folder, name, flags));
}

EXPORT int unlink(const char *name) { return remove_(AT_FDCWD, name, 0); }
EXPORT int unlinkat(int folder, const char *name, int flags) { return remove_(folder, name, flags); }
EXPORT int rmdir(const char *name) { return remove_(AT_FDCWD, name, AT_REMOVEDIR); }

static int mkdir_(int folder, const char *name, mode_t mode)
{
    char path[PATH_MAX];
    struct stat found;
    const char *below_root = named(folder, name, path);
    if (!below_root || fstatat(folder, name, &found, AT_SYMLINK_NOFOLLOW) == 0)
        return (int)syscall(SYS_mkdirat, folder, name, mode);
    struct operation op = {.kind = MKDIR, .grows = 1, .path = below_root};
    if (start(&op) != 0)
        return -1;
    long result = syscall(SYS_mkdirat, folder, name, mode);
    if (result == 0 && fstatat(folder, name, &found, 0) == 0) {
        op.inode = found.st_ino;
        op.mode = found.st_mode & 07777;
    }
    return (int)end(&op, result);
}

EXPORT int mkdir(const char *name, mode_t mode) { return mkdir_(AT_FDCWD, name, mode); }
EXPORT int mkdirat(int folder, const char *name, mode_t mode) { return mkdir_(folder, name, mode); }

static int rename_(int from, const char *name, int to, const char *target, unsigned flags)
{
    char path[PATH_MAX], new_path[PATH_MAX];
    struct stat found;
    const char *old = named(from, name, path), *new = named(to, target, new_path);
    if ((!old && !new) || fstatat(from, name, &found, AT_SYMLINK_NOFOLLOW) != 0)
        return (int)syscall(SYS_renameat2, from, name, to, target, flags);
    if (!old || !new || flags)
        unknown("a rename across the root, or with flags,");
    struct operation op = {.kind = RENAME, .grows = 1, .path = old, .target = new, .inode = found.st_ino};
    return start(&op) != 0 ? -1 : (int)end(&op, syscall(SYS_renameat2, from, name, to, target, flags));
}

EXPORT int rename(const char *name, const char *target) { return rename_(AT_FDCWD, name, AT_FDCWD, target, 0); }

EXPORT int renameat(int from, const char *name, int to, const char *target)
{
    return rename_(from, name, to, target, 0);
}

EXPORT int renameat2(int from, const char *name, int to, const char *target, unsigned flags)
{
    return rename_(from, name, to, target, flags);
}

EXPORT int linkat(int from, const char *name, int to, const char *target, int flags)
{
    char path[PATH_MAX];
    if (named(to, target, path))
        unknown("a hard link");
    return (int)syscall(SYS_linkat, from, name, to, target, flags);
}

EXPORT int link(const char *name, const char *target) { return linkat(AT_FDCWD, name, AT_FDCWD, target, 0); }

EXPORT int symlinkat(const char *leads_to, int folder, const char *name)
{
    char path[PATH_MAX];
    if (named(folder, name, path))
        unknown("a symbolic link");
    return (int)syscall(SYS_symlinkat, leads_to, folder, name);
}

EXPORT int symlink(const char *leads_to, const char *name) { return symlinkat(leads_to, AT_FDCWD, name); }
