// How many workgroups of a launch a device runs at a time.
#pragma once
#include "../wave/launch.h"
#include "devices.h"

uint32_t resident_workgroups(const chip_t *chip, const kernel_header_t *kernel, const launch_t *launch);
