/* libcublas: handles remember what they are told. Products are kernels: they are not run. */
#include "card.h"
#include <stdlib.h>

typedef struct { void *stream; int math, pointers; } Handle;
EXPORT int cublasCreate_v2(Handle **handle) { *handle = calloc(1, sizeof **handle); return OK; }
EXPORT int cublasDestroy_v2(Handle *handle) { free(handle); return OK; }
EXPORT int cublasSetStream_v2(Handle *handle, void *stream) { handle->stream = stream; return OK; }
EXPORT int cublasGetStream_v2(Handle *handle, void **stream) { *stream = handle->stream; return OK; }
EXPORT int cublasSetMathMode(Handle *handle, int mode) { handle->math = mode; return OK; }
EXPORT int cublasGetMathMode(Handle *handle, int *mode) { *mode = handle->math; return OK; }
EXPORT int cublasSetPointerMode_v2(Handle *handle, int mode) { handle->pointers = mode; return OK; }
EXPORT int cublasGetPointerMode_v2(Handle *handle, int *mode) { *mode = handle->pointers; return OK; }
EXPORT int cublasSetWorkspace_v2(Handle *handle, void *workspace, size_t bytes) { return OK; }
/* Batches of factorisations say on the host whether their arguments were right, and on the card whether they succeeded. */
#define EVERY(define) define(S) define(D) define(C) define(Z)
#define DEFINE(T) \
    EXPORT int cublas##T##geqrfBatched(Handle *handle, int m, int n, void **a, int lda, void **tau, int *said, int batch) { *said = 0; return OK; } \
    EXPORT int cublas##T##getrsBatched(Handle *handle, int turned, int n, int count, void **a, int lda, int *pivots, void **b, int ldb, int *said, int batch) { *said = 0; return OK; } \
    EXPORT int cublas##T##getrfBatched(Handle *handle, int n, void **a, int lda, int *pivots, int *info, int batch) { return card_fill(info, 0, sizeof *info, batch, handle->stream); } \
    EXPORT int cublas##T##gelsBatched(Handle *handle, int turned, int m, int n, int count, void **a, int lda, void **c, int ldc, int *said, int *info, int batch) { \
        *said = 0; \
        return info ? card_fill(info, 0, sizeof *info, batch, handle->stream) : OK; \
    }
EVERY(DEFINE)
EXPORT int cublasGetVersion_v2(Handle *handle, int *version) { *version = card()->cuda / 1000 * 10000 + 100; return OK; }
EXPORT const char *cublasGetStatusString(int status) { return status == 15 ? "not supported by the null card" : status ? "an error" : "success"; }
