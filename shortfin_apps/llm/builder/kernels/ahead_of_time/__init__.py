"""Compile the kernels of kernels/triton ahead of time, and wrap them in IREE executables."""
