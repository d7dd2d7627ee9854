// Names and messages of errors.
#include "hip.h"

API const char *hipGetErrorName(hipError_t error) {
  switch (error) {
#define X(name, number, text) case name: return #name;
    HIP_ERRORS(X)
#undef X
  }
  return "hipErrorUnknown";
}

API const char *hipGetErrorString(hipError_t error) {
  switch (error) {
#define X(name, number, text) case name: return text;
    HIP_ERRORS(X)
#undef X
  }
  return "unknown error";
}
