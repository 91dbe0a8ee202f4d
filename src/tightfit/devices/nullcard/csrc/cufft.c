/* libcufft: a plan needs the least work area that NVIDIA's manual names, one complex number for each of its transforms'
   elements (assumed: it says up to eight, and not when). Transforms are kernels: they are not run. */
#include "card.h"

static int plans;

EXPORT int cufftCreate(int *plan) { *plan = __atomic_add_fetch(&plans, 1, __ATOMIC_RELAXED); return OK; }
EXPORT int cufftDestroy(int plan) { return OK; }
EXPORT int cufftSetAutoAllocation(int plan, int allocates) { return OK; }
EXPORT int cufftSetStream(int plan, void *stream) { return OK; }
EXPORT int cufftSetWorkArea(int plan, void *area) { return OK; }
EXPORT int cufftXtExec(int plan, void *input, void *output, int direction) { return OK; }
EXPORT int cufftXtMakePlanMany(int plan, int rank, long long *n, long long *in, long long in_stride, long long in_distance, int in_type,
                               long long *out, long long out_stride, long long out_distance, int out_type, long long batch, size_t *bytes, int type) {
    size_t elements = batch;
    for (int i = 0; i < rank; i++) elements *= n[i];
    *bytes = elements * bytes_of(type);
    return card_unmodelled(__func__, OK);
}
