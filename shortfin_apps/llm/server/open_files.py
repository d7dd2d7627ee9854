"""How many files this process may have open (`ulimit -n`), of which each connection is one."""

from __future__ import annotations

import logging
import resource

logger = logging.getLogger(__name__)

NUM_OTHER_FILES = 128  # the model's, the libraries', the log


def allow(num_connections: int) -> None:
    """Raises the process's own limit as far as it may, and warns where that is not enough.

    A server that can open no file hangs up on who connects, without a word to either side.
    """
    wanted = num_connections + NUM_OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        logger.warning(
            "this process may open %d files, too few for %d connections: raise `ulimit -n` or lower"
            " --limit-concurrency",
            allowed,
            num_connections,
        )
