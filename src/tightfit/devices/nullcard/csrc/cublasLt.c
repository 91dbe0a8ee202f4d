/* libcublasLt: one algorithm is found for every product, and it needs no workspace (assumed: the real heuristics are closed). */
#include "card.h"
#include <stdlib.h>
#include <string.h>

EXPORT size_t cublasLtGetVersion(void) { return card()->cuda / 1000 * 10000 + 100; }
EXPORT int cublasLtCreate(void **handle) { *handle = calloc(1, 64); return OK; }
EXPORT int cublasLtDestroy(void *handle) { free(handle); return OK; }
EXPORT int cublasLtMatmulDescCreate(void **made, int compute, int type) { *made = calloc(1, 1024); return OK; }
EXPORT int cublasLtMatmulDescDestroy(void *made) { free(made); return OK; }
EXPORT int cublasLtMatrixLayoutCreate(void **made, int type, uint64_t rows, uint64_t columns, int64_t pitch) { *made = calloc(1, 1024); return OK; }
EXPORT int cublasLtMatrixLayoutDestroy(void *made) { free(made); return OK; }
EXPORT int cublasLtMatmulPreferenceCreate(void **made) { *made = calloc(1, 1024); return OK; }
EXPORT int cublasLtMatmulPreferenceDestroy(void *made) { free(made); return OK; }
typedef struct { uint64_t algorithm[8]; size_t workspace; int state; float waves; int reserved[4]; } Found; /* cublasLtMatmulHeuristicResult_t */
EXPORT int cublasLtMatmulAlgoGetHeuristic(void *handle, void *product, void *a, void *b, void *c, void *d, void *preference, int wanted, Found *found, int *count) {
    for (int i = 0; i < wanted; i++) {
        memset(&found[i], 0, sizeof *found);
        found[i].waves = 1;
    }
    *count = wanted > 0;
    return OK;
}
