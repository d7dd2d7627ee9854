"""Checks of the process's address space limit (`ulimit -v`, `prlimit --as`).

A library that reaches the limit raises an obscure error or aborts the process without a reason. Therefore the
expected need is checked before the libraries are called.
"""

from __future__ import annotations

import resource
from pathlib import Path

from shortfin_apps.llm.contract.errors import LlmError

# Measured for importing the server's libraries, rounded up.
MIN_SERVER_BYTES = 256_000_000
THREAD_BYTES = 8 << 20  # a thread's stack; Linux reserves all of it
NUM_OTHER_THREADS = 4  # in addition to the device's workers

STATM = Path("/proc/self/statm")


class AddressSpaceError(LlmError):
    """The address space limit is too low."""


def check_total(needed_bytes: int) -> None:
    """Raises AddressSpaceError if the limit is below `needed_bytes` for the whole process."""
    limit = _limit()
    if limit is not None and limit < needed_bytes:
        raise _too_little(limit, f"starting a server takes {_megabytes(needed_bytes)}")


def check_more(needed_bytes: int) -> None:
    """Raises AddressSpaceError if the process may not use `needed_bytes` more than it uses now."""
    limit = _limit()
    if limit is None:
        return
    taken = _taken_bytes()
    if limit - taken < needed_bytes:
        needs = f"loading this model takes {_megabytes(needed_bytes)} besides the {_megabytes(taken)} in use"
        raise _too_little(limit, needs)


def model_bytes(file_bytes: int, num_workers: int) -> int:
    """Returns the address space for loading a model, without its KV cache: mapped files, thread stacks."""
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
    """Returns the process's virtual memory size (proc(5)); 0 on systems without /proc."""
    try:
        return int(STATM.read_text().split()[0]) * resource.getpagesize()
    except FileNotFoundError:
        return 0


def _megabytes(count: int) -> str:
    return f"{-(-count // 1_000_000):,} MB"
