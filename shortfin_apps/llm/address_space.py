"""Checks the process's address space limit (`ulimit -v`, `prlimit --as`).

A library that reaches the limit raises an obscure error, or aborts the process without a message. So commands
compare the expected need with the limit before they call these libraries.
"""

from __future__ import annotations

import resource
from pathlib import Path

from shortfin_apps.llm.contract.errors import LlmError

# Measured need for importing the server's libraries, rounded up.
MIN_SERVER_BYTES = 256_000_000
THREAD_BYTES = 8 << 20  # address space that Linux reserves for a thread's stack
NUM_OTHER_THREADS = 4  # in addition to the device's workers

STATM = Path("/proc/self/statm")


class AddressSpaceError(LlmError):
    """The address space limit is too low."""


def check_total(needed_bytes: int) -> None:
    """Raise AddressSpaceError if the limit is below `needed_bytes`, the need of the whole process."""
    limit = _limit()
    if limit is not None and limit < needed_bytes:
        raise _too_little(limit, f"starting a server takes {_megabytes(needed_bytes)}")


def check_more(needed_bytes: int) -> None:
    """Raise AddressSpaceError if the limit does not allow `needed_bytes` more than the process uses now."""
    limit = _limit()
    if limit is None:
        return
    taken = _taken_bytes()
    if limit - taken < needed_bytes:
        needs = f"loading this model takes {_megabytes(needed_bytes)} besides the {_megabytes(taken)} in use"
        raise _too_little(limit, needs)


def model_bytes(file_bytes: int, num_workers: int) -> int:
    """Return the address space for a model's mapped files and thread stacks, without its KV cache."""
    return file_bytes + (num_workers + NUM_OTHER_THREADS) * THREAD_BYTES


def _too_little(limit: int, needs: str) -> AddressSpaceError:
    return AddressSpaceError(
        f"the address space of this process is limited to {_megabytes(limit)}, but {needs} at least;"
        " raise the limit (`ulimit -v`, `prlimit --as`)"
    )


def _limit() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def _taken_bytes() -> int:
    """Return the process's virtual memory size (proc(5)), or 0 on systems without /proc."""
    try:
        return int(STATM.read_text().split()[0]) * resource.getpagesize()
    except FileNotFoundError:
        return 0


def _megabytes(count: int) -> str:
    return f"{-(-count // 1_000_000):,} MB"
