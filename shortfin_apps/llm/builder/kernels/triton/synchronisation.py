"""Ordering of memory accesses between the waves of a workgroup, and between workgroups."""

import triton
import triton.language as tl
from triton.language.target_info import current_target
from triton.runtime.jit import constexpr_function

MOST_POLLS = tl.constexpr(1 << 22)  # of one wait; about three seconds on an H100
ABANDONED = tl.constexpr(1 << 30)  # a count that ends every wait


@constexpr_function
def _wait_for_accesses():
    """Return the assembly that makes a wave of an AMD GPU wait for its accesses; "" where nothing has to."""
    target = current_target()
    if target is None or target.backend != "hip":
        return ""
    if target.arch.startswith("gfx9"):
        return "s_waitcnt vmcnt(0) lgkmcnt(0)"
    return "s_wait_dscnt 0x0" if target.arch.startswith("gfx12") else "s_waitcnt lgkmcnt(0)"


@triton.jit
def memory_barrier():
    """Wait until every wave of the workgroup has arrived, and its earlier loads and stores have completed.

    On AMD GPUs, Triton's own barrier does not wait for everything. On CDNA (gfx9) it may be a bare
    `s_barrier`: a store of one wave may still be in flight when another wave leaves the barrier and releases
    the workgroup's results. On RDNA, loads from LDS whose results a wave does not need may be in flight.
    Each wave therefore waits for its own accesses first.
    """
    WAIT: tl.constexpr = _wait_for_accesses()
    if WAIT != "":
        tl.inline_asm_elementwise(
            WAIT + "\n\tv_mov_b32 $0, $1",
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


@triton.jit
def arrive(counter):
    """Count this workgroup's arrival at a barrier of all workgroups (see `wait_for`)."""
    memory_barrier()  # the count must not overtake a store of another wave
    tl.atomic_add(counter, 1, sem="release", scope="gpu")


@triton.jit
def wait_for(counter, arrivals):
    """Wait until `counter` is at least `arrivals`; what arriving workgroups stored is then visible.

    All workgroups of the launch must be resident at the same time. If they are not, one that waits for too
    long ends all waits (see `is_abandoned`), so that the launch ends. `counter` i32 only grows: at the n-th
    barrier, `arrivals` is n times the number of workgroups.
    """
    polls = 0
    while tl.atomic_add(counter, 0, sem="acquire", scope="gpu") < arrivals:
        polls += 1
        if polls == MOST_POLLS:
            tl.atomic_max(counter, ABANDONED, sem="relaxed", scope="gpu")
    tl.debug_barrier()  # no wave may load before the wave that has seen the count


@triton.jit
def is_abandoned(counter):
    """Return, after a wait, whether a workgroup has ended the waits, so that results are undefined."""
    return tl.atomic_add(counter, 0, sem="relaxed", scope="gpu") >= ABANDONED
