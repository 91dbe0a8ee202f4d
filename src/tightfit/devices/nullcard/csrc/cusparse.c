/* libcusparse: products with sparse matrices are kernels: they are not run, and need no scratch memory (assumed: the real
   sizes are not published). Products whose sizes depend on numbers are refused. */
#include "card.h"
#include <stdlib.h>

#define MADE(name, ...) EXPORT int cusparse##name(void **made, __VA_ARGS__) { *made = calloc(1, 64); return OK; }
#define NONE(name, ...) EXPORT int cusparse##name(__VA_ARGS__, size_t *bytes) { *bytes = 0; return card_unmodelled(__func__, OK); }

EXPORT int cusparseCreate(void **handle) { *handle = calloc(1, 64); return OK; }
EXPORT int cusparseDestroy(void *handle) { free(handle); return OK; }
EXPORT const char *cusparseGetErrorString(int status) { return status == 10 ? "not supported by the null card" : status ? "an error" : "success"; }
EXPORT int cusparseCreateMatDescr(void **made) { *made = calloc(1, 64); return OK; }
EXPORT int cusparseDestroyMatDescr(void *made) { free(made); return OK; }
MADE(CreateCsr, int64_t rows, int64_t columns, int64_t count, void *offsets, void *places, void *values, int of_offsets, int of_places, int base, int type)
MADE(CreateCoo, int64_t rows, int64_t columns, int64_t count, void *in_rows, void *in_columns, void *values, int of_places, int base, int type)
MADE(CreateDnMat, int64_t rows, int64_t columns, int64_t pitch, void *values, int type, int order)
MADE(CreateDnVec, int64_t size, void *values, int type)
EXPORT int cusparseDestroySpMat(void *made) { free(made); return OK; }
EXPORT int cusparseDestroyDnMat(void *made) { free(made); return OK; }
EXPORT int cusparseDestroyDnVec(void *made) { free(made); return OK; }
NONE(SpMM_bufferSize, void *handle, int turned_a, int turned_b, void *alpha, void *a, void *b, void *beta, void *c, int within, int algorithm)
NONE(SpMV_bufferSize, void *handle, int turned, void *alpha, void *a, void *x, void *beta, void *y, int within, int algorithm)
NONE(SDDMM_bufferSize, void *handle, int turned_a, int turned_b, void *alpha, void *a, void *b, void *beta, void *c, int within, int algorithm)
NONE(Xcoosort_bufferSizeExt, void *handle, int rows, int columns, int count, void *in_rows, void *in_columns)
NONE(Xcsrsort_bufferSizeExt, void *handle, int rows, int columns, int count, void *offsets, void *places)
