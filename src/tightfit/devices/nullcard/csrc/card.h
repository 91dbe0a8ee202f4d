/* The null card: what all stub libraries share. It lives in libcuda.so.1, with which every other library is linked.

   Memory of the device is host memory that is reserved and not touched. Copies and fills are real. Kernels are not run.
   CUDA's own headers are not needed: what follows is the part of its binary interface that PyTorch uses, CUDA 12 and 13. */
#pragma once
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))
#define PAGE_UNIT ((size_t)2 << 20) /* cudaMalloc and cuMemCreate give memory in units of 2 MiB */

enum { /* the same numbers in cudaError_t and CUresult, but for the last but one */
    OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONFIGURATION = 9, INVALID_SYMBOL = 13, NO_DEVICE = 100,
    INVALID_DEVICE = 101, NO_KERNEL_IMAGE = 209, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600,
    ALREADY_REGISTERED = 712, NOT_SUPPORTED = 801, CAPTURE_UNSUPPORTED = 900,
};
enum { UNKNOWN = 0, PINNED = 1, DEVICE = 2 }; /* kinds of memory */
enum { LATE_NONE = 0, LATE_SIDE = 1, LATE_MAIN = 2 };

/* What TIGHTFIT_NULLCARD says: "key=value;key=value". Sizes in bytes. */
typedef struct {
    char name[256];
    size_t memory, context;
    int count, physical;                     /* cards that CUDA_VISIBLE_DEVICES leaves, and all of them */
    int capability, multiprocessors;
    int shared_block, shared_multiprocessor; /* most shared memory of a block (opt-in), of a multiprocessor */
    int threads, blocks;                     /* most threads and blocks of a multiprocessor */
    int cuda;                                /* 12080, 13000: the version of the runtime that PyTorch was built for */
    int cudnn;                               /* 92000: the version of cuDNN that PyTorch was built with */
    int late;                                /* which streams' work happens only when something waits for it */
    size_t copies;                           /* larger copies are skipped */
    size_t cudnn_workspace;                  /* that an engine of cuDNN's is said to need */
    int built[64], built_count;              /* capabilities for which the installed PyTorch has code */
} Card;
const Card *card(void);

/* Calls that no function models are counted under their name. */
int card_unmodelled(const char *name, int result);

/* Bytes of one number of a cudaDataType: R_32F, R_64F, R_16F, R_8I, C_32F, C_64F, C_16F; bf16 is 14, and 15 in pairs. */
static inline size_t bytes_of(int type) {
    static const unsigned char sizes[] = {4, 8, 2, 1, 8, 16, 4, 2};
    return type < 8 ? sizes[type] : type == 14 ? 2 : type == 15 ? 4 : 1;
}

/* Whether somebody computes: libraries may then move numbers that nobody would read otherwise. */
int card_has_values(void);

int card_current(void);
void card_set_current(int device);

/* Memory: NULL where the card, or the host, has no more. */
void *card_allocate(size_t bytes);
int card_free(void *address);
int card_account(int device, int64_t bytes);  /* 0, or OUT_OF_MEMORY */
void card_memory(int device, size_t *available, size_t *total);
void *card_pin(size_t bytes);
void card_populate(const void *address, size_t bytes);
int card_unpin(void *address);
void card_add_range(void *address, size_t bytes, int kind, int device);
int card_remove_range(void *address);
int card_find(const void *address, void **base, size_t *bytes, int *device);  /* the kind of memory */

/* Streams: work of a stream happens in its order, at once or late (see card.c). A stream is CUDA's handle. */
typedef struct Stream Stream;
typedef struct Event Event;
typedef void (*HostWork)(void *data);
Stream *card_stream(int flags, int priority);
void card_stream_end(Stream *stream);
int card_stream_priority(Stream *stream);
int card_stream_flags(Stream *stream);
int card_copy(void *target, const void *source, size_t bytes, Stream *stream, int waits);
int card_copy_rows(void *target, size_t target_pitch, const void *source, size_t source_pitch, size_t width, size_t rows, Stream *stream);
int card_fill(void *target, unsigned value, int width, size_t count, Stream *stream);
int card_host_work(HostWork work, void *data, Stream *stream);
int card_wait_stream(Stream *stream);
int card_query_stream(Stream *stream);
int card_wait_device(void);
Event *card_event(void);
void card_event_end(Event *event);
int card_record(Event *event, Stream *stream);
int card_wait_event(Event *event);
int card_query_event(Event *event);
int card_stream_waits(Stream *stream, Event *event);
float card_milliseconds(Event *from, Event *to);

/* Graphs: a list of work in the order in which it was captured. */
typedef struct Graph Graph;
int card_capture(Stream *stream, Graph *graph);
Graph *card_capture_end(Stream *stream);
int card_capturing(Stream *stream, unsigned long long *id, Graph **graph);
size_t card_graph_nodes(Graph *graph);
Graph *card_graph_share(Graph *graph);
void card_graph_end(Graph *graph);
int card_graph_launch(Graph *graph, Stream *stream);

int card_attribute(int attribute, int device);
void *card_driver_function(const char *name);
