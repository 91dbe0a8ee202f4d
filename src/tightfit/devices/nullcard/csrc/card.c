/* The card itself: its figures, its memory, and the work on its streams. */
#define _GNU_SOURCE
#include "card.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define DEVICES 64

/* ---- figures ---- */

static Card the_card;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static size_t number(const char *text, const char *key, size_t otherwise) {
    char wanted[64];
    snprintf(wanted, sizeof wanted, ";%s=", key);
    const char *at = strstr(text, wanted);
    return at ? strtoull(at + strlen(wanted), NULL, 10) : otherwise;
}

/* How many cards CUDA_VISIBLE_DEVICES leaves: those in front of the first entry that names none. All are alike. */
static int visible(int count) {
    const char *wanted = getenv("CUDA_VISIBLE_DEVICES");
    if (!wanted) return count;
    int found = 0;
    for (const char *at = wanted; *at; at += *at == ',') {
        size_t length = strcspn(at, ",");
        char *end;
        long number = strtol(at, &end, 10);
        int by_number = end != at && end == at + length && number >= 0 && number < count;
        if (!by_number && strncmp(at, "GPU-", 4)) break;
        found++;
        at += length;
    }
    return found < count ? found : count;
}

static void read_figures(void) {
    char text[4096];
    const char *given = getenv("TIGHTFIT_NULLCARD");
    snprintf(text, sizeof text, ";%s", given ? given : "");
    Card *c = &the_card;
    const char *name = strstr(text, ";name=");
    snprintf(c->name, sizeof c->name, "%.*s", name ? (int)strcspn(name + 6, ";") : 9, name ? name + 6 : "null card");
    c->memory = number(text, "memory", (size_t)24 << 30);
    c->context = number(text, "context", 0);
    c->count = (int)number(text, "count", 1);
    if (c->count > DEVICES) c->count = DEVICES;
    c->physical = c->count;
    c->count = visible(c->physical);
    c->capability = (int)number(text, "capability", 89);
    c->multiprocessors = (int)number(text, "multiprocessors", 128);
    c->shared_block = (int)number(text, "shared_block", 101376);
    c->shared_multiprocessor = (int)number(text, "shared_multiprocessor", 102400);
    c->threads = (int)number(text, "threads", 1536);
    c->blocks = (int)number(text, "blocks", 24);
    c->cuda = (int)number(text, "cuda", 13000);
    c->cudnn = (int)number(text, "cudnn", 92000);
    c->late = (int)number(text, "late", LATE_NONE);
    c->copies = number(text, "copies", (size_t)-1);
    c->cudnn_workspace = number(text, "cudnn_workspace", 0);
    const char *built = strstr(text, ";built=");
    for (built = built ? built + 7 : NULL; built && *built && *built != ';' && c->built_count < 64; built += strcspn(built, ",;"), built += *built == ',')
        c->built[c->built_count++] = atoi(built);
}

EXPORT const Card *card(void) {
    pthread_once(&once, read_figures);
    return &the_card;
}

EXPORT int card_attribute(int attribute, int device) {
    const Card *c = card();
    switch (attribute) { /* cudaDeviceAttr and CUdevice_attribute have the same numbers */
    case 1: case 2: case 3: return 1024;                 /* threads of a block; its width, its height */
    case 4: return 64;
    case 5: return 2147483647;                           /* a grid's width */
    case 6: case 7: return 65535;
    case 8: return 49152;                                /* shared memory of a block without opting in */
    case 9: return 65536;
    case 10: return 32;                                  /* threads of a warp */
    case 11: return 2147483647;
    case 12: case 82: return 65536;                      /* registers of a block, of a multiprocessor */
    case 13: return 1500000;                             /* kHz */
    case 14: return 512;
    case 16: return c->multiprocessors;
    case 19: case 31: case 41: case 78: case 79: case 80: case 83: return 1; /* mapped host memory, ... managed memory */
    case 33: return 1 + device;                          /* PCI bus */
    case 36: return 5000000;
    case 37: return 384;
    case 38: return 32 << 20;                            /* L2 */
    case 39: return c->threads;
    case 40: return 2;                                   /* copy engines */
    case 75: return c->capability / 10;
    case 76: return c->capability % 10;
    case 81: return c->shared_multiprocessor;
    case 95: case 99: case 102: case 115: return 1;      /* cooperative launch, registered host memory, virtual memory, pools */
    case 97: return c->shared_block;
    case 106: return c->blocks;
    case 111: return 1024;
    case 120: return c->capability >= 90;                /* clusters */
    default: return 0;
    }
}

/* ---- calls that are not modelled ---- */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct { char name[96]; long calls; } unmodelled[512];
static int unmodelled_count;

EXPORT int card_unmodelled(const char *name, int result) {
    pthread_mutex_lock(&lock);
    int at = 0;
    while (at < unmodelled_count && strcmp(unmodelled[at].name, name)) at++;
    if (at == unmodelled_count && at < 512) {
        snprintf(unmodelled[at].name, sizeof unmodelled[at].name, "%s", name);
        unmodelled_count++;
    }
    if (at < 512) unmodelled[at].calls++;
    pthread_mutex_unlock(&lock);
    return result;
}

/* For Python, through ctypes: the i-th name and its calls; 0 behind the last one. */
EXPORT long card_unmodelled_calls(int at, char *name, size_t room) {
    if (at >= unmodelled_count) return 0;
    snprintf(name, room, "%s", unmodelled[at].name);
    return unmodelled[at].calls;
}

static int values;
EXPORT void card_set_values(int computed) { values = computed; } /* for Python, through ctypes */
EXPORT int card_has_values(void) { return values; }

/* ---- memory ---- */

static __thread int current;
static size_t used[DEVICES], most[DEVICES];

EXPORT int card_current(void) { return current; }
EXPORT void card_set_current(int device) { current = device; }

typedef struct { char *base; size_t bytes, mapped; int kind, device; } Range;
static Range *ranges; /* sorted by address */
static size_t range_count, range_room;

static size_t place(const void *address) { /* the first range that begins behind an address */
    size_t low = 0, high = range_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (ranges[middle].base > (const char *)address) high = middle; else low = middle + 1;
    }
    return low;
}
static Range *range_of(const void *address) {
    size_t at = place(address);
    if (!at) return NULL;
    Range *range = ranges + at - 1;
    return (const char *)address < range->base + (range->bytes ? range->bytes : 1) ? range : NULL;
}
static void insert(void *base, size_t bytes, size_t mapped, int kind, int device) {
    if (range_count == range_room) ranges = realloc(ranges, (range_room = range_room ? 2 * range_room : 256) * sizeof *ranges);
    size_t at = place(base);
    memmove(ranges + at + 1, ranges + at, (range_count - at) * sizeof *ranges);
    ranges[at] = (Range){base, bytes, mapped, kind, device};
    range_count++;
}
static int take_out(void *base, int kind, Range *found) {
    pthread_mutex_lock(&lock);
    Range *range = range_of(base);
    int there = range && range->base == (char *)base && (!kind || range->kind == kind);
    if (there) {
        *found = *range;
        size_t at = range - ranges;
        memmove(range, range + 1, (range_count - at - 1) * sizeof *ranges);
        range_count--;
    }
    pthread_mutex_unlock(&lock);
    return there;
}

EXPORT void card_add_range(void *address, size_t bytes, int kind, int device) {
    pthread_mutex_lock(&lock);
    insert(address, bytes, 0, kind, device);
    pthread_mutex_unlock(&lock);
}
EXPORT int card_remove_range(void *address) {
    Range range;
    return take_out(address, UNKNOWN, &range);
}
EXPORT int card_find(const void *address, void **base, size_t *bytes, int *device) {
    pthread_mutex_lock(&lock);
    Range *range = range_of(address);
    int kind = range ? range->kind : UNKNOWN;
    if (range) {
        if (base) *base = range->base;
        if (bytes) *bytes = range->bytes;
        if (device) *device = range->device;
    }
    pthread_mutex_unlock(&lock);
    return kind;
}

EXPORT int card_account(int device, int64_t bytes) {
    const Card *c = card();
    pthread_mutex_lock(&lock);
    int full = bytes > 0 && used[device] + c->context + (size_t)bytes > c->memory;
    if (!full) used[device] += bytes;
    if (used[device] > most[device]) most[device] = used[device];
    pthread_mutex_unlock(&lock);
    return full ? OUT_OF_MEMORY : OK;
}
EXPORT void card_memory(int device, size_t *available, size_t *total) {
    const Card *c = card();
    size_t taken = used[device] + c->context;
    if (total) *total = c->memory;
    if (available) *available = taken < c->memory ? c->memory - taken : 0;
}
/* For Python: bytes of the host's memory that a card's own memory takes: the pages that were written. */
EXPORT size_t card_resident(void) {
    static unsigned char pages[1 << 16];
    size_t sum = 0;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < range_count; i++) {
        if (ranges[i].kind != DEVICE) continue;
        for (size_t at = 0, left; at < ranges[i].mapped; at += sizeof pages * 4096) {
            left = (ranges[i].mapped - at + 4095) / 4096;
            if (left > sizeof pages) left = sizeof pages;
            if (mincore(ranges[i].base + at, left * 4096, pages)) continue;
            for (size_t page = 0; page < left; page++) sum += (pages[page] & 1) * 4096;
        }
    }
    pthread_mutex_unlock(&lock);
    return sum;
}
/* For Python: the most memory that a device had given away at once. */
EXPORT size_t card_most(int device) { return most[device]; }

static char *reserve(size_t bytes, int protection) { /* aligned as a card's memory is */
    char *raw = mmap(NULL, bytes + PAGE_UNIT, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED) return NULL;
    char *base = (char *)(((uintptr_t)raw + PAGE_UNIT - 1) / PAGE_UNIT * PAGE_UNIT);
    if (base > raw) munmap(raw, base - raw);
    munmap(base + bytes, raw + PAGE_UNIT - base);
    madvise(base, bytes, MADV_NOHUGEPAGE); /* a touched byte costs a small page */
    return base;
}
EXPORT void *card_allocate(size_t bytes) {
    size_t mapped = (bytes + PAGE_UNIT - 1) / PAGE_UNIT * PAGE_UNIT;
    int device = current;
    if (card_account(device, mapped)) return NULL;
    char *base = reserve(mapped, PROT_READ | PROT_WRITE);
    if (!base) {
        card_account(device, -(int64_t)mapped);
        return NULL;
    }
    pthread_mutex_lock(&lock);
    insert(base, bytes, mapped, DEVICE, device);
    pthread_mutex_unlock(&lock);
    return base;
}
EXPORT int card_free(void *address) {
    Range range;
    card_wait_device(); /* freeing waits for all work, as cudaFree does */
    if (!take_out(address, DEVICE, &range)) return INVALID_VALUE;
    munmap(address, range.mapped);
    return card_account(range.device, -(int64_t)range.mapped);
}
EXPORT void *card_pin(size_t bytes) {
    size_t mapped = (bytes + 4095) / 4096 * 4096 + !bytes * 4096;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    if (getenv("TIGHTFIT_NULLCARD_RESIDENT")) flags |= MAP_POPULATE; /* as on a card, where all pages are locked */
    void *base = mmap(NULL, mapped, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (base == MAP_FAILED) return NULL;
    pthread_mutex_lock(&lock);
    insert(base, bytes, mapped, PINNED, current);
    pthread_mutex_unlock(&lock);
    return base;
}
EXPORT int card_unpin(void *address) {
    Range range;
    card_wait_device();
    if (!take_out(address, PINNED, &range)) return INVALID_VALUE;
    if (range.mapped) munmap(address, range.mapped);
    return OK;
}
void *card_reserve(size_t bytes) { return reserve(bytes, PROT_NONE); }

/* Where the host's memory is measured: memory that is read and was never written would be the system's page of zeros,
   which mincore counts and a process's resident memory does not. */
EXPORT void card_populate(const void *address, size_t bytes) {
    static int wanted = -1;
    if (wanted < 0) wanted = getenv("TIGHTFIT_NULLCARD_RESIDENT") != NULL;
    if (!bytes || !wanted) return;
    uintptr_t from = (uintptr_t)address / 4096 * 4096;
    madvise((void *)from, (uintptr_t)address + bytes - from, 23 /* MADV_POPULATE_WRITE, of Linux 5.14 on */);
}
static void copy_now(void *target, const void *source, size_t bytes) {
    if (!bytes || target == source || bytes > card()->copies) return;
    card_populate(source, bytes);
    memmove(target, source, bytes);
}
static void fill_now(void *target, unsigned value, int width, size_t count) {
    size_t bytes = width * count;
    if (!value && bytes >= 1 << 16 && card_find(target, 0, 0, 0) == DEVICE) { /* whole pages are given back: they become zero and take no memory */
        char *from = (char *)(((uintptr_t)target + 4095) & ~(uintptr_t)4095), *to = (char *)(((uintptr_t)target + bytes) & ~(uintptr_t)4095);
        memset(target, 0, from - (char *)target);
        madvise(from, to - from, MADV_DONTNEED);
        memset(to, 0, (char *)target + bytes - to);
    } else if (width == 1) memset(target, (int)value, bytes);
    else if (width == 2) for (size_t i = 0; i < count; i++) ((uint16_t *)target)[i] = (uint16_t)value;
    else for (size_t i = 0; i < count; i++) ((uint32_t *)target)[i] = value;
}

/* ---- work on streams ----

   A real card does a stream's work some time after the call, and work of two streams in any order that events allow. By
   default everything here happens within its call: one possible order. Two others are the extremes on either side, and
   what is wrong in one of them was never ordered by the program:
   - late side streams (`late=1`): work of a stream that is not the default one happens only when something waits for it;
   - a late default stream (`late=2`): the other way round.
   An event is a number of pieces of work of its stream. A stream that is told to wait for an event that is not there yet
   gets the wait as a piece of its own work. */

typedef enum { COPY, ROWS, FILL, HOST, WAIT } Kind;
typedef struct Work {
    Kind kind;
    void *target, *source, *staged;
    size_t bytes, target_pitch, source_pitch, rows;
    unsigned value;
    int width;
    HostWork host;
    Stream *stream; /* that is waited for, until `until` pieces of its work are done */
    uint64_t until;
    struct Work *next;
} Work;
struct Graph { Work *first, *last; size_t nodes; int users; };
struct Stream {
    int device, flags, priority, is_default, running;
    pthread_t runner;
    Work *first, *last;
    uint64_t given, done;
    Graph *capture;
    unsigned long long capture_id;
    Stream *next;
};
struct Event { Stream *stream; uint64_t until; Graph *capture; unsigned long long capture_id; double when; int queries; };

static pthread_mutex_t streams_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t progress = PTHREAD_COND_INITIALIZER;
static Stream *streams, defaults[DEVICES];
static unsigned long long captures;
enum { PATIENCE = 64 }; /* queries that find an event not ready before its work happens after all */

static Stream *of(Stream *stream) { /* 0, 1 and 2 are CUDA's own handles of default streams */
    if ((uintptr_t)stream > 2) return stream;
    Stream *found = &defaults[current];
    if (!found->is_default) { found->is_default = 1; found->device = current; found->next = streams; streams = found; }
    return found;
}
static int is_late(Stream *stream) {
    int late = card()->late;
    return late == LATE_SIDE ? !stream->is_default : late == LATE_MAIN ? stream->is_default : 0;
}

static void run(Stream *stream, uint64_t until);
static void perform(Work *work) { /* called with the lock, which host work is run without: it may take Python's */
    switch (work->kind) {
    case COPY: copy_now(work->target, work->staged ? work->staged : work->source, work->bytes); break;
    case ROWS:
        for (size_t i = 0; i < work->rows; i++)
            copy_now((char *)work->target + i * work->target_pitch, (char *)work->source + i * work->source_pitch, work->bytes);
        break;
    case FILL: fill_now(work->target, work->value, work->width, work->bytes); break;
    case HOST:
        pthread_mutex_unlock(&streams_lock);
        work->host(work->source);
        pthread_mutex_lock(&streams_lock);
        break;
    case WAIT: run(work->stream, work->until); break;
    }
}
static void run(Stream *stream, uint64_t until) {
    while (stream->done < until) {
        if (stream->running) { /* by another thread, within host work */
            if (pthread_equal(stream->runner, pthread_self())) {
                fprintf(stderr, "null card: work of a stream waits for its own stream, which never ends\n");
                abort();
            }
            pthread_cond_wait(&progress, &streams_lock);
            continue;
        }
        Work *work = stream->first;
        if (!work) return;
        stream->running = 1;
        stream->runner = pthread_self();
        perform(work);
        stream->running = 0;
        stream->first = work->next;
        if (!stream->first) stream->last = NULL;
        stream->done++;
        free(work->staged);
        free(work);
        pthread_cond_broadcast(&progress);
    }
}
static void append(Work **first, Work **last, Work *work) {
    if (*last) (*last)->next = work; else *first = work;
    *last = work;
}
static int give(Stream *stream, Work piece) {
    pthread_mutex_lock(&streams_lock);
    stream = of(stream);
    if (stream->capture) {
        if (piece.kind != WAIT) {
            Work *work = malloc(sizeof *work);
            *work = piece;
            append(&stream->capture->first, &stream->capture->last, work);
            stream->capture->nodes++;
        }
        pthread_mutex_unlock(&streams_lock);
        return OK;
    }
    /* The legacy default stream and blocking streams wait for each other. PyTorch's own streams do not block. */
    for (Stream *other = streams; other; other = other->next)
        if (other != stream && other->device == stream->device && !(other->flags & 1) && !(stream->flags & 1) && (other->is_default || stream->is_default))
            run(other, other->given);
    if (is_late(stream) || stream->first) {
        Work *work = malloc(sizeof *work);
        *work = piece;
        append(&stream->first, &stream->last, work);
        stream->given++;
        if (!is_late(stream)) run(stream, stream->given);
    } else {
        stream->given++;
        stream->running = 1;
        stream->runner = pthread_self();
        perform(&piece);
        stream->running = 0;
        stream->done++;
        free(piece.staged);
        pthread_cond_broadcast(&progress);
    }
    pthread_mutex_unlock(&streams_lock);
    return OK;
}

EXPORT Stream *card_stream(int flags, int priority) {
    Stream *stream = calloc(1, sizeof *stream);
    stream->flags = flags;
    stream->priority = priority;
    stream->device = current;
    pthread_mutex_lock(&streams_lock);
    stream->next = streams;
    streams = stream;
    pthread_mutex_unlock(&streams_lock);
    return stream;
}
EXPORT void card_stream_end(Stream *stream) { card_wait_stream(stream); } /* a few bytes are kept: events may name it */
EXPORT int card_stream_priority(Stream *stream) { return (uintptr_t)stream > 2 ? stream->priority : 0; }
EXPORT int card_stream_flags(Stream *stream) { return (uintptr_t)stream > 2 ? stream->flags : 0; }

enum { NUMBERS = 4096 }; /* bytes: a program reads numbers in small copies, and large ones move tensors */
typedef void (*Reader)(size_t bytes, const void *source);
static Reader reader;
EXPORT void card_on_read(Reader called) { reader = called; } /* for Python, through ctypes: where a program reads numbers */

EXPORT int card_copy(void *target, const void *source, size_t bytes, Stream *stream, int waits) {
    int to = card_find(target, 0, 0, 0), from = card_find(source, 0, 0, 0);
    if (reader && from == DEVICE && to != DEVICE && bytes <= NUMBERS) reader(bytes, source);
    Work work = {.kind = COPY, .target = target, .source = (void *)source, .bytes = bytes};
    if (from == UNKNOWN && card()->late && bytes) { /* pageable memory is read before the call returns */
        work.staged = malloc(bytes);
        memcpy(work.staged, source, bytes);
    }
    int result = give(stream, work);
    if (waits || to == UNKNOWN) result = card_wait_stream(stream); /* into pageable memory: done before the call returns */
    return result;
}
EXPORT int card_copy_rows(void *target, size_t target_pitch, const void *source, size_t source_pitch, size_t width, size_t rows, Stream *stream) {
    int result = give(stream, (Work){.kind = ROWS, .target = target, .target_pitch = target_pitch, .source = (void *)source, .source_pitch = source_pitch, .bytes = width, .rows = rows});
    if (card_find(target, 0, 0, 0) == UNKNOWN || card_find(source, 0, 0, 0) == UNKNOWN) result = card_wait_stream(stream);
    return result;
}
EXPORT int card_fill(void *target, unsigned value, int width, size_t count, Stream *stream) {
    return give(stream, (Work){.kind = FILL, .target = target, .value = value, .width = width, .bytes = count});
}
EXPORT int card_host_work(HostWork work, void *data, Stream *stream) {
    return give(stream, (Work){.kind = HOST, .host = work, .source = data});
}
EXPORT int card_wait_stream(Stream *stream) {
    pthread_mutex_lock(&streams_lock);
    stream = of(stream);
    int result = stream->capture ? CAPTURE_UNSUPPORTED : OK;
    if (!result) run(stream, stream->given);
    pthread_mutex_unlock(&streams_lock);
    return result;
}
EXPORT int card_query_stream(Stream *stream) {
    pthread_mutex_lock(&streams_lock);
    stream = of(stream);
    int result = stream->capture ? CAPTURE_UNSUPPORTED : stream->done < stream->given ? NOT_READY : OK;
    pthread_mutex_unlock(&streams_lock);
    return result;
}
EXPORT int card_wait_device(void) {
    pthread_mutex_lock(&streams_lock);
    for (Stream *stream = streams; stream; stream = stream->next) run(stream, stream->given);
    pthread_mutex_unlock(&streams_lock);
    return OK;
}

static double milliseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e3 + now.tv_nsec / 1e6;
}
EXPORT Event *card_event(void) { return calloc(1, sizeof(Event)); }
EXPORT void card_event_end(Event *event) { free(event); }
EXPORT int card_record(Event *event, Stream *stream) {
    pthread_mutex_lock(&streams_lock);
    stream = of(stream);
    *event = (Event){.stream = stream, .until = stream->given, .capture = stream->capture, .capture_id = stream->capture_id, .when = milliseconds()};
    pthread_mutex_unlock(&streams_lock);
    return OK;
}
EXPORT int card_wait_event(Event *event) {
    pthread_mutex_lock(&streams_lock);
    int result = event->capture ? CAPTURE_UNSUPPORTED : OK;
    if (event->stream && !result) run(event->stream, event->until);
    pthread_mutex_unlock(&streams_lock);
    return result;
}
EXPORT int card_query_event(Event *event) {
    pthread_mutex_lock(&streams_lock);
    int result = event->capture ? CAPTURE_UNSUPPORTED : OK;
    if (!result && event->stream && event->stream->done < event->until) {
        if (++event->queries < PATIENCE) result = NOT_READY;
        else run(event->stream, event->until); /* a program that asks again and again is answered in the end */
    }
    pthread_mutex_unlock(&streams_lock);
    return result;
}
EXPORT int card_stream_waits(Stream *stream, Event *event) {
    if (!event->stream) return OK;
    pthread_mutex_lock(&streams_lock);
    stream = of(stream);
    if (event->capture && !stream->capture) { /* a stream joins a capture by waiting for an event of it */
        stream->capture = event->capture;
        stream->capture_id = event->capture_id;
    }
    pthread_mutex_unlock(&streams_lock);
    return event->capture || event->stream == stream ? OK : give(stream, (Work){.kind = WAIT, .stream = event->stream, .until = event->until});
}
EXPORT float card_milliseconds(Event *from, Event *to) { return (float)(to->when - from->when); }

/* ---- graphs ---- */

EXPORT int card_capture(Stream *stream, Graph *graph) {
    pthread_mutex_lock(&streams_lock);
    stream = of(stream);
    stream->capture = graph ? graph : calloc(1, sizeof *graph);
    if (!graph) stream->capture->users = 1;
    stream->capture_id = ++captures;
    pthread_mutex_unlock(&streams_lock);
    return OK;
}
EXPORT Graph *card_capture_end(Stream *stream) {
    pthread_mutex_lock(&streams_lock);
    Graph *graph = of(stream)->capture;
    for (Stream *other = streams; other; other = other->next)
        if (other->capture == graph) other->capture = NULL;
    pthread_mutex_unlock(&streams_lock);
    return graph;
}
EXPORT int card_capturing(Stream *stream, unsigned long long *id, Graph **graph) {
    pthread_mutex_lock(&streams_lock);
    stream = of(stream);
    if (id) *id = stream->capture ? stream->capture_id : 0;
    if (graph) *graph = stream->capture;
    int active = stream->capture != NULL;
    pthread_mutex_unlock(&streams_lock);
    return active;
}
/* For kernels, which are not work: a captured launch is a node of the graph. */
void card_count_node(Stream *stream) {
    if (!captures) return;
    pthread_mutex_lock(&streams_lock);
    stream = of(stream);
    if (stream->capture) stream->capture->nodes++;
    pthread_mutex_unlock(&streams_lock);
}
EXPORT size_t card_graph_nodes(Graph *graph) { return graph->nodes; }
EXPORT Graph *card_graph_share(Graph *graph) {
    pthread_mutex_lock(&streams_lock);
    graph->users++;
    pthread_mutex_unlock(&streams_lock);
    return graph;
}
EXPORT void card_graph_end(Graph *graph) {
    pthread_mutex_lock(&streams_lock);
    int gone = --graph->users == 0;
    pthread_mutex_unlock(&streams_lock);
    if (!gone) return;
    for (Work *work = graph->first, *next; work; work = next) {
        next = work->next;
        free(work->staged);
        free(work);
    }
    free(graph);
}
EXPORT int card_graph_launch(Graph *graph, Stream *stream) {
    int result = OK;
    for (Work *work = graph->first; work && !result; work = work->next) {
        Work piece = *work;
        piece.next = NULL;
        if (work->staged) piece.staged = memcpy(malloc(work->bytes), work->staged, work->bytes);
        result = give(stream, piece);
    }
    return result;
}
