"""Triton kernels for GPUs, one algorithm per file.

Conventions: matrices are row-major, and kernels take the address of their first element. A lower-case
parameter is an operand of the dispatch; an upper-case one is a compile-time constant. Long lists of
parameters have the operands first, then the constants on new lines. Tiles have ROWS rows (tokens) and
COLUMNS columns (output features). Sums along K (the input features) are in f32 and in the same order for
every tile with the same PARTS (see product.py), so a row's result does not depend on the other rows.

An RMS norm is deferred to the matmul after it. The kernel that computes the residual stream x also writes
two tensors: `scaled`, x times the norm's weight in the type of the matmuls' activations, and `squares`
[tokens, features / GROUP] f32, the sums of squares of GROUP neighbours of x. The matmul multiplies `scaled`
by its weights, and its result by each row's 1 / rms. So the norm needs no separate pass over x and no
launch.
"""

GROUP = 16  # features per written sum of squares
FP8_GROUP = 128  # neighbours along K that share a scale, in 8-bit float activations
PART_DEPTH = 64  # neighbours along K in one part, where K is divided among waves
