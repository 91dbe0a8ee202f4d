/* cuDNN's recurrent networks: where the weights lie in their common memory, and the sizes of what a call keeps. cuDNN says
   how much it keeps for backward and needs meanwhile; that is not published, so a number for each gate and state is assumed. */
#pragma once
#include "card.h"

typedef struct { int type, count, sizes[8], strides[8]; } Tensor;
typedef struct { int kind, directions, type, input, hidden, projected, layers; } Recurrent;
typedef struct { int type, steps, rows, width; } Sequence;
enum { LSTM = 2, GRU = 3 };

static int gates(const Recurrent *r) { return r->kind == LSTM ? 4 : r->kind == GRU ? 3 : 1; }
static int is_projected(const Recurrent *r) { return r->projected != r->hidden; }
static size_t of_number(int type) { return type == 1 ? 8 : type == 2 || type == 9 ? 2 : 4; } /* cudnnDataType_t */
static size_t columns(const Recurrent *r, int layer) { return layer < r->directions ? r->input : r->projected * r->directions; }
static size_t of_matrices(const Recurrent *r, int layer) {
    size_t projection = is_projected(r) ? (size_t)r->projected * r->hidden : 0;
    return (size_t)gates(r) * r->hidden * (columns(r, layer) + r->projected) + projection;
}
static size_t all_matrices(const Recurrent *r, int layers) {
    size_t found = 0;
    for (int layer = 0; layer < layers; layer++) found += of_matrices(r, layer);
    return found;
}

EXPORT int cudnnSetTensorNdDescriptor(Tensor *made, int type, int count, const int *sizes, const int *strides) {
    made->type = type;
    made->count = count;
    for (int i = 0; i < count && i < 8; i++) { made->sizes[i] = sizes[i]; made->strides[i] = strides[i]; }
    return OK;
}
EXPORT int cudnnGetTensorNdDescriptor(Tensor *made, int wanted, int *type, int *count, int *sizes, int *strides) {
    *type = made->type;
    *count = made->count;
    for (int i = 0; i < made->count && i < wanted; i++) { sizes[i] = made->sizes[i]; strides[i] = made->strides[i]; }
    return OK;
}
EXPORT int cudnnSetRNNDescriptor_v8(Recurrent *made, int algorithm, int kind, int bias, int direction, int input_mode, int type, int precision, int math, int32_t input, int32_t hidden, int32_t projected, int32_t layers, void *dropout, uint32_t flags) {
    *made = (Recurrent){kind, direction ? 2 : 1, type, input, hidden, projected ? projected : hidden, layers};
    return OK;
}
EXPORT int cudnnSetRNNDataDescriptor(Sequence *made, int type, int layout, int steps, int rows, int width, const int *lengths, void *fill) {
    *made = (Sequence){type, steps, rows, width};
    return OK;
}
EXPORT int cudnnGetRNNWeightSpaceSize(void *handle, Recurrent *r, size_t *bytes) {
    int layers = r->layers * r->directions;
    *bytes = of_number(r->type) * (all_matrices(r, layers) + (size_t)layers * 2 * gates(r) * r->hidden);
    return OK;
}
/* Matrices of all layers, then biases of all layers; in each layer those of its input, then those of its state. */
EXPORT int cudnnGetRNNWeightParams(void *handle, Recurrent *r, int32_t layer, size_t bytes, char *weights, int32_t which, Tensor *matrix, void **at, Tensor *bias, void **bias_at) {
    int of_input = which < gates(r), is_projection = which == 2 * gates(r), whole = r->layers * r->directions;
    size_t number = of_number(r->type), width = is_projection ? r->hidden : of_input ? columns(r, layer) : r->projected;
    if (matrix) {
        size_t before = of_input ? which * r->hidden * columns(r, layer) : gates(r) * r->hidden * columns(r, layer) + (size_t)(which - gates(r)) * r->hidden * r->projected;
        *matrix = (Tensor){r->type, 3, {1, is_projection ? r->projected : r->hidden, (int)width}, {1, (int)width, 1}};
        *at = weights + number * (all_matrices(r, layer) + before);
    }
    if (bias) {
        *bias = (Tensor){r->type, 3, {1, r->hidden, 1}, {r->hidden, 1, 1}};
        *bias_at = weights + number * (all_matrices(r, whole) + ((size_t)layer * 2 * gates(r) + which) * r->hidden);
    }
    return OK;
}
EXPORT int cudnnGetRNNTempSpaceSizes(void *handle, Recurrent *r, int mode, Sequence *x, size_t *meanwhile, size_t *kept) {
    size_t one = of_number(r->type) * x->steps * x->rows * r->hidden * r->directions;
    if (meanwhile) *meanwhile = one * gates(r);
    if (kept) *kept = mode ? one * r->layers * (gates(r) + (r->kind == LSTM ? 2 : 1)) : 0;
    return card_unmodelled(__func__, OK);
}
EXPORT int cudnnDropoutGetStatesSize(void *handle, size_t *bytes) { *bytes = (size_t)card()->multiprocessors * card()->threads * 12; return card_unmodelled(__func__, OK); }
