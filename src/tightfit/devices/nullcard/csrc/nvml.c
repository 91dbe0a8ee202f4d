/* libnvidia-ml: what PyTorch and pynvml ask of a card. */
#include "card.h"
#include <stdio.h>
#include <string.h>

EXPORT int nvmlInit(void) { return OK; }
EXPORT int nvmlInit_v2(void) { return OK; }
EXPORT int nvmlInitWithFlags(unsigned flags) { return OK; }
EXPORT int nvmlShutdown(void) { return OK; }
EXPORT const char *nvmlErrorString(int error) { return error ? "not supported by the null card" : "success"; }
EXPORT int nvmlDeviceGetCount_v2(unsigned *count) { *count = card()->physical; return OK; }
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = (void *)(uintptr_t)(index + 1); return OK; }
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) {
    unsigned at = 1;
    sscanf(bus, "%*[^:]:%x", &at);
    *device = (void *)(uintptr_t)at;
    return OK;
}
EXPORT int nvmlDeviceGetUUID(void *device, char *text, unsigned room) { snprintf(text, room, "GPU-11111111-1111-1111-1111-1111111111%02x", (unsigned)(uintptr_t)device - 1); return OK; }
EXPORT int nvmlDeviceGetName(void *device, char *text, unsigned room) { snprintf(text, room, "%s", card()->name); return OK; }
EXPORT int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *memory) { /* total, free, used */
    size_t available, total;
    card_memory((int)(uintptr_t)device - 1, &available, &total);
    memory[0] = total;
    memory[1] = available;
    memory[2] = total - available;
    return OK;
}
EXPORT int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *list) { *count = 0; return OK; }
EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, void *list) { *count = 0; return OK; }
EXPORT int nvmlDeviceGetUtilizationRates(void *device, unsigned *rates) { rates[0] = rates[1] = 0; return OK; }
EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = card()->cuda; return OK; }
EXPORT int nvmlSystemGetDriverVersion(char *text, unsigned room) { snprintf(text, room, "0.0 (null card)"); return OK; }
EXPORT int nvmlDeviceGetGpuFabricInfoV(void *device, unsigned *info) { /* version; a uuid, a status, a clique, a state: of no fabric */
    memset(info + 1, 0, 32);
    return OK;
}
EXPORT int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, int *type) { return 3; }
EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, void *info) { return 3; }
