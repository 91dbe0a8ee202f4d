/* libnvrtc: programs compile to nothing. */
#include "card.h"
#include <stdlib.h>
#include <string.h>

EXPORT int nvrtcVersion(int *major, int *minor) { *major = card()->cuda / 1000; *minor = card()->cuda % 1000 / 10; return OK; }
EXPORT const char *nvrtcGetErrorString(int error) { return error ? "not supported by the null card" : "no error"; }
EXPORT int nvrtcCreateProgram(void **made, const char *source, const char *name, int count, const char **headers, const char **includes) { *made = calloc(1, 64); return OK; }
EXPORT int nvrtcDestroyProgram(void **made) { free(*made); return OK; }
EXPORT int nvrtcCompileProgram(void *program, int count, const char **options) { return OK; }
EXPORT int nvrtcAddNameExpression(void *program, const char *name) { return OK; }
EXPORT int nvrtcGetLoweredName(void *program, const char *name, const char **lowered) { *lowered = name; return OK; }
EXPORT int nvrtcGetCUBINSize(void *program, size_t *bytes) { *bytes = 16; return OK; }
EXPORT int nvrtcGetCUBIN(void *program, char *code) { memset(code, 0, 16); return OK; }
EXPORT int nvrtcGetPTXSize(void *program, size_t *bytes) { *bytes = 16; return OK; }
EXPORT int nvrtcGetPTX(void *program, char *code) { memset(code, 0, 16); return OK; }
EXPORT int nvrtcGetProgramLogSize(void *program, size_t *bytes) { *bytes = 1; return OK; }
EXPORT int nvrtcGetProgramLog(void *program, char *log) { *log = 0; return OK; }
