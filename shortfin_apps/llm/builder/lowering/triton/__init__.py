"""Lowering to the Triton kernels in kernels/triton, for GPUs."""
