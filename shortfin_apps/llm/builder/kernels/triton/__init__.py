"""Kernels for GPUs in Triton, one idea a file.

Conventions: matrices are row-major and kernels take the address of their first element; a lower-case
parameter is an operand of the dispatch, an upper-case one is fixed when the kernel is compiled. Tiles have
ROWS rows (tokens) and COLUMNS columns (output features). Sums along K (the input features) are in f32 and in
one order, whatever the tile, so a row's result does not depend on the rows beside it.

A norm is deferred to the matmul that reads it: whoever computes the residual stream x also writes `scaled`,
which is x times the norm's weight in the type that matmuls read, and `squares` [tokens, features / GROUP]
f32, the sums of squares of GROUP neighbours of x. A matmul multiplies `scaled`, and its result by each row's
1 / rms. This takes neither a pass over x nor a launch of its own.
"""

GROUP = 16  # features whose squares are summed before they are written
FP8_GROUP = 128  # neighbours along K that share a scale, of activations in 8-bit floats
