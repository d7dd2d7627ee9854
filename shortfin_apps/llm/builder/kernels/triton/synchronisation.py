"""Ordering of memory accesses between the waves of a workgroup, and between workgroups."""

import triton
import triton.language as tl
from triton.language.target_info import current_target
from triton.runtime.jit import constexpr_function


@constexpr_function
def _is_gfx9():
    target = current_target()
    return target is not None and target.backend == "hip" and target.arch.startswith("gfx9")


@triton.jit
def memory_barrier():
    """Wait until every wave of the workgroup has arrived, and its earlier loads and stores have completed.

    On CDNA (gfx9), Triton's own barrier may be a bare `s_barrier`: a store of one wave may still be in
    flight when another wave leaves the barrier and releases the workgroup's results. Each wave therefore
    waits for its own accesses first. On other GPUs, Triton's barrier already waits.
    """
    if _is_gfx9():
        tl.inline_asm_elementwise(
            "s_waitcnt vmcnt(0)\n\tv_mov_b32 $0, $1",
            "=v,v",
            [tl.full((), 0, tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    tl.debug_barrier()


@triton.jit
def is_last_of(shares, counter):
    """Return whether this workgroup is the last of `shares` workgroups to arrive here.

    Earlier stores of the other workgroups are visible to the last one. `counter` must be 0 before a launch,
    and is 0 after it.
    """
    memory_barrier()  # the count must not overtake a store of another wave
    is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == shares - 1
    if is_last:
        tl.atomic_xchg(counter, 0, sem="relaxed", scope="gpu")
    return is_last
