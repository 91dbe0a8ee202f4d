/* Counts the live bytes of allocations in every thread, when preloaded (LD_PRELOAD).

   PyTorch's CPU allocator calls posix_memalign from libc10: these bytes are counted to the byte. Everything else of at
   least LARGE bytes (gloo's buffers, oneDNN's scratch) is counted by itself. A profiler in one thread sees neither what
   gloo's threads allocate nor what they free.

   Build: gcc -shared -fPIC -O2 -o allocations.so allocations.c -ldl -lpthread
   The allocator's bytes now, their peak since reset(), the other bytes now, their peak: allocations(0), (1), (2), (3). */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LARGE 4096
#define SLOTS (1u << 20)

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static struct { uintptr_t at; size_t bytes; int kind; } slots[SLOTS]; /* open addressing; `at` 1 is a removed entry */
static long live[2], peak[2];
static pthread_spinlock_t lock;
static uintptr_t first_of_c10, last_of_c10;

__attribute__((constructor)) static void begin(void) { pthread_spin_init(&lock, 0); }

static unsigned slot_of(uintptr_t at) { return (unsigned)((at >> 4) * 2654435761u) & (SLOTS - 1); }

static void enter(void *pointer, size_t bytes, int kind) {
    if (!pointer) return;
    uintptr_t at = (uintptr_t)pointer;
    pthread_spin_lock(&lock);
    unsigned i = slot_of(at);
    while (slots[i].at > 1) i = (i + 1) & (SLOTS - 1);
    slots[i].at = at, slots[i].bytes = bytes, slots[i].kind = kind;
    if ((live[kind] += bytes) > peak[kind]) peak[kind] = live[kind];
    pthread_spin_unlock(&lock);
}

static void leave(void *pointer) {
    uintptr_t at = (uintptr_t)pointer;
    pthread_spin_lock(&lock);
    for (unsigned i = slot_of(at), tried = 0; slots[i].at && tried < SLOTS; i = (i + 1) & (SLOTS - 1), tried++)
        if (slots[i].at == at) {
            live[slots[i].kind] -= slots[i].bytes;
            slots[i].at = 1;
            break;
        }
    pthread_spin_unlock(&lock);
}

/* Called by the process that is measured, once PyTorch is loaded: the addresses of libc10's code. */
void is_of_allocator(uintptr_t first, uintptr_t last) { first_of_c10 = first, last_of_c10 = last; }
void reset(void) {
    pthread_spin_lock(&lock);
    peak[0] = live[0], peak[1] = live[1];
    pthread_spin_unlock(&lock);
}
/* The sizes of the allocator's live blocks, at most `count` of them; returns how many there are. */
long blocks(long *sizes, long count) {
    long found = 0;
    pthread_spin_lock(&lock);
    for (unsigned i = 0; i < SLOTS; i++)
        if (slots[i].at > 1 && slots[i].kind == 0 && found++ < count) sizes[found - 1] = slots[i].bytes;
    pthread_spin_unlock(&lock);
    return found;
}
long allocations(int which) { return which == 0 ? live[0] : which == 1 ? peak[0] : which == 2 ? live[1] : peak[1]; }

int posix_memalign(void **result, size_t alignment, size_t bytes) {
    uintptr_t caller = (uintptr_t)__builtin_return_address(0);
    int ours = first_of_c10 <= caller && caller < last_of_c10;
    *result = __libc_memalign(alignment, bytes);
    if (!*result) return ENOMEM;
    if (ours || bytes >= LARGE) enter(*result, bytes, !ours);
    return 0;
}
void *malloc(size_t bytes) {
    void *pointer = __libc_malloc(bytes);
    if (bytes >= LARGE) enter(pointer, bytes, 1);
    return pointer;
}
void *calloc(size_t count, size_t size) {
    void *pointer = __libc_calloc(count, size);
    if (count * size >= LARGE) enter(pointer, count * size, 1);
    return pointer;
}
void *realloc(void *old, size_t bytes) {
    if (old) leave(old);
    void *pointer = __libc_realloc(old, bytes);
    if (bytes >= LARGE) enter(pointer, bytes, 1);
    return pointer;
}
void *aligned_alloc(size_t alignment, size_t bytes) {
    void *pointer = __libc_memalign(alignment, bytes);
    if (bytes >= LARGE) enter(pointer, bytes, 1);
    return pointer;
}
void *memalign(size_t alignment, size_t bytes) { return aligned_alloc(alignment, bytes); }
void free(void *pointer) {
    if (!pointer) return;
    leave(pointer);
    __libc_free(pointer);
}
