/* libcudnn: descriptors are opaque. Of its graph interface there is as much as a frontend needs to find one engine. For
   convolutions it is said to need `cudnn_workspace` bytes (assumed: the real heuristics are closed), for attention what an
   H200 was seen to take. */
#include "card.h"
#include "cudnn_rnn.h"
#include <stdlib.h>
#include <string.h>

EXPORT size_t cudnnGetVersion(void) { return card()->cudnn; }
EXPORT size_t cudnnGetCudartVersion(void) { return card()->cuda; }
EXPORT int cudnnGetProperty(int kind, int *value) {
    int version = card()->cudnn;
    *value = kind == 0 ? version / 10000 : kind == 1 ? version / 100 % 100 : version % 100;
    return OK;
}
EXPORT const char *cudnnGetErrorString(int status) { return status == 3000 ? "not supported by the null card" : status ? "an error" : "success"; }
EXPORT void cudnnGetLastErrorString(char *text, size_t room) { if (room) *text = 0; }
EXPORT int cudnnCreate(void **handle) { *handle = calloc(1, 64); return OK; }
EXPORT int cudnnDestroy(void *handle) { free(handle); return OK; }
EXPORT int cudnnSetStream(void **handle, void *stream) { handle[0] = stream; return OK; }
EXPORT int cudnnGetStream(void **handle, void **stream) { *stream = handle[0]; return OK; }
#define DESCRIPTOR(name) \
    EXPORT int cudnnCreate##name##Descriptor(void **made) { *made = calloc(1, 512); return OK; } \
    EXPORT int cudnnDestroy##name##Descriptor(void *made) { free(made); return OK; }
DESCRIPTOR(Tensor) DESCRIPTOR(Filter) DESCRIPTOR(Convolution) DESCRIPTOR(Dropout) DESCRIPTOR(RNN) DESCRIPTOR(RNNData)
DESCRIPTOR(Activation) DESCRIPTOR(Pooling) DESCRIPTOR(CTCLoss) DESCRIPTOR(SpatialTransformer)

/* Sizes are answered with the assumed workspace, so that none is left to chance. */
#define WORKSPACE(bytes) do { *(bytes) = card()->cudnn_workspace; return card_unmodelled(__func__, OK); } while (0)
EXPORT int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *h, int m, int o, void *x, void *z, void *y, void *b, void *a, size_t *bytes) { WORKSPACE(bytes); }
EXPORT int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *h, int m, int o, void *x, void *y, void *dy, void *dz, void *dx, void *b, void *a, size_t *bytes) { WORKSPACE(bytes); }
EXPORT int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *h, int m, int o, void *a, void *x, size_t *bytes) { WORKSPACE(bytes); }
EXPORT int cudnnGetCTCLossWorkspaceSize_v8(void *h, int algorithm, void *d, void *p, void *g, size_t *bytes) { WORKSPACE(bytes); }

/* The graph interface: descriptors with attributes. */
typedef struct { int name; int64_t count; size_t size; void *data; } Attribute;
typedef struct { int type, count; Attribute attributes[64]; } Descriptor;
static size_t size_of(int type) { /* cudnnBackendAttributeType_t */
    switch (type) {
    case 0: case 3: case 5: case 6: case 15: return 8; /* handle, int64, double, pointer, descriptor */
    case 2: case 24: return 1;                         /* boolean, char */
    default: return 4;
    }
}
enum { CONVOLUTION_FORWARD = 10, CONVOLUTION_BACKWARD_DATA = 12, GRAPH = 15, TENSOR = 17, MATMUL = 22, ATTENTION_ENGINE = 512 };
enum { FORWARD_PRODUCTS = 2, DIMENSIONS = 902 };
static _Thread_local int64_t workspace; /* of the graph that this thread describes: its operations come before its plan */
static _Thread_local struct { int64_t products, heads, fewest, smallest, largest; } attention; /* of that graph's tensors (B, H, L, D) */
static int64_t for_attention(void) {
    /* With fewer heads of keys than of queries, the gradients of keys and values for every head, in 16 bits (on the H200). */
    if (attention.products <= FORWARD_PRODUCTS || !attention.fewest || attention.fewest == attention.heads) return ATTENTION_ENGINE;
    return ATTENTION_ENGINE + 2 * (attention.smallest + attention.largest) * (attention.heads / attention.fewest);
}
static void note_dimensions(const int64_t *sizes) {
    int64_t elements = sizes[0] * sizes[1] * sizes[2] * sizes[3];
    if (elements == 1) return; /* a number: a seed, a scale */
    if (sizes[1] > attention.heads) attention.heads = sizes[1];
    if (!attention.fewest || sizes[1] < attention.fewest) {
        attention.fewest = sizes[1];
        attention.smallest = attention.largest = elements;
    } else if (sizes[1] == attention.fewest) {
        if (elements < attention.smallest) attention.smallest = elements;
        if (elements > attention.largest) attention.largest = elements;
    }
}
EXPORT int cudnnBackendCreateDescriptor(int type, Descriptor **made) {
    *made = calloc(1, sizeof **made);
    (*made)->type = type;
    if (type == MATMUL) attention.products++;
    if (type >= CONVOLUTION_FORWARD && type <= CONVOLUTION_BACKWARD_DATA) workspace = (int64_t)card()->cudnn_workspace;
    else if (type > TENSOR) workspace = ATTENTION_ENGINE; /* products, reductions and the operations made for attention */
    else if (type == GRAPH) {
        if (workspace == ATTENTION_ENGINE) workspace = for_attention();
        memset(&attention, 0, sizeof attention);
    }
    return OK;
}
EXPORT int cudnnBackendDestroyDescriptor(Descriptor *descriptor) {
    if (!descriptor) return OK;
    for (int i = 0; i < descriptor->count; i++) free(descriptor->attributes[i].data);
    free(descriptor);
    return OK;
}
EXPORT int cudnnBackendFinalize(Descriptor *descriptor) { return OK; }
EXPORT int cudnnBackendExecute(void *handle, Descriptor *plan, Descriptor *variables) { return OK; }
EXPORT int cudnnBackendSetAttribute(Descriptor *descriptor, int name, int type, int64_t count, const void *data) {
    int at = 0;
    while (at < descriptor->count && descriptor->attributes[at].name != name) at++;
    if (at == 64) return card_unmodelled(__func__, OK);
    Attribute *attribute = &descriptor->attributes[at];
    if (at == descriptor->count) descriptor->count++; else free(attribute->data);
    *attribute = (Attribute){name, count, size_of(type), malloc(size_of(type) * count + 1)};
    if (data) memcpy(attribute->data, data, attribute->size * count);
    if (data && descriptor->type == TENSOR && name == DIMENSIONS && count == 4) note_dimensions(data);
    return OK;
}
enum { HEURISTIC_RESULTS = 202, CONFIG_ENGINE = 300, CONFIG_WORKSPACE = 303, CONFIG_SHARED = 304, PLAN_WORKSPACE = 402, ENGINE_INDEX = 1301 };
EXPORT int cudnnBackendGetAttribute(Descriptor *descriptor, int name, int type, int64_t wanted, int64_t *got, void *data) {
    int64_t ignored;
    if (!got) got = &ignored;
    *got = 1;
    switch (name) {
    case HEURISTIC_RESULTS: case CONFIG_ENGINE: return OK; /* the caller's descriptors are the result */
    case PLAN_WORKSPACE: case CONFIG_WORKSPACE: if (data && wanted) *(int64_t *)data = workspace; return OK;
    case CONFIG_SHARED: if (data && wanted) *(int *)data = 0; return OK;
    case ENGINE_INDEX: if (data && wanted) *(int64_t *)data = 0; return OK;
    }
    *got = 0;
    for (int i = 0; i < descriptor->count; i++) {
        Attribute *attribute = &descriptor->attributes[i];
        if (attribute->name != name) continue;
        *got = attribute->count;
        if (data) memcpy(data, attribute->data, attribute->size * (wanted < attribute->count ? wanted : attribute->count));
    }
    return OK;
}
