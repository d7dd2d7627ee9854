// Injected faults.
#pragma once
#include "hip.h"

// Executes the commands in EMULATED_GPU_FAULTS, and starts a thread that executes those from the pipe
// EMULATED_GPU_CONTROL.
void faults_start(void);
// The error that a call of this function returns instead of doing anything; hipSuccess if there is none.
hipError_t fault_of_call(const char *function);
// The error with which a launch of this kernel fails when it would run; hipSuccess if there is none.
hipError_t fault_of_launch(const char *kernel);
// Executes a command. Prints a message on stderr and returns false if the command is invalid.
bool fault_command(const char *command);
