"""Kernels for GPUs, written in Triton and compiled ahead of time into the VMFB."""
