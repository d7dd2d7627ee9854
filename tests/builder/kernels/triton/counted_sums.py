"""A kernel for tests of order between workgroups: the last of them adds what all stored."""

# Triton reads annotations when it compiles, so they are not postponed.
import triton
import triton.language as tl

from shortfin_apps.llm.builder.kernels.triton.synchronisation import is_last_of


@triton.jit
def counted_sums(x, parts, counter, total, SHARES: tl.constexpr, SIZE: tl.constexpr):  # noqa: ANN001, ANN201
    """`total` [SIZE] f32: the sum of SHARES rows of `x` [SHARES, SIZE] f32, which pass through `parts`."""
    at = tl.arange(0, SIZE)
    row = tl.program_id(0) * SIZE
    tl.store(parts + row + at, tl.load(x + row + at))
    if is_last_of(SHARES, counter):
        sums = tl.zeros((SIZE,), tl.float32)
        for share in range(SHARES):
            sums += tl.load(parts + share * SIZE + at, cache_modifier=".cg")
        tl.store(total + at, sums)


@triton.jit
def overtaken_sums(x, parts, counter, total, SHARES: tl.constexpr, SIZE: tl.constexpr):  # noqa: ANN001, ANN201
    """`counted_sums` with a planted mistake: the count may overtake stores of other waves on CDNA."""
    at = tl.arange(0, SIZE)
    row = tl.program_id(0) * SIZE
    tl.store(parts + row + at, tl.load(x + row + at))
    tl.debug_barrier()
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == SHARES - 1:
        sums = tl.zeros((SIZE,), tl.float32)
        for share in range(SHARES):
            sums += tl.load(parts + share * SIZE + at, cache_modifier=".cg")
        tl.store(total + at, sums)
