/* libcusolver: factorisations are kernels, which are not run: they report success where PyTorch will read it. Their sizes
   of scratch memory are those of LAPACK's blocked code with blocks of 64 (assumed: the real ones are not published). */
#include "card.h"
#include <stdlib.h>

typedef struct { Stream *stream; } Handle;
typedef long long Long;
enum { BLOCK = 64 };

EXPORT int cusolverDnCreate(Handle **handle) { *handle = calloc(1, sizeof **handle); return OK; }
EXPORT int cusolverDnDestroy(Handle *handle) { free(handle); return OK; }
EXPORT int cusolverDnSetStream(Handle *handle, Stream *stream) { handle->stream = stream; return OK; }
EXPORT int cusolverDnCreateParams(void **made) { *made = calloc(1, 64); return OK; }
EXPORT int cusolverDnDestroyParams(void *made) { free(made); return OK; }
EXPORT int cusolverDnCreateGesvdjInfo(void **made) { *made = calloc(1, 64); return OK; }
EXPORT int cusolverDnDestroyGesvdjInfo(void *made) { free(made); return OK; }
EXPORT int cusolverDnXgesvdjSetMaxSweeps(void *info, int sweeps) { return OK; }
EXPORT int cusolverDnXgesvdjSetSortEig(void *info, int sorts) { return OK; }
EXPORT int cusolverDnXgesvdjSetTolerance(void *info, double tolerance) { return OK; }

static Long least(Long a, Long b) { return a < b ? a : b; }
static Long most(Long a, Long b) { return a > b ? a : b; }
static Long of_eigenvalues(Long n) { return 1 + 6 * n + 2 * n * n; }                     /* LAPACK's syevd with vectors */
static Long of_singular_values(Long m, Long n) { return 3 * least(m, n) + most(most(m, n), 4 * least(m, n) * (least(m, n) + 1)); } /* gesdd */

#define SIZE(elements) do { *size = (int)(elements); return card_unmodelled(__func__, OK); } while (0)
#define SIZES(elements, of) do { *device = (size_t)(elements) * bytes_of(of); *host = 0; return card_unmodelled(__func__, OK); } while (0)
#define SUCCEEDS(count) return card_fill(info, 0, sizeof *info, count, handle->stream)

/* S and D for real numbers, C and Z for complex ones, whose functions of orthogonal and symmetric matrices have names of
   their own. */
#define EVERY(define) define(S, or, sy) define(D, or, sy) define(C, un, he) define(Z, un, he)
#define DEFINE(T, OR, SY) \
    EXPORT int cusolverDn##T##geqrf_bufferSize(Handle *handle, int m, int n, void *a, int lda, int *size) { SIZE((Long)n * BLOCK); } \
    EXPORT int cusolverDn##T##geqrf(Handle *handle, int m, int n, void *a, int lda, void *tau, void *work, int room, int *info) { SUCCEEDS(1); } \
    EXPORT int cusolverDn##T##OR##gqr_bufferSize(Handle *handle, int m, int n, int k, void *a, int lda, void *tau, int *size) { SIZE((Long)n * BLOCK); } \
    EXPORT int cusolverDn##T##OR##gqr(Handle *handle, int m, int n, int k, void *a, int lda, void *tau, void *work, int room, int *info) { SUCCEEDS(1); } \
    EXPORT int cusolverDn##T##OR##mqr_bufferSize(Handle *handle, int side, int turned, int m, int n, int k, void *a, int lda, void *tau, void *c, int ldc, int *size) { SIZE((Long)(side ? m : n) * BLOCK); } \
    EXPORT int cusolverDn##T##OR##mqr(Handle *handle, int side, int turned, int m, int n, int k, void *a, int lda, void *tau, void *c, int ldc, void *work, int room, int *info) { SUCCEEDS(1); } \
    EXPORT int cusolverDn##T##getrf_bufferSize(Handle *handle, int m, int n, void *a, int lda, int *size) { SIZE((Long)m * BLOCK); } \
    EXPORT int cusolverDn##T##getrf(Handle *handle, int m, int n, void *a, int lda, void *work, int *pivots, int *info) { SUCCEEDS(1); } \
    EXPORT int cusolverDn##T##getrs(Handle *handle, int turned, int n, int count, void *a, int lda, int *pivots, void *b, int ldb, int *info) { SUCCEEDS(1); } \
    EXPORT int cusolverDn##T##potrf_bufferSize(Handle *handle, int upper, int n, void *a, int lda, int *size) { SIZE((Long)n * BLOCK); } \
    EXPORT int cusolverDn##T##potrf(Handle *handle, int upper, int n, void *a, int lda, void *work, int room, int *info) { SUCCEEDS(1); } \
    EXPORT int cusolverDn##T##potrfBatched(Handle *handle, int upper, int n, void *a, int lda, int *info, int batch) { SUCCEEDS(batch); } \
    EXPORT int cusolverDn##T##potrs(Handle *handle, int upper, int n, int count, void *a, int lda, void *b, int ldb, int *info) { SUCCEEDS(1); } \
    EXPORT int cusolverDn##T##potrsBatched(Handle *handle, int upper, int n, int count, void *a, int lda, void *b, int ldb, int *info, int batch) { SUCCEEDS(1); } \
    EXPORT int cusolverDn##T##sytrf_bufferSize(Handle *handle, int n, void *a, int lda, int *size) { SIZE((Long)n * BLOCK); } \
    EXPORT int cusolverDn##T##sytrf(Handle *handle, int upper, int n, void *a, int lda, int *pivots, void *work, int room, int *info) { SUCCEEDS(1); } \
    EXPORT int cusolverDn##T##gesvd_bufferSize(Handle *handle, int m, int n, int *size) { SIZE(of_singular_values(m, n)); } \
    EXPORT int cusolverDn##T##gesvd(Handle *handle, signed char u, signed char v, int m, int n, void *a, int lda, void *s, void *us, int ldu, void *vs, int ldv, void *work, int room, void *real, int *info) { SUCCEEDS(1); } \
    EXPORT int cusolverDn##T##gesvdj_bufferSize(Handle *handle, int job, int thin, int m, int n, void *a, int lda, void *s, void *u, int ldu, void *v, int ldv, int *size, void *settings) { SIZE(of_singular_values(m, n)); } \
    EXPORT int cusolverDn##T##gesvdj(Handle *handle, int job, int thin, int m, int n, void *a, int lda, void *s, void *u, int ldu, void *v, int ldv, void *work, int room, int *info, void *settings) { SUCCEEDS(1); } \
    EXPORT int cusolverDn##T##gesvdjBatched_bufferSize(Handle *handle, int job, int m, int n, void *a, int lda, void *s, void *u, int ldu, void *v, int ldv, int *size, void *settings, int batch) { SIZE(of_singular_values(m, n) * batch); } \
    EXPORT int cusolverDn##T##gesvdjBatched(Handle *handle, int job, int m, int n, void *a, int lda, void *s, void *u, int ldu, void *v, int ldv, void *work, int room, int *info, void *settings, int batch) { SUCCEEDS(batch); } \
    EXPORT int cusolverDn##T##gesvdaStridedBatched_bufferSize(Handle *handle, int job, int rank, int m, int n, void *a, int lda, Long sa, void *s, Long ss, void *u, int ldu, Long su, void *v, int ldv, Long sv, int *size, int batch) { SIZE(of_singular_values(m, n) * batch); } \
    EXPORT int cusolverDn##T##gesvdaStridedBatched(Handle *handle, int job, int rank, int m, int n, void *a, int lda, Long sa, void *s, Long ss, void *u, int ldu, Long su, void *v, int ldv, Long sv, void *work, int room, int *info, double *norms, int batch) { SUCCEEDS(batch); } \
    EXPORT int cusolverDn##T##SY##evd_bufferSize(Handle *handle, int job, int upper, int n, void *a, int lda, void *w, int *size) { SIZE(of_eigenvalues(n)); } \
    EXPORT int cusolverDn##T##SY##evd(Handle *handle, int job, int upper, int n, void *a, int lda, void *w, void *work, int room, int *info) { SUCCEEDS(1); } \
    EXPORT int cusolverDn##T##SY##evjBatched_bufferSize(Handle *handle, int job, int upper, int n, void *a, int lda, void *w, int *size, void *settings, int batch) { SIZE(of_eigenvalues(n) * batch); } \
    EXPORT int cusolverDn##T##SY##evjBatched(Handle *handle, int job, int upper, int n, void *a, int lda, void *w, void *work, int room, int *info, void *settings, int batch) { SUCCEEDS(batch); }
EVERY(DEFINE)

/* The functions that take their dtypes as arguments, which are cudaDataType. */
EXPORT int cusolverDnXgeqrf_bufferSize(Handle *handle, void *settings, int64_t m, int64_t n, int of, void *a, int64_t lda, int of_tau, void *tau, int within, size_t *device, size_t *host) { SIZES(n * BLOCK, within); }
EXPORT int cusolverDnXgeqrf(Handle *handle, void *settings, int64_t m, int64_t n, int of, void *a, int64_t lda, int of_tau, void *tau, int within, void *work, size_t room, void *there, size_t room_there, int *info) { SUCCEEDS(1); }
EXPORT int cusolverDnXpotrf_bufferSize(Handle *handle, void *settings, int upper, int64_t n, int of, void *a, int64_t lda, int within, size_t *device, size_t *host) { SIZES(n * BLOCK, within); }
EXPORT int cusolverDnXpotrf(Handle *handle, void *settings, int upper, int64_t n, int of, void *a, int64_t lda, int within, void *work, size_t room, void *there, size_t room_there, int *info) { SUCCEEDS(1); }
EXPORT int cusolverDnXpotrs(Handle *handle, void *settings, int upper, int64_t n, int64_t count, int of, void *a, int64_t lda, int of_b, void *b, int64_t ldb, int *info) { SUCCEEDS(1); }
EXPORT int cusolverDnXsyevd_bufferSize(Handle *handle, void *settings, int job, int upper, int64_t n, int of, void *a, int64_t lda, int of_w, void *w, int within, size_t *device, size_t *host) { SIZES(of_eigenvalues(n), within); }
EXPORT int cusolverDnXsyevd(Handle *handle, void *settings, int job, int upper, int64_t n, int of, void *a, int64_t lda, int of_w, void *w, int within, void *work, size_t room, void *there, size_t room_there, int *info) { SUCCEEDS(1); }
EXPORT int cusolverDnXsyevBatched_bufferSize(Handle *handle, void *settings, int job, int upper, int64_t n, int of, void *a, int64_t lda, int of_w, void *w, int within, size_t *device, size_t *host, int64_t batch) { SIZES(of_eigenvalues(n) * batch, within); }
EXPORT int cusolverDnXsyevBatched(Handle *handle, void *settings, int job, int upper, int64_t n, int of, void *a, int64_t lda, int of_w, void *w, int within, void *work, size_t room, void *there, size_t room_there, int *info, int64_t batch) { SUCCEEDS(batch); }
EXPORT int cusolverDnXgeev_bufferSize(Handle *handle, void *settings, int left, int right, int64_t n, int of, void *a, int64_t lda, int of_w, void *w, int of_l, void *l, int64_t ldl, int of_r, void *r, int64_t ldr, int within, size_t *device, size_t *host) { SIZES(n * BLOCK, within); }
EXPORT int cusolverDnXgeev(Handle *handle, void *settings, int left, int right, int64_t n, int of, void *a, int64_t lda, int of_w, void *w, int of_l, void *l, int64_t ldl, int of_r, void *r, int64_t ldr, int within, void *work, size_t room, void *there, size_t room_there, int *info) { SUCCEEDS(1); }
EXPORT int cusolverDnXsytrs_bufferSize(Handle *handle, int upper, int64_t n, int64_t count, int of, void *a, int64_t lda, int64_t *pivots, int of_b, void *b, int64_t ldb, size_t *device, size_t *host) { SIZES(n * BLOCK, of); }
EXPORT int cusolverDnXsytrs(Handle *handle, int upper, int64_t n, int64_t count, int of, void *a, int64_t lda, int64_t *pivots, int of_b, void *b, int64_t ldb, void *work, size_t room, void *there, size_t room_there, int *info) { SUCCEEDS(1); }
