/* libcuda.so.1: the driver, as far as PyTorch and Triton ask for it. */
#define _GNU_SOURCE
#include "card.h"
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef unsigned long long Address; /* CUdeviceptr */
void *card_reserve(size_t bytes);
void card_count_node(Stream *stream);

EXPORT int cuInit(unsigned flags) { return card()->count ? OK : NO_DEVICE; }
EXPORT int cuDriverGetVersion(int *version) { *version = card()->cuda; return OK; }
EXPORT int cuGetErrorString(int error, const char **text) {
    *text = error == OUT_OF_MEMORY ? "out of memory" : error == NOT_SUPPORTED ? "operation not supported" : error ? "an error of the null card" : "no error";
    return OK;
}
EXPORT int cuGetErrorName(int error, const char **text) {
    *text = error == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : error == NOT_SUPPORTED ? "CUDA_ERROR_NOT_SUPPORTED" : error ? "CUDA_ERROR_UNKNOWN" : "CUDA_SUCCESS";
    return OK;
}

/* devices and contexts: a device has one context, whose handle says which device it is */
static int active;
static void *context_of(int device) { return (void *)(uintptr_t)(0x1000 + device); }
void card_activate(void) { active = 1; }
EXPORT int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal < card()->count ? OK : INVALID_DEVICE; }
EXPORT int cuDeviceGetCount(int *count) { *count = card()->count; return OK; }
EXPORT int cuDeviceGetName(char *name, int room, int device) { snprintf(name, room, "%s", card()->name); return OK; }
EXPORT int cuDeviceGetUuid(char *uuid, int device) { memset(uuid, 0x11, 16); uuid[15] = (char)device; return OK; }
EXPORT int cuDeviceGetUuid_v2(char *uuid, int device) { return cuDeviceGetUuid(uuid, device); }
EXPORT int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = card()->memory; return OK; }
EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = card_attribute(attribute, device); return OK; }
EXPORT int cuDeviceComputeCapability(int *major, int *minor, int device) { *major = card()->capability / 10; *minor = card()->capability % 10; return OK; }
EXPORT int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *is_active) { if (flags) *flags = 0; *is_active = active; return OK; }
EXPORT int cuDevicePrimaryCtxRetain(void **context, int device) { active = 1; *context = context_of(device); return OK; }
EXPORT int cuDevicePrimaryCtxRelease_v2(int device) { return OK; }
EXPORT int cuDevicePrimaryCtxReset_v2(int device) { return OK; }
EXPORT int cuDevicePrimaryCtxSetFlags_v2(int device, unsigned flags) { return OK; }
EXPORT int cuCtxGetCurrent(void **context) { *context = active ? context_of(card_current()) : NULL; return OK; }
EXPORT int cuCtxSetCurrent(void *context) { if (context) card_set_current((int)((uintptr_t)context - 0x1000)); return OK; }
static __thread int pushed[64], pushed_count;
EXPORT int cuCtxPushCurrent_v2(void *context) { if (pushed_count < 64) pushed[pushed_count++] = card_current(); return cuCtxSetCurrent(context); }
EXPORT int cuCtxPopCurrent_v2(void **context) { if (context) *context = context_of(card_current()); if (pushed_count) card_set_current(pushed[--pushed_count]); return OK; }
EXPORT int cuCtxGetDevice(int *device) { *device = card_current(); return OK; }
EXPORT int cuCtxSynchronize(void) { return card_wait_device(); }
EXPORT int cuCtxGetLimit(size_t *value, int limit) { *value = 1 << 20; return OK; }
EXPORT int cuCtxSetLimit(int limit, size_t value) { return OK; }

/* memory */
EXPORT int cuMemGetInfo_v2(size_t *available, size_t *total) { card_memory(card_current(), available, total); return OK; }
EXPORT int cuMemAlloc_v2(Address *address, size_t bytes) { *address = (Address)(uintptr_t)card_allocate(bytes); return *address ? OK : OUT_OF_MEMORY; }
EXPORT int cuMemFree_v2(Address address) { return address ? card_free((void *)(uintptr_t)address) : OK; }
EXPORT int cuMemGetAddressRange_v2(Address *base, size_t *bytes, Address address) {
    void *found;
    if (card_find((void *)(uintptr_t)address, &found, bytes, NULL) != DEVICE) return INVALID_VALUE;
    if (base) *base = (Address)(uintptr_t)found;
    return OK;
}
EXPORT int cuMemcpyHtoD_v2(Address target, const void *source, size_t bytes) { return card_copy((void *)(uintptr_t)target, source, bytes, NULL, 1); }
EXPORT int cuMemcpyDtoH_v2(void *target, Address source, size_t bytes) { return card_copy(target, (void *)(uintptr_t)source, bytes, NULL, 1); }
EXPORT int cuMemcpyHtoDAsync_v2(Address target, const void *source, size_t bytes, Stream *stream) { return card_copy((void *)(uintptr_t)target, source, bytes, stream, 0); }
EXPORT int cuMemcpyDtoHAsync_v2(void *target, Address source, size_t bytes, Stream *stream) { return card_copy(target, (void *)(uintptr_t)source, bytes, stream, 0); }
EXPORT int cuMemcpyDtoDAsync_v2(Address target, Address source, size_t bytes, Stream *stream) { return card_copy((void *)(uintptr_t)target, (void *)(uintptr_t)source, bytes, stream, 0); }
EXPORT int cuMemsetD8Async(Address target, unsigned char value, size_t count, Stream *stream) { return card_fill((void *)(uintptr_t)target, value, 1, count, stream); }
EXPORT int cuMemsetD16Async(Address target, unsigned short value, size_t count, Stream *stream) { return card_fill((void *)(uintptr_t)target, value, 2, count, stream); }
EXPORT int cuMemsetD32Async(Address target, unsigned value, size_t count, Stream *stream) { return card_fill((void *)(uintptr_t)target, value, 4, count, stream); }
EXPORT int cuStreamWriteValue32_v2(Stream *stream, Address target, uint32_t value, unsigned flags) { return card_fill((void *)(uintptr_t)target, value, 4, 1, stream); }
EXPORT int cuPointerGetAttribute(void *value, int attribute, Address address) {
    void *base;
    size_t bytes;
    int device = 0, kind = card_find((void *)(uintptr_t)address, &base, &bytes, &device);
    if (kind == UNKNOWN) return INVALID_VALUE;
    switch (attribute) {
    case 1: *(void **)value = context_of(device); return OK;
    case 2: *(unsigned *)value = kind == DEVICE ? 2 : 1; return OK;
    case 3: *(Address *)value = address; return OK;
    case 4: *(void **)value = (void *)(uintptr_t)address; return OK;
    case 7: *(unsigned long long *)value = (unsigned long long)(uintptr_t)base; return OK;
    case 8: *(unsigned *)value = 0; return OK; /* managed */
    case 9: *(int *)value = device; return OK;
    case 11: *(Address *)value = (Address)(uintptr_t)base; return OK;
    case 12: *(size_t *)value = bytes; return OK;
    default: *(int *)value = 0; return card_unmodelled("cuPointerGetAttribute", OK);
    }
}

/* virtual memory, for segments that expand: reserved addresses and mapped pieces */
typedef struct { size_t bytes; int device, mapped, released; char properties[64]; } Handle;
typedef struct Mapping { char *at; size_t bytes; Handle *handle; struct Mapping *next; } Mapping;
static Mapping *mappings;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void forget(Handle *handle) {
    if (!handle->released || handle->mapped) return;
    card_account(handle->device, -(int64_t)handle->bytes);
    free(handle);
}
EXPORT int cuMemGetAllocationGranularity(size_t *bytes, const void *properties, int option) { *bytes = PAGE_UNIT; return OK; }
EXPORT int cuMemAddressReserve(Address *address, size_t bytes, size_t alignment, Address wanted, unsigned long long flags) {
    void *base = card_reserve(bytes);
    if (!base) return OUT_OF_MEMORY;
    *address = (Address)(uintptr_t)base;
    card_add_range(base, bytes, DEVICE, card_current());
    return OK;
}
EXPORT int cuMemAddressFree(Address address, size_t bytes) {
    card_remove_range((void *)(uintptr_t)address);
    munmap((void *)(uintptr_t)address, bytes);
    return OK;
}
EXPORT int cuMemCreate(Handle **made, size_t bytes, const char *properties, unsigned long long flags) {
    int location = *(const int *)(properties + 8), device = *(const int *)(properties + 12); /* CUmemAllocationProp.location */
    if (location != 1) device = card_current();
    if (card_account(device, bytes)) return OUT_OF_MEMORY;
    Handle *handle = calloc(1, sizeof *handle);
    handle->bytes = bytes;
    handle->device = device;
    memcpy(handle->properties, properties, 32);
    *made = handle;
    return OK;
}
EXPORT int cuMemRelease(Handle *handle) {
    pthread_mutex_lock(&lock);
    handle->released = 1;
    forget(handle);
    pthread_mutex_unlock(&lock);
    return OK;
}
EXPORT int cuMemMap(Address address, size_t bytes, size_t offset, Handle *handle, unsigned long long flags) {
    pthread_mutex_lock(&lock);
    Mapping *mapping = malloc(sizeof *mapping);
    *mapping = (Mapping){(char *)(uintptr_t)address, bytes, handle, mappings};
    mappings = mapping;
    handle->mapped++;
    pthread_mutex_unlock(&lock);
    return OK;
}
EXPORT int cuMemSetAccess(Address address, size_t bytes, const void *access, size_t count) {
    return mprotect((void *)(uintptr_t)address, bytes, PROT_READ | PROT_WRITE) ? INVALID_VALUE : OK;
}
EXPORT int cuMemUnmap(Address address, size_t bytes) {
    char *from = (char *)(uintptr_t)address;
    card_wait_device();
    pthread_mutex_lock(&lock);
    for (Mapping **at = &mappings; *at;) {
        Mapping *mapping = *at;
        if (mapping->at >= from && mapping->at < from + bytes) {
            *at = mapping->next;
            mapping->handle->mapped--;
            forget(mapping->handle);
            free(mapping);
        } else at = &mapping->next;
    }
    pthread_mutex_unlock(&lock);
    madvise(from, bytes, MADV_DONTNEED);
    return mprotect(from, bytes, PROT_NONE) ? INVALID_VALUE : OK;
}
EXPORT int cuMemGetAllocationPropertiesFromHandle(char *properties, Handle *handle) { memcpy(properties, handle->properties, 32); return OK; }
EXPORT int cuMemRetainAllocationHandle(Handle **handle, void *address) {
    for (Mapping *mapping = mappings; mapping; mapping = mapping->next)
        if (mapping->at <= (char *)address && (char *)address < mapping->at + mapping->bytes) { *handle = mapping->handle; return OK; }
    return INVALID_VALUE;
}

/* modules and their kernels: nothing is loaded and nothing runs */
static char module[16], function[16];
static long launches;
EXPORT int cuModuleLoad(void **made, const char *file) { *made = module; return OK; }
EXPORT int cuModuleLoadData(void **made, const void *image) { *made = module; return OK; }
EXPORT int cuModuleLoadDataEx(void **made, const void *image, unsigned count, void *options, void **values) { *made = module; return OK; }
EXPORT int cuModuleUnload(void *made) { return OK; }
EXPORT int cuModuleGetFunction(void **made, void *from, const char *name) { *made = function; return OK; }
EXPORT int cuModuleGetGlobal_v2(Address *address, size_t *bytes, void *from, const char *name) {
    static char room[4096];
    *address = (Address)(uintptr_t)room;
    if (bytes) *bytes = sizeof room;
    return OK;
}
EXPORT int cuFuncGetModule(void **made, void *from) { *made = module; return OK; }
EXPORT int cuFuncGetAttribute(int *value, int attribute, void *of) { *value = attribute == 0 ? 1024 : attribute == 4 ? 32 : 0; return OK; }
EXPORT int cuFuncSetAttribute(void *of, int attribute, int value) { return attribute == 8 && value > card()->shared_block ? INVALID_VALUE : OK; }
EXPORT int cuFuncSetCacheConfig(void *of, int wanted) { return OK; }
static int launched(Stream *stream, unsigned shared) {
    __atomic_add_fetch(&launches, 1, __ATOMIC_RELAXED);
    card_count_node(stream);
    return shared > (unsigned)card()->shared_block ? INVALID_VALUE : OK;
}
EXPORT int cuLaunchKernel(void *of, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, Stream *stream, void **arguments, void **extra) { return launched(stream, shared); }
EXPORT int cuLaunchCooperativeKernel(void *of, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, Stream *stream, void **arguments) { return launched(stream, shared); }
EXPORT int cuLaunchKernelEx(const unsigned *config, void *of, void **arguments, void **extra) { /* CUlaunchConfig: six sizes, shared bytes, the stream */
    Stream *stream;
    memcpy(&stream, (const char *)config + 32, sizeof stream);
    return launched(stream, config[6]);
}
EXPORT int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *of, int threads, size_t shared) { int most = card()->threads / (threads > 0 ? threads : 1); *blocks = most > 0 ? most : 1; return OK; }
EXPORT int cuOccupancyMaxActiveClusters(int *clusters, void *of, const void *config) { *clusters = 1; return OK; }
EXPORT int cuTensorMapEncodeTiled(void *map, int type, unsigned rank, void *address, const void *a, const void *b, const void *c, const void *d, int e, int f, int g, int h) { memset(map, 0, 128); return OK; }
EXPORT int cuLinkCreate_v2(unsigned count, void *options, void **values, void **state) { *state = module; return OK; }
EXPORT int cuLinkAddData_v2(void *state, int type, void *data, size_t bytes, const char *name, unsigned count, void *options, void **values) { return OK; }
EXPORT int cuLinkComplete(void *state, void **image, size_t *bytes) { *image = module; *bytes = sizeof module; return OK; }
EXPORT int cuLinkDestroy(void *state) { return OK; }
EXPORT long card_driver_launches(void) { return launches; }

/* streams and events that Triton and others make through the driver */
EXPORT int cuStreamCreate(Stream **stream, unsigned flags) { *stream = card_stream((int)flags, 0); return OK; }
EXPORT int cuStreamDestroy_v2(Stream *stream) { card_stream_end(stream); return OK; }
EXPORT int cuStreamSynchronize(Stream *stream) { return card_wait_stream(stream); }
EXPORT int cuStreamGetCtx(Stream *stream, void **context) { *context = context_of(card_current()); return OK; }
EXPORT int cuStreamIsCapturing(Stream *stream, int *status) { *status = card_capturing(stream, NULL, NULL); return OK; }
EXPORT int cuStreamWaitEvent(Stream *stream, Event *event, unsigned flags) { return card_stream_waits(stream, event); }
EXPORT int cuEventCreate(Event **event, unsigned flags) { *event = card_event(); return OK; }
EXPORT int cuEventDestroy_v2(Event *event) { card_event_end(event); return OK; }
EXPORT int cuEventRecord(Event *event, Stream *stream) { return card_record(event, stream); }
EXPORT int cuEventSynchronize(Event *event) { return card_wait_event(event); }
EXPORT int cuEventQuery(Event *event) { return card_query_event(event); }
EXPORT int cuEventElapsedTime(float *time, Event *from, Event *to) { *time = card_milliseconds(from, to); return OK; }

EXPORT void *card_driver_function(const char *name) {
    static const char *suffixes[] = {"", "_v2", "_v3"};
    void *self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    if (!self) return NULL;
    for (int i = 0; i < 3; i++) {
        char versioned[160];
        snprintf(versioned, sizeof versioned, "%s%s", name, suffixes[i]);
        void *found = dlsym(self, versioned);
        if (found) return found;
    }
    card_unmodelled(name, OK);
    return NULL;
}
EXPORT int cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *status) {
    *found = card_driver_function(name);
    if (status) *status = *found ? 0 : 1;
    return *found ? OK : NOT_FOUND;
}
