// Faults on demand.
#pragma once
#include "hip.h"

// Carries out the commands of EMULATED_GPU_FAULTS, and reads further ones from the pipe EMULATED_GPU_CONTROL.
void faults_start(void);
// The error that a call of this function returns instead of doing anything; hipSuccess if there is none.
hipError_t fault_of_call(const char *function);
// The error with which a launch of this kernel fails when it would run; hipSuccess if there is none.
hipError_t fault_of_launch(const char *kernel);
// Carries out one command; false with a message on standard error where it is not understood.
bool fault_command(const char *command);
