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
EXPORT int cublasGetVersion_v2(Handle *handle, int *version) { *version = card()->cuda / 1000 * 10000 + 100; return OK; }
EXPORT const char *cublasGetStatusString(int status) { return status == 15 ? "not supported by the null card" : status ? "an error" : "success"; }
