/* libnccl: communicators of the processes of one machine, which meet in a file of shared memory.

   A collective is work of its stream, as on a card. In it each rank writes a piece into its slot, all meet, each reads what
   it is to get, and all meet again. Sums are made in the order of ranks, halves in 32 bits and rounded once: the same bits
   on every rank and in every run (a real ring adds in another order). A rank that ended is an error of the communicator, as
   PyTorch's watchdog looks for it. Where kernels compute nothing, large messages carry numbers that nobody reads and would
   touch memory that nothing else touches: they are not sent, unless true values were asked for. */
#define _GNU_SOURCE
#include "card.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE_ERROR = 6 }; /* ncclResult_t */
enum { RANKS = 64, SLOT = 1 << 20, BOX = 1 << 18, PATIENCE_SECONDS = 1800 };
#define LARGE ((size_t)64 << 20)

typedef struct { uint32_t bytes, full; } Box; /* of a message from one rank to another */
typedef struct {
    uint32_t joined, arrived, turn, letters; /* turn: how often all have met; letters: how often a box was filled or emptied */
    int32_t processes[RANKS];
    Box boxes[RANKS][RANKS];
    char data[]; /* a slot for each rank, then the boxes' contents */
} Shared;
typedef struct { char bytes[128]; } Id;
typedef struct { int ranks, rank, local, error, splits; Id id; Shared *shared; } Communicator;

/* ---- meeting ---- */

static void wake(uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE, RANKS * 4, NULL, NULL, 0); }
static void doze(uint32_t *word, uint32_t seen) {
    struct timespec a_while = {0, 50000000};
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &a_while, NULL, 0);
}
static uint32_t read_word(uint32_t *word) { return __atomic_load_n(word, __ATOMIC_SEQ_CST); }
static int gone(Communicator *c) {
    for (int i = 0; i < c->ranks; i++)
        if (c->shared->processes[i] && kill(c->shared->processes[i], 0) && errno == ESRCH) return 1;
    return 0;
}
static int meet(Communicator *c) {
    Shared *s = c->shared;
    if (c->error) return c->error;
    uint32_t turn = read_word(&s->turn);
    if (__atomic_add_fetch(&s->arrived, 1, __ATOMIC_SEQ_CST) == (uint32_t)c->ranks) {
        __atomic_store_n(&s->arrived, 0, __ATOMIC_SEQ_CST);
        __atomic_add_fetch(&s->turn, 1, __ATOMIC_SEQ_CST);
        wake(&s->turn);
        return OK;
    }
    while (read_word(&s->turn) == turn) {
        doze(&s->turn, turn);
        if (read_word(&s->turn) == turn && gone(c)) return c->error = REMOTE_ERROR;
    }
    return OK;
}
static char *slot(Communicator *c, int rank) { return c->shared->data + (size_t)rank * SLOT; }
static char *contents(Communicator *c, int from, int to) { return c->shared->data + (size_t)c->ranks * SLOT + ((size_t)from * c->ranks + to) * BOX; }

/* ---- communicators ---- */

static unsigned made_ids;
EXPORT int ncclGetVersion(int *version) { *version = 22907; return OK; }
EXPORT const char *ncclGetErrorString(int error) {
    switch (error) {
    case OK: return "no error";
    case SYSTEM_ERROR: return "null card: not all ranks came, or there is no room for shared memory";
    case INVALID_ARGUMENT: return "null card: invalid argument";
    case REMOTE_ERROR: return "null card: the process of another rank ended";
    default: return "not supported by the null card";
    }
}
EXPORT const char *ncclGetLastError(void *communicator) { return ""; }
EXPORT int ncclGetUniqueId(Id *id) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    memset(id, 0, sizeof *id);
    snprintf(id->bytes, sizeof id->bytes, "nullcard-%d-%u-%lld%09ld", (int)getpid(), __atomic_add_fetch(&made_ids, 1, __ATOMIC_SEQ_CST), (long long)now.tv_sec, now.tv_nsec);
    return OK;
}
static size_t size_of(int ranks) { return sizeof(Shared) + (size_t)ranks * SLOT + (size_t)ranks * ranks * BOX; }
static int map(Communicator *c, int file) {
    c->shared = mmap(NULL, size_of(c->ranks), PROT_READ | PROT_WRITE, file < 0 ? MAP_SHARED | MAP_ANONYMOUS : MAP_SHARED, file, 0);
    return c->shared == MAP_FAILED ? SYSTEM_ERROR : OK;
}
static int join_others(Communicator *c) {
    char path[256];
    snprintf(path, sizeof path, "%s/%.120s", access("/dev/shm", W_OK) ? "/tmp" : "/dev/shm", c->id.bytes);
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600), error = SYSTEM_ERROR;
    if (file < 0) return SYSTEM_ERROR;
    if (!ftruncate(file, size_of(c->ranks))) error = map(c, file);
    close(file);
    if (error) return error;
    Shared *s = c->shared;
    __atomic_store_n(&s->processes[c->rank], getpid(), __ATOMIC_SEQ_CST);
    uint32_t seen = __atomic_add_fetch(&s->joined, 1, __ATOMIC_SEQ_CST);
    if (seen == (uint32_t)c->ranks) unlink(path); /* all have it */
    wake(&s->joined);
    time_t until = time(NULL) + PATIENCE_SECONDS;
    for (; (seen = read_word(&s->joined)) < (uint32_t)c->ranks; doze(&s->joined, seen))
        if (time(NULL) > until || gone(c)) {
            unlink(path);
            return SYSTEM_ERROR;
        }
    return OK;
}
static int make(Communicator **made, int ranks, int rank, Id id, int local) {
    if (ranks < 1 || ranks > RANKS || rank < 0 || rank >= ranks) return INVALID_ARGUMENT;
    Communicator *c = calloc(1, sizeof *c);
    *c = (Communicator){.ranks = ranks, .rank = rank, .local = local, .id = id};
    int error = ranks == 1 ? map(c, -1) : local ? OK : join_others(c);
    if (error) free(c); else *made = c;
    return error;
}
EXPORT int ncclCommInitRank(Communicator **made, int ranks, Id id, int rank) { return make(made, ranks, rank, id, 0); }
EXPORT int ncclCommInitRankConfig(Communicator **made, int ranks, Id id, int rank, void *config) { return make(made, ranks, rank, id, 0); }
EXPORT int ncclCommInitRankScalable(Communicator **made, int ranks, int rank, int ids, Id *id, void *config) { return make(made, ranks, rank, id[0], 0); }
EXPORT int ncclCommInitAll(Communicator **made, int devices, const int *list) { /* all ranks in this process */
    Id id;
    ncclGetUniqueId(&id);
    int error = OK;
    for (int i = 0; i < devices && !error; i++) {
        error = make(&made[i], devices, i, id, devices > 1);
        if (error || devices == 1) continue;
        if (i) made[i]->shared = made[0]->shared; else error = map(made[0], -1);
    }
    return error;
}
typedef struct { int color, key; } Wish;
EXPORT int ncclCommSplit(Communicator *of, int color, int key, Communicator **made, void *config) {
    Wish wishes[RANKS];
    memcpy(slot(of, of->rank), &(Wish){color, key}, sizeof(Wish));
    if (meet(of)) return of->error;
    for (int i = 0; i < of->ranks; i++) memcpy(&wishes[i], slot(of, i), sizeof(Wish));
    if (meet(of)) return of->error;
    int ranks = 0, rank = 0;
    for (int i = 0; i < of->ranks; i++) {
        if (wishes[i].color != color) continue;
        ranks++;
        rank += wishes[i].key < key || (wishes[i].key == key && i < of->rank);
    }
    Id id = of->id;
    size_t used = strlen(id.bytes);
    snprintf(id.bytes + used, sizeof id.bytes - used, "-%d.%d", ++of->splits, color);
    *made = NULL;
    return color < 0 ? OK : make(made, ranks, rank, id, 0);
}
EXPORT int ncclCommDestroy(Communicator *of) { return OK; } /* a few bytes are kept: work may name it */
EXPORT int ncclCommAbort(Communicator *of) { return OK; }
EXPORT int ncclCommFinalize(Communicator *of) { return OK; }
EXPORT int ncclCommGetAsyncError(Communicator *of, int *error) { *error = of->error; return OK; }
EXPORT int ncclCommCount(Communicator *of, int *count) { *count = of->ranks; return OK; }
EXPORT int ncclCommUserRank(Communicator *of, int *rank) { *rank = of->rank; return OK; }
EXPORT int ncclCommRegister(Communicator *of, void *buffer, size_t bytes, void **handle) { *handle = buffer; return OK; }
EXPORT int ncclCommDeregister(Communicator *of, void *handle) { return OK; }
EXPORT int ncclMemAlloc(void **address, size_t bytes) { *address = card_allocate(bytes); return *address ? OK : 1; }
EXPORT int ncclMemFree(void *address) { return card_free(address); }

/* ---- sums ---- */

enum { SUM, PROD, MAX, MIN, AVG, OWN }; /* ncclRedOp_t; OWN and above: PyTorch's sums of products */
static double scales[1024];
static int scale_count;
static double number_of(const void *at, int type);

EXPORT int ncclRedOpCreatePreMulSum(int *made, void *scale, int type, int residence, Communicator *of) {
    int at = __atomic_fetch_add(&scale_count, 1, __ATOMIC_SEQ_CST) % 1024;
    scales[at] = number_of(scale, type);
    *made = OWN + at;
    return OK;
}
EXPORT int ncclRedOpDestroy(int made, Communicator *of) { return OK; }

static size_t width_of(int type) { /* ncclDataType_t */
    static const size_t widths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return type >= 0 && type < 12 ? widths[type] : 0;
}
typedef struct { uint16_t bits; } Brain; /* bfloat16 */
static float of_brain(Brain half) { uint32_t bits = (uint32_t)half.bits << 16; float number; memcpy(&number, &bits, 4); return number; }
static Brain to_brain(float number) { /* to the nearest, ties to even */
    uint32_t bits;
    memcpy(&bits, &number, 4);
    if (number != number) return (Brain){0x7fc0};
    return (Brain){(uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
#ifdef __FLT16_MANT_DIG__
typedef _Float16 Half;
static float of_half(Half half) { return (float)half; }
static Half to_half(float number) { return (Half)number; }
#endif
#define SAME(x) (x)
static double number_of(const void *at, int type) {
    switch (type) {
#ifdef __FLT16_MANT_DIG__
    case 6: return of_half(*(const Half *)at);
#endif
    case 7: return *(const float *)at;
    case 8: return *(const double *)at;
    case 9: return of_brain(*(const Brain *)at);
    default: return 1;
    }
}
#define COMBINE(TYPE, WIDE, FROM, TO) \
    for (size_t i = 0; i < count; i++) { \
        WIDE sum = FROM(((TYPE *)slot(c, 0))[i]); \
        if (operation == AVG || operation >= OWN) sum = (WIDE)(sum * factor); \
        for (int r = 1; r < c->ranks; r++) { \
            WIDE other = FROM(((TYPE *)slot(c, r))[i]); \
            if (operation == SUM) sum += other; \
            else if (operation == PROD) sum *= other; \
            else if (operation == MAX) sum = other > sum || other != other ? other : sum; \
            else if (operation == MIN) sum = other < sum || other != other ? other : sum; \
            else sum += (WIDE)(other * factor); \
        } \
        ((TYPE *)into)[i] = TO(sum); \
    }
#define WHOLE(TYPE) COMBINE(TYPE, TYPE, SAME, SAME)
/* The slots' sum. NCCL multiplies by 1 / n before it adds (averages of whole numbers are divided afterwards). */
static int combine(Communicator *c, void *into, size_t count, int type, int operation) {
    double factor = operation >= OWN ? scales[operation - OWN] : operation == AVG && type >= 6 ? 1.0 / c->ranks : 1;
    switch (type) {
    case 0: WHOLE(int8_t) break;
    case 1: WHOLE(uint8_t) break;
    case 2: WHOLE(int32_t) break;
    case 3: WHOLE(uint32_t) break;
    case 4: WHOLE(int64_t) break;
    case 5: WHOLE(uint64_t) break;
#ifdef __FLT16_MANT_DIG__
    case 6: COMBINE(Half, float, of_half, to_half) break;
#endif
    case 7: WHOLE(float) break;
    case 8: WHOLE(double) break;
    case 9: COMBINE(Brain, float, of_brain, to_brain) break;
    default: return card_unmodelled("sums of this type in NCCL", INVALID_ARGUMENT);
    }
    if (operation == AVG && type < 6) return card_unmodelled("averages of whole numbers in NCCL", INVALID_ARGUMENT);
    return OK;
}

/* ---- collectives ---- */

typedef enum { ALL_REDUCE, REDUCE_SCATTER, REDUCE, ALL_GATHER, BROADCAST, ALL_TO_ALL } Form;
typedef struct { Form form; const char *sent; char *received; size_t count; int type, operation, root, kept; Communicator *of; Stream *stream; } Collective;

static void collect(void *data) {
    Collective *w = data;
    Communicator *c = w->of;
    size_t width = width_of(w->type), most = SLOT / width, whole = w->count * width;
    int rounds = w->form == REDUCE_SCATTER || w->form == ALL_TO_ALL ? c->ranks : 1; /* one for each receiver */
    for (int to = 0; to < rounds && !c->error; to++)
        for (size_t at = 0; at < w->count && !c->error; at += most) {
            size_t count = w->count - at < most ? w->count - at : most, bytes = count * width, from = at * width;
            if (w->form != BROADCAST || c->rank == w->root) memcpy(slot(c, c->rank), w->sent + (rounds > 1 ? to * whole : 0) + from, bytes);
            if (meet(c)) break;
            switch (w->form) {
            case ALL_REDUCE: combine(c, w->received + from, count, w->type, w->operation); break;
            case REDUCE_SCATTER: if (c->rank == to) combine(c, w->received + from, count, w->type, w->operation); break;
            case REDUCE: if (c->rank == w->root) combine(c, w->received + from, count, w->type, w->operation); break;
            case ALL_GATHER: for (int r = 0; r < c->ranks; r++) memcpy(w->received + r * whole + from, slot(c, r), bytes); break;
            case BROADCAST: if (c->rank != w->root || w->received != w->sent) memcpy(w->received + from, slot(c, w->root), bytes); break;
            case ALL_TO_ALL: if (c->rank == to) for (int r = 0; r < c->ranks; r++) memcpy(w->received + r * whole + from, slot(c, r), bytes); break;
            }
            meet(c);
        }
    if (!w->kept) free(w);
}
static void *collect_in_thread(void *data) { collect(data); return NULL; }

static int carries_nothing(size_t bytes) { return bytes > card()->copies || (bytes > LARGE && !card_has_values()); }

/* Calls between ncclGroupStart and ncclGroupEnd: messages all happen together, and so do collectives of one process. */
typedef struct Transfer { const char *sent; char *received; size_t bytes, done; int peer, kept; Communicator *of; Stream *stream; struct Transfer *next; } Transfer;
static __thread int depth;
static __thread Transfer *transfers, **last_transfer;
static __thread Collective *waiting[RANKS];
static __thread int waiting_count;
static int end_group(void);

static int collective(Form form, const void *sent, void *received, size_t count, int type, int operation, int root, Communicator *of, Stream *stream) {
    size_t width = width_of(type);
    if (!width || root < 0 || root >= of->ranks) return INVALID_ARGUMENT;
    if (!count || carries_nothing(count * width)) return OK;
    Collective *work = malloc(sizeof *work);
    *work = (Collective){form, sent, received, count, type, operation, root, card_capturing(stream, NULL, NULL), of, stream};
    if (!of->local) return card_host_work(collect, work, stream) ? SYSTEM_ERROR : of->error;
    if (waiting_count == RANKS) return INVALID_USAGE;
    waiting[waiting_count++] = work;
    return depth ? OK : end_group();
}
EXPORT int ncclAllReduce(const void *sent, void *received, size_t count, int type, int operation, Communicator *of, Stream *stream) { return collective(ALL_REDUCE, sent, received, count, type, operation, 0, of, stream); }
EXPORT int ncclReduceScatter(const void *sent, void *received, size_t count, int type, int operation, Communicator *of, Stream *stream) { return collective(REDUCE_SCATTER, sent, received, count, type, operation, 0, of, stream); }
EXPORT int ncclReduce(const void *sent, void *received, size_t count, int type, int operation, int root, Communicator *of, Stream *stream) { return collective(REDUCE, sent, received, count, type, operation, root, of, stream); }
EXPORT int ncclAllGather(const void *sent, void *received, size_t count, int type, Communicator *of, Stream *stream) { return collective(ALL_GATHER, sent, received, count, type, SUM, 0, of, stream); }
EXPORT int ncclBroadcast(const void *sent, void *received, size_t count, int type, int root, Communicator *of, Stream *stream) { return collective(BROADCAST, sent, received, count, type, SUM, root, of, stream); }
EXPORT int ncclBcast(void *buffer, size_t count, int type, int root, Communicator *of, Stream *stream) { return collective(BROADCAST, buffer, buffer, count, type, SUM, root, of, stream); }
EXPORT int ncclAlltoAll(const void *sent, void *received, size_t count, int type, Communicator *of, Stream *stream) { return collective(ALL_TO_ALL, sent, received, count, type, SUM, 0, of, stream); }

/* ---- messages ---- */

static int is_first(Transfer *list, Transfer *wanted) { /* of its direction and peer: messages keep their order */
    for (Transfer *t = list; t != wanted; t = t->next)
        if (t->done < t->bytes && t->peer == wanted->peer && !t->sent == !wanted->sent) return 0;
    return 1;
}
static void transfer(void *data) {
    Transfer *list = data;
    Communicator *c = list->of;
    for (int open = 1; open && !c->error;) {
        uint32_t seen = read_word(&c->shared->letters);
        int moved = open = 0;
        for (Transfer *t = list; t; t = t->next) {
            if (t->done == t->bytes) continue;
            open = 1;
            int from = t->sent ? c->rank : t->peer, to = t->sent ? t->peer : c->rank;
            Box *box = &c->shared->boxes[from][to];
            if (!is_first(list, t) || !!read_word(&box->full) == !!t->sent) continue;
            size_t left = t->bytes - t->done, bytes = t->sent ? (left < BOX ? left : BOX) : box->bytes;
            if (bytes > left) { c->error = INVALID_USAGE; break; } /* the sender's message is longer */
            if (t->sent) memcpy(contents(c, from, to), t->sent + t->done, box->bytes = bytes);
            else memcpy(t->received + t->done, contents(c, from, to), bytes);
            t->done += bytes;
            __atomic_store_n(&box->full, !!t->sent, __ATOMIC_SEQ_CST);
            __atomic_add_fetch(&c->shared->letters, 1, __ATOMIC_SEQ_CST);
            wake(&c->shared->letters);
            moved = 1;
        }
        if (open && !moved) {
            doze(&c->shared->letters, seen);
            if (read_word(&c->shared->letters) == seen && gone(c)) c->error = REMOTE_ERROR;
        }
    }
    for (Transfer *t = list, *next; t; t = next) {
        next = t->next;
        t->done = 0;
        if (!t->kept) free(t);
    }
}
static int message(const char *sent, char *received, size_t count, int type, int peer, Communicator *of, Stream *stream) {
    size_t width = width_of(type), bytes = count * width;
    if (!width || peer < 0 || peer >= of->ranks) return INVALID_ARGUMENT;
    if (of->local) return card_unmodelled("messages within a process in NCCL", INVALID_USAGE);
    if (!bytes || carries_nothing(bytes)) return OK;
    Transfer *made = malloc(sizeof *made);
    *made = (Transfer){sent, received, bytes, 0, peer, card_capturing(stream, NULL, NULL), of, stream, NULL};
    if (!transfers) last_transfer = &transfers;
    *last_transfer = made;
    last_transfer = &made->next;
    return depth ? OK : end_group();
}
EXPORT int ncclSend(const void *sent, size_t count, int type, int peer, Communicator *of, Stream *stream) { return message(sent, NULL, count, type, peer, of, stream); }
EXPORT int ncclRecv(void *received, size_t count, int type, int peer, Communicator *of, Stream *stream) { return message(NULL, received, count, type, peer, of, stream); }

static int end_group(void) {
    int error = OK;
    pthread_t threads[RANKS];
    for (int i = 0; i < waiting_count; i++) {
        card_wait_stream(waiting[i]->stream);
        if (pthread_create(&threads[i], NULL, collect_in_thread, waiting[i])) return SYSTEM_ERROR;
    }
    for (int i = 0; i < waiting_count; i++) pthread_join(threads[i], NULL);
    waiting_count = 0;
    while (transfers) { /* those of one communicator and stream are one piece of work */
        Transfer *first = transfers, *mine = NULL, *others = NULL, **my_end = &mine, **other_end = &others;
        for (Transfer *t = transfers; t; t = t->next) {
            Transfer ***end = t->of == first->of && t->stream == first->stream ? &my_end : &other_end;
            **end = t;
            *end = &t->next;
        }
        *my_end = *other_end = NULL;
        transfers = others;
        if (card_host_work(transfer, mine, first->stream)) error = SYSTEM_ERROR;
        if (first->of->error) error = first->of->error;
    }
    return error;
}
EXPORT int ncclGroupStart(void) { depth++; return OK; }
EXPORT int ncclGroupEnd(void) { return --depth ? OK : end_group(); }
