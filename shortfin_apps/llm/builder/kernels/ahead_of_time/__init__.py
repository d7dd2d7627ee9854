"""Compiles the kernels of kernels/triton ahead of time, and makes IREE executables of them."""
