/* libcudart: the CUDA runtime. CUDA 12 and 13 differ in a few names and layouts, which are answered here side by side. */
#define _GNU_SOURCE
#include "card.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { unsigned x, y, z; } Dim3;
void card_activate(void);
void card_count_node(Stream *stream);

static __thread int last;
static int say(int error) { return error ? last = error : OK; }

/* ---- errors ---- */

EXPORT const char *cudaGetErrorString(int error) {
    switch (error) {
    case OK: return "no error";
    case INVALID_VALUE: return "invalid argument";
    case OUT_OF_MEMORY: return "out of memory";
    case INVALID_CONFIGURATION: return "invalid configuration argument";
    case INVALID_DEVICE: return "invalid device ordinal";
    case NO_KERNEL_IMAGE: return "no kernel image is available for execution on the device";
    case NOT_READY: return "device not ready";
    case NOT_SUPPORTED: return "operation not supported by the null card";
    case CAPTURE_UNSUPPORTED: return "operation not permitted when stream is capturing";
    default: return "an error of the null card";
    }
}
EXPORT const char *cudaGetErrorName(int error) {
    return error == OK ? "cudaSuccess" : error == OUT_OF_MEMORY ? "cudaErrorMemoryAllocation" : error == NOT_SUPPORTED ? "cudaErrorNotSupported" : "cudaErrorUnknown";
}
EXPORT int cudaGetLastError(void) { int error = last; last = OK; return error; }
EXPORT int cudaPeekAtLastError(void) { return last; }

/* ---- devices ---- */

EXPORT int cudaGetDeviceCount(int *count) { *count = card()->count; return *count ? OK : say(NO_DEVICE); }
EXPORT int cudaGetDevice(int *device) { *device = card_current(); return OK; }
EXPORT int cudaSetDevice(int device) {
    if (device < 0 || device >= card()->count) return say(INVALID_DEVICE);
    card_set_current(device);
    card_activate();
    return OK;
}
EXPORT int cudaDriverGetVersion(int *version) { *version = card()->cuda; return OK; }
EXPORT int cudaRuntimeGetVersion(int *version) { *version = card()->cuda; return OK; }
EXPORT int cudaDeviceGetAttribute(int *value, int attribute, int device) { *value = card_attribute(attribute, device); return OK; }

/* Where cudaDeviceProp has what, in CUDA 12 and in CUDA 13 (driver_types.h): 13 dropped clock rates and modes. */
typedef struct { short at12, at13; char wide; } Field;
static void put(char *properties, Field field, size_t value) {
    char *at = properties + (card()->cuda < 13000 ? field.at12 : field.at13);
    if (field.wide) *(size_t *)at = value; else *(int *)at = (int)value;
}
static int properties_of(char *p, int device) {
    const Card *c = card();
    memset(p, 0, c->cuda < 13000 ? 1032 : 1008);
    snprintf(p, 256, "%s", c->name);
    memset(p + 256, 0x11, 16);
    p[271] = (char)device; /* uuid */
    int threads[3] = {1024, 1024, 64}, grid[3] = {2147483647, 65535, 65535};
    memcpy(p + 324, threads, sizeof threads);
    memcpy(p + 336, grid, sizeof grid);
    const struct { Field field; size_t value; } fields[] = {
        {{288, 288, 1}, c->memory}, {{296, 296, 1}, 49152}, {{304, 304, 0}, 65536}, {{308, 308, 0}, 32}, {{312, 312, 1}, 2147483647},
        {{320, 320, 0}, 1024}, {{352, 352, 1}, 65536}, {{360, 360, 0}, c->capability / 10}, {{364, 364, 0}, c->capability % 10},
        {{368, 368, 1}, 512}, {{376, 376, 1}, 32}, {{388, 384, 0}, c->multiprocessors}, {{400, 392, 0}, 1 /* maps host memory */},
        {{576, 560, 0}, 1 /* concurrent kernels */}, {{584, 568, 0}, 1 + device /* PCI bus */}, {{600, 584, 0}, 2 /* copy engines */},
        {{604, 588, 0}, 1 /* unified addresses */}, {{612, 592, 0}, 384}, {{616, 596, 0}, 32 << 20 /* L2 */}, {{624, 604, 0}, c->threads},
        {{628, 608, 0}, 1 /* priorities */}, {{632, 612, 0}, 1}, {{636, 616, 0}, 1}, {{640, 624, 1}, c->shared_multiprocessor},
        {{648, 632, 0}, 65536}, {{652, 636, 0}, 1 /* managed memory */}, {{688, 668, 0}, 1 /* cooperative launch */},
        {{696, 672, 1}, c->shared_block}, {{712, 688, 0}, c->blocks}, {{720, 696, 1}, 1024}, {{728, 704, 0}, 1 /* registers host memory */},
        {{744, 720, 0}, 1 /* pools */}, {{772, 748, 0}, c->capability >= 90 /* clusters */},
    };
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) put(p, fields[i].field, fields[i].value);
    return OK;
}
EXPORT int cudaGetDeviceProperties(char *properties, int device) { return properties_of(properties, device); }
EXPORT int cudaGetDeviceProperties_v2(char *properties, int device) { return properties_of(properties, device); }
EXPORT int cudaDeviceGetPCIBusId(char *text, int room, int device) { snprintf(text, room, "0000:%02X:00.0", 1 + device); return OK; }
EXPORT int cudaDeviceCanAccessPeer(int *can, int from, int to) { *can = from != to; return OK; }
EXPORT int cudaDeviceEnablePeerAccess(int device, unsigned flags) { return OK; }
EXPORT int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { if (least) *least = 0; if (greatest) *greatest = -5; return OK; }
EXPORT int cudaDeviceSynchronize(void) { return card_wait_device(); }
EXPORT int cudaMemGetInfo(size_t *available, size_t *total) { card_activate(); card_memory(card_current(), available, total); return OK; }
EXPORT int cudaProfilerStart(void) { return OK; }
EXPORT int cudaProfilerStop(void) { return OK; }

/* ---- memory ---- */

EXPORT int cudaMalloc(void **address, size_t bytes) {
    card_activate();
    *address = bytes ? card_allocate(bytes) : NULL;
    return bytes && !*address ? say(OUT_OF_MEMORY) : OK;
}
EXPORT int cudaFree(void *address) { card_activate(); return address ? say(card_free(address)) : OK; }
EXPORT int cudaHostAlloc(void **address, size_t bytes, unsigned flags) { card_activate(); *address = card_pin(bytes); return *address ? OK : say(OUT_OF_MEMORY); }
EXPORT int cudaMallocHost(void **address, size_t bytes) { return cudaHostAlloc(address, bytes, 0); }
EXPORT int cudaMallocManaged(void **address, size_t bytes, unsigned flags) { return cudaHostAlloc(address, bytes, 0); }
EXPORT int cudaMemPrefetchAsync(void) { return OK; } /* managed memory is in its place; its arguments differ by release */
EXPORT int cudaFreeHost(void *address) { return address ? say(card_unpin(address)) : OK; }
EXPORT int cudaHostRegister(void *address, size_t bytes, unsigned flags) {
    if (card_find(address, 0, 0, 0) != UNKNOWN) return say(ALREADY_REGISTERED);
    card_add_range(address, bytes, PINNED, card_current());
    card_populate(address, bytes); /* as on a card, where all pages are locked */
    return OK;
}
EXPORT int cudaHostUnregister(void *address) { card_wait_device(); return card_remove_range(address) ? OK : say(INVALID_VALUE); }
EXPORT int cudaHostGetDevicePointer(void **mapped, void *address, unsigned flags) { *mapped = address; return OK; }
EXPORT int cudaPointerGetAttributes(int *attributes, const void *address) { /* type, device, device's address, host's address */
    int device = -1, kind = card_find(address, NULL, NULL, &device);
    memset(attributes, 0, card()->cuda < 13000 ? 24 : 88);
    void *device_address = kind == UNKNOWN ? NULL : (void *)address, *host_address = kind == DEVICE ? NULL : (void *)address;
    attributes[0] = kind;
    attributes[1] = kind == UNKNOWN ? -2 : device;
    memcpy(attributes + 2, &device_address, sizeof(void *));
    memcpy(attributes + 4, &host_address, sizeof(void *));
    return OK;
}
EXPORT int cudaMemcpy(void *target, const void *source, size_t bytes, int kind) { return say(card_copy(target, source, bytes, NULL, 1)); }
EXPORT int cudaMemcpyAsync(void *target, const void *source, size_t bytes, int kind, Stream *stream) { return say(card_copy(target, source, bytes, stream, 0)); }
EXPORT int cudaMemcpyPeerAsync(void *target, int to, const void *source, int from, size_t bytes, Stream *stream) { return say(card_copy(target, source, bytes, stream, 0)); }
EXPORT int cudaMemcpy2DAsync(void *target, size_t target_pitch, const void *source, size_t source_pitch, size_t width, size_t rows, int kind, Stream *stream) {
    return say(card_copy_rows(target, target_pitch, source, source_pitch, width, rows, stream));
}
EXPORT int cudaMemset(void *target, int value, size_t bytes) { return say(card_fill(target, (unsigned char)value, 1, bytes, NULL)); }
EXPORT int cudaMemsetAsync(void *target, int value, size_t bytes, Stream *stream) { return say(card_fill(target, (unsigned char)value, 1, bytes, stream)); }

/* The pool of cudaMallocAsync keeps what is freed until it is trimmed: its threshold is PyTorch's, which is no limit. */
static struct { size_t used, used_most, kept, kept_most; } pools[64];
static pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER;
EXPORT int cudaMallocAsync(void **address, size_t bytes, Stream *stream) {
    int device = card_current();
    size_t rounded = (bytes + 511) / 512 * 512; /* blocks of a pool share its pages */
    pthread_mutex_lock(&pool_lock);
    size_t after = pools[device].used + rounded, kept = pools[device].kept;
    size_t grown = after > kept ? (after - kept + PAGE_UNIT - 1) / PAGE_UNIT * PAGE_UNIT : 0;
    int full = grown && card_account(device, grown);
    if (!full) {
        pools[device].used = after;
        pools[device].kept += grown;
        if (after > pools[device].used_most) pools[device].used_most = after;
        if (pools[device].kept > pools[device].kept_most) pools[device].kept_most = pools[device].kept;
    }
    pthread_mutex_unlock(&pool_lock);
    *address = full ? NULL : card_pin(rounded);
    if (!*address) return say(OUT_OF_MEMORY);
    card_remove_range(*address);
    card_add_range(*address, rounded, DEVICE, device);
    return OK;
}
int munmap(void *, size_t);
EXPORT int cudaFreeAsync(void *address, Stream *stream) {
    size_t bytes;
    int device;
    if (!address) return OK;
    if (card_find(address, NULL, &bytes, &device) != DEVICE) return say(INVALID_VALUE);
    card_wait_stream(stream);
    card_remove_range(address);
    munmap(address, (bytes + 4095) / 4096 * 4096);
    pthread_mutex_lock(&pool_lock);
    pools[device].used -= bytes;
    pthread_mutex_unlock(&pool_lock);
    return OK;
}
EXPORT int cudaDeviceGetDefaultMemPool(void **pool, int device) { *pool = (void *)(uintptr_t)(0x2000 + device); return OK; }
EXPORT int cudaMemPoolGetAttribute(void *pool, int attribute, void *value) {
    size_t device = (uintptr_t)pool - 0x2000;
    uint64_t figures[] = {pools[device].kept, pools[device].kept_most, pools[device].used, pools[device].used_most};
    if (attribute >= 5 && attribute <= 8) *(uint64_t *)value = figures[attribute - 5];
    else *(uint64_t *)value = 0;
    return OK;
}
EXPORT int cudaMemPoolSetAttribute(void *pool, int attribute, void *value) {
    size_t device = (uintptr_t)pool - 0x2000;
    if (attribute == 6) pools[device].kept_most = pools[device].kept; /* PyTorch resets the peaks */
    if (attribute == 8) pools[device].used_most = pools[device].used;
    return OK;
}
EXPORT int cudaMemPoolSetAccess(void *pool, const void *access, size_t count) { return OK; }
EXPORT int cudaMemPoolTrimTo(void *pool, size_t bytes) {
    size_t device = (uintptr_t)pool - 0x2000;
    pthread_mutex_lock(&pool_lock);
    size_t least = (pools[device].used + PAGE_UNIT - 1) / PAGE_UNIT * PAGE_UNIT, to = bytes > least ? bytes : least;
    if (to < pools[device].kept) {
        card_account((int)device, -(int64_t)(pools[device].kept - to));
        pools[device].kept = to;
    }
    pthread_mutex_unlock(&pool_lock);
    return OK;
}

/* ---- streams and events ---- */

EXPORT int cudaStreamCreateWithPriority(Stream **stream, unsigned flags, int priority) { card_activate(); *stream = card_stream((int)flags, priority); return OK; }
EXPORT int cudaStreamCreateWithFlags(Stream **stream, unsigned flags) { return cudaStreamCreateWithPriority(stream, flags, 0); }
EXPORT int cudaStreamCreate(Stream **stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
EXPORT int cudaStreamDestroy(Stream *stream) { card_stream_end(stream); return OK; }
EXPORT int cudaStreamQuery(Stream *stream) { return card_query_stream(stream); }
EXPORT int cudaStreamSynchronize(Stream *stream) { return say(card_wait_stream(stream)); }
EXPORT int cudaStreamWaitEvent(Stream *stream, Event *event, unsigned flags) { return say(card_stream_waits(stream, event)); }
EXPORT int cudaStreamGetPriority(Stream *stream, int *priority) { *priority = card_stream_priority(stream); return OK; }
EXPORT int cudaStreamGetFlags(Stream *stream, unsigned *flags) { *flags = (unsigned)card_stream_flags(stream); return OK; }
EXPORT int cudaLaunchHostFunc(Stream *stream, HostWork work, void *data) { return say(card_host_work(work, data, stream)); }
typedef void (*Callback)(Stream *, int, void *);
typedef struct { Callback callback; Stream *stream; void *data; } Called;
static void call_back(void *data) { Called called = *(Called *)data; free(data); called.callback(called.stream, OK, called.data); }
EXPORT int cudaStreamAddCallback(Stream *stream, Callback callback, void *data, unsigned flags) {
    Called *called = malloc(sizeof *called);
    *called = (Called){callback, stream, data};
    return say(card_host_work(call_back, called, stream));
}
EXPORT int cudaEventCreateWithFlags(Event **event, unsigned flags) { *event = card_event(); return OK; }
EXPORT int cudaEventCreate(Event **event) { *event = card_event(); return OK; }
EXPORT int cudaEventDestroy(Event *event) { card_event_end(event); return OK; }
EXPORT int cudaEventQuery(Event *event) { return card_query_event(event); } /* not ready is no error */
EXPORT int cudaEventSynchronize(Event *event) { return say(card_wait_event(event)); }
EXPORT int cudaEventRecord(Event *event, Stream *stream) { return say(card_record(event, stream)); }
EXPORT int cudaEventRecordWithFlags(Event *event, Stream *stream, unsigned flags) { return say(card_record(event, stream)); }
EXPORT int cudaEventElapsedTime(float *time, Event *from, Event *to) { *time = card_milliseconds(from, to); return OK; }

/* ---- graphs ---- */

EXPORT int cudaThreadExchangeStreamCaptureMode(int *mode) { static __thread int now; int before = now; now = *mode; *mode = before; return OK; }
EXPORT int cudaStreamIsCapturing(Stream *stream, int *status) { *status = card_capturing(stream, NULL, NULL); return OK; }
static int capture_info(Stream *stream, int *status, unsigned long long *id, Graph **graph, void **dependencies, size_t *count) {
    *status = card_capturing(stream, id, graph);
    if (dependencies) *dependencies = NULL;
    if (count) *count = 0;
    return OK;
}
EXPORT int cudaStreamGetCaptureInfo(Stream *stream, int *status, unsigned long long *id, Graph **graph, void **dependencies, void **edges, size_t *count) { return capture_info(stream, status, id, graph, dependencies, count); }
EXPORT int cudaStreamGetCaptureInfo_v2(Stream *stream, int *status, unsigned long long *id, Graph **graph, void **dependencies, size_t *count) { return capture_info(stream, status, id, graph, dependencies, count); }
EXPORT int cudaStreamGetCaptureInfo_v3(Stream *stream, int *status, unsigned long long *id, Graph **graph, void **dependencies, void **edges, size_t *count) { return capture_info(stream, status, id, graph, dependencies, count); }
EXPORT int cudaStreamBeginCapture(Stream *stream, int mode) { return say(card_capture(stream, NULL)); }
EXPORT int cudaStreamBeginCaptureToGraph(Stream *stream, Graph *graph, const void *dependencies, const void *edges, size_t count, int mode) { return say(card_capture(stream, graph)); }
EXPORT int cudaStreamEndCapture(Stream *stream, Graph **graph) { *graph = card_capture_end(stream); return *graph ? OK : say(INVALID_VALUE); }
EXPORT int cudaGraphGetNodes(Graph *graph, void **nodes, size_t *count) { *count = card_graph_nodes(graph); return OK; }
EXPORT int cudaGraphInstantiate(Graph **made, Graph *graph, unsigned long long flags) { *made = card_graph_share(graph); return OK; }
EXPORT int cudaGraphInstantiateWithFlags(Graph **made, Graph *graph, unsigned long long flags) { *made = card_graph_share(graph); return OK; }
EXPORT int cudaGraphLaunch(Graph *graph, Stream *stream) { return say(card_graph_launch(graph, stream)); }
EXPORT int cudaGraphDestroy(Graph *graph) { card_graph_end(graph); return OK; }
EXPORT int cudaGraphExecDestroy(Graph *graph) { card_graph_end(graph); return OK; }

/* ---- kernels ---- */

typedef struct { const void *host; const char *name; long launches; } Kernel;
static Kernel *kernels; /* a hash table */
static size_t kernel_slots, kernel_count;
static pthread_mutex_t kernel_lock = PTHREAD_MUTEX_INITIALIZER;
static size_t slot_of(Kernel *table, size_t slots, const void *host) {
    size_t at = ((uintptr_t)host >> 4) * 0x9E3779B97F4A7C15ull % slots;
    while (table[at].host && table[at].host != host) at = (at + 1) % slots;
    return at;
}
static char image[16];
EXPORT void **__cudaRegisterFatBinary(void *binary) { return (void **)image; }
EXPORT void __cudaRegisterFatBinaryEnd(void **handle) {}
EXPORT void __cudaUnregisterFatBinary(void **handle) {}
EXPORT char __cudaInitModule(void **handle) { return 1; }
EXPORT void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, void *a, void *b, void *c, void *d, int *e) {
    pthread_mutex_lock(&kernel_lock);
    if (2 * kernel_count >= kernel_slots) {
        size_t slots = kernel_slots ? 2 * kernel_slots : 1 << 16;
        Kernel *table = calloc(slots, sizeof *table);
        for (size_t i = 0; i < kernel_slots; i++)
            if (kernels[i].host) table[slot_of(table, slots, kernels[i].host)] = kernels[i];
        free(kernels);
        kernels = table;
        kernel_slots = slots;
    }
    size_t at = slot_of(kernels, kernel_slots, host);
    if (!kernels[at].host) {
        kernels[at] = (Kernel){host, name, 0};
        kernel_count++;
    }
    pthread_mutex_unlock(&kernel_lock);
}
typedef struct Variable { const void *host; void *data; size_t bytes; struct Variable *next; } Variable;
static Variable *variables;
EXPORT void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external, size_t bytes, int constant, int global) {
    Variable *variable = malloc(sizeof *variable);
    *variable = (Variable){host, NULL, bytes, variables};
    variables = variable;
}
EXPORT int cudaGetSymbolAddress(void **address, const void *symbol) {
    for (Variable *variable = variables; variable; variable = variable->next)
        if (variable->host == symbol) {
            if (!variable->data) variable->data = calloc(1, variable->bytes + 16);
            *address = variable->data;
            return OK;
        }
    return say(INVALID_SYMBOL);
}
EXPORT int cudaMemcpyToSymbol(const void *symbol, const void *source, size_t bytes, size_t offset, int kind) {
    void *address;
    int error = cudaGetSymbolAddress(&address, symbol);
    if (!error) memcpy((char *)address + offset, source, bytes);
    return error;
}

typedef struct { Dim3 grid, block; size_t shared; Stream *stream; } Call;
static __thread Call calls[64];
static __thread int call_depth;
EXPORT unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, size_t shared, Stream *stream) {
    if (call_depth == 64) return 1;
    calls[call_depth++] = (Call){grid, block, shared, stream};
    return 0;
}
EXPORT int __cudaPopCallConfiguration(Dim3 *grid, Dim3 *block, size_t *shared, Stream **stream) {
    if (!call_depth) return say(INVALID_CONFIGURATION);
    Call *call = &calls[--call_depth];
    *grid = call->grid;
    *block = call->block;
    *shared = call->shared;
    *stream = call->stream;
    return OK;
}
/* The newest code of the installed PyTorch that the card can run; 0 where there is none. CUB looks for exactly this. */
static int code_for_card(void) {
    const Card *c = card();
    int best = c->built_count ? 0 : c->capability;
    for (int i = 0; i < c->built_count; i++)
        if (c->built[i] <= c->capability && c->built[i] / 10 == c->capability / 10 && c->built[i] > best) best = c->built[i];
    return best;
}
static long launches;
static int launch(const void *function, Dim3 grid, Dim3 block, size_t shared, Stream *stream) {
    if (!block.x || !block.y || !block.z || !grid.x || !grid.y || !grid.z || (size_t)block.x * block.y * block.z > 1024 || grid.y > 65535 || grid.z > 65535)
        return say(INVALID_CONFIGURATION); /* as a card says */
    if (shared > (size_t)card()->shared_block) return say(INVALID_VALUE);
    if (!code_for_card()) return say(NO_KERNEL_IMAGE);
    __atomic_add_fetch(&launches, 1, __ATOMIC_RELAXED);
    if (kernel_slots) {
        Kernel *kernel = &kernels[slot_of(kernels, kernel_slots, function)];
        if (kernel->host) __atomic_add_fetch(&kernel->launches, 1, __ATOMIC_RELAXED);
    }
    card_count_node(stream);
    return OK;
}
EXPORT int cudaLaunchKernel(const void *function, Dim3 grid, Dim3 block, void **arguments, size_t shared, Stream *stream) { return launch(function, grid, block, shared, stream); }
EXPORT int __cudaLaunchKernel(const void *kernel, Dim3 grid, Dim3 block, void **arguments, size_t shared, Stream *stream) { return launch(kernel, grid, block, shared, stream); }
EXPORT int cudaLaunchCooperativeKernel(const void *function, Dim3 grid, Dim3 block, void **arguments, size_t shared, Stream *stream) { return launch(function, grid, block, shared, stream); }
typedef struct { Dim3 grid, block; size_t shared; Stream *stream; } Config; /* the beginning of cudaLaunchConfig_t */
EXPORT int cudaLaunchKernelExC(const Config *config, const void *function, void **arguments) { return launch(function, config->grid, config->block, config->shared, config->stream); }
EXPORT int __cudaGetKernel(const void **kernel, const void *function) { *kernel = function; return OK; }
EXPORT int cudaLibraryLoadData(void **made, const void *code, void *a, void **b, unsigned c, void *d, void **e, unsigned f) { *made = image; return OK; }
EXPORT int cudaLibraryGetKernel(void **kernel, void *library, const char *name) { *kernel = image; return OK; }
EXPORT int cudaLibraryUnload(void *library) { return OK; }
EXPORT int cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) { return OK; }
EXPORT int cudaFuncGetAttributes(char *attributes, const void *function) { /* shared, constant, local bytes; threads, registers, PTX, code, ... */
    int code = code_for_card();
    memset(attributes, 0, 64);
    if (!code) return say(NO_KERNEL_IMAGE);
    int figures[] = {1024, 32, code, code, 0, card()->shared_block};
    memcpy(attributes + 24, figures, sizeof figures);
    return OK;
}
EXPORT int cudaFuncSetAttribute(const void *function, int attribute, int value) { return attribute == 8 && value > card()->shared_block ? say(INVALID_VALUE) : OK; }
EXPORT int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int threads, size_t shared, unsigned flags) {
    const Card *c = card();
    int most = c->threads / (threads > 0 ? (threads + 31) / 32 * 32 : 32);
    if (shared && c->shared_multiprocessor / (int)(shared + 1024) < most) most = c->shared_multiprocessor / (int)(shared + 1024);
    if (most > c->blocks) most = c->blocks;
    *blocks = most > 0 ? most : 1;
    return OK;
}
EXPORT int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads, size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, shared, 0);
}
static int entry_point(const char *name, void **found, int *status) {
    *found = card_driver_function(name);
    if (status) *status = *found ? 0 : 1;
    return OK;
}
EXPORT int cudaGetDriverEntryPoint(const char *name, void **found, unsigned long long flags, int *status) { return entry_point(name, found, status); }
EXPORT int cudaGetDriverEntryPointByVersion(const char *name, void **found, unsigned version, unsigned long long flags, int *status) { return entry_point(name, found, status); }

/* For Python, through ctypes: launches of kernels in whose name a text occurs (of all kernels: NULL). */
EXPORT long card_launches(const char *part) {
    if (!part) return launches;
    long sum = 0;
    for (size_t i = 0; i < kernel_slots; i++)
        if (kernels[i].host && strstr(kernels[i].name, part)) sum += kernels[i].launches;
    return sum;
}
