// Graphs are not supported. IREE requires their functions to exist; they return hipErrorNotSupported.
#include "calls.h"

#define NOT_OFFERED(name) \
  API hipError_t name(void) { \
    ENTER(" "); \
    return call_leave(hipErrorNotSupported); \
  }

NOT_OFFERED(hipDrvGraphAddMemcpyNode)
NOT_OFFERED(hipGraphAddEmptyNode)
NOT_OFFERED(hipGraphAddEventRecordNode)
NOT_OFFERED(hipGraphAddKernelNode)
NOT_OFFERED(hipGraphAddMemsetNode)
NOT_OFFERED(hipGraphCreate)
NOT_OFFERED(hipGraphDestroy)
NOT_OFFERED(hipGraphExecDestroy)
NOT_OFFERED(hipGraphInstantiate)
NOT_OFFERED(hipGraphLaunch)
