/* libcupti: nothing runs, so there is nothing to trace. */
#include "card.h"

EXPORT int cuptiGetVersion(uint32_t *version) { *version = 130000; return OK; }
EXPORT int cuptiGetResultString(int result, const char **text) { *text = result ? "an error" : "success"; return OK; }
EXPORT int cuptiActivityGetNextRecord(uint8_t *buffer, size_t bytes, void **record) { *record = NULL; return 12; } /* no more records */
EXPORT int cuptiActivityGetNumDroppedRecords(void *context, uint32_t stream, size_t *dropped) { *dropped = 0; return OK; }
EXPORT int cuptiGetTimestamp(uint64_t *time) { *time = 0; return OK; }
