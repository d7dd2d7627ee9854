// Faults on demand.
#pragma once
#include "hip.h"

// Carries out the commands of EMULATED_GPU_FAULTS, and reads further ones from the pipe EMULATED_GPU_CONTROL.
void faults_start(void);
// What a call of this function is to return instead of doing anything; hipSuccess when nothing is due.
hipError_t fault_of_call(const char *function);
// What a launch of this kernel is to fail with once it would run.
hipError_t fault_of_launch(const char *kernel);
// Carries out one command; false with a message on standard error where it is not understood.
bool fault_command(const char *command);
