"""This process's limit on open files (`ulimit -n`); each connection counts as one."""

from __future__ import annotations

import logging
import resource

logger = logging.getLogger(__name__)

NUM_OTHER_FILES = 128  # for the model, the libraries and the log


def allow(num_connections: int) -> None:
    """Raise the process's soft limit if necessary; warn if the hard limit is too low.

    Beyond the limit, the server would close new connections without an error on either side.
    """
    wanted = num_connections + NUM_OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        logger.warning(
            "this process may open %d files, too few for %d connections: raise `ulimit -n`",
            allowed,
            num_connections,
        )
