"""How much address space this process may take (`ulimit -v`, `prlimit --as`).

Libraries that get none end in a traceback, or abort the process without a word about the reason; so what
is needed is asked for before they are called.
"""

from __future__ import annotations

import resource
from pathlib import Path

from shortfin_apps.llm.errors import LlmError

# What importing a server's libraries was measured to take, and some.
MIN_SERVER_BYTES = 256_000_000
THREAD_BYTES = 8 << 20  # a thread's stack, which Linux reserves whole
NUM_OTHER_THREADS = 4  # beside the device's workers

STATM = Path("/proc/self/statm")


class AddressSpaceError(LlmError):
    """The process may not take what it needs."""


def check_total(needed_bytes: int) -> None:
    """Raises AddressSpaceError when the whole process may not take `needed_bytes`."""
    limit = _limit()
    if limit is not None and limit < needed_bytes:
        raise _too_little(limit, f"starting a server takes {_megabytes(needed_bytes)}")


def check_more(needed_bytes: int) -> None:
    """Raises AddressSpaceError when the process may not take `needed_bytes` beside what it has."""
    limit = _limit()
    if limit is None:
        return
    taken = _taken_bytes()
    if limit - taken < needed_bytes:
        needs = f"loading this model takes {_megabytes(needed_bytes)} beside the {_megabytes(taken)} in use"
        raise _too_little(limit, needs)


def model_bytes(file_bytes: int, num_workers: int) -> int:
    """Address space that loading a model takes before its cache: mapped files and threads' stacks."""
    return file_bytes + (num_workers + NUM_OTHER_THREADS) * THREAD_BYTES


def _too_little(limit: int, needs: str) -> AddressSpaceError:
    return AddressSpaceError(
        f"the address space of this process is limited to {_megabytes(limit)}, and {needs} at least;"
        " raise the limit (`ulimit -v`, `prlimit --as`)"
    )


def _limit() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def _taken_bytes() -> int:
    """See proc(5); 0 where there is no such file."""
    try:
        return int(STATM.read_text().split()[0]) * resource.getpagesize()
    except FileNotFoundError:
        return 0


def _megabytes(count: int) -> str:
    return f"{-(-count // 1_000_000):,} MB"
