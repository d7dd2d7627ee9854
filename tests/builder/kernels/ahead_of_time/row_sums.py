"""A small kernel for tests of what surrounds kernels."""

# Triton reads annotations when it compiles, so they are not postponed.
import triton
import triton.language as tl


@triton.jit
def row_sums(x, sums, rows, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):  # noqa: ANN001, ANN201
    """Adds the sum of each row of `x` [rows, COLUMNS] f32 to `sums` [rows] f32, ROWS rows a workgroup."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row[:, None] < rows) & (column[None, :] < COLUMNS)
    values = tl.load(x + row[:, None] * COLUMNS + column[None, :], mask=inside, other=0.0)
    before = tl.load(sums + row, mask=row < rows)
    tl.store(sums + row, before + tl.sum(values, axis=1), mask=row < rows)
