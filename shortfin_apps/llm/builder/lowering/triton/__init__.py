"""Lowering to the Triton kernels of kernels/triton, for GPUs."""
