"""Standard streams that the caller has closed."""

from __future__ import annotations

import os
import sys


def open_closed_streams() -> None:
    """Opens /dev/null for each standard stream that the caller has closed, so that it is None.

    Otherwise the first sockets opened here would get their descriptors, and libuv then aborts the process.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            fd = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is the stream's own
            os.set_inheritable(fd, True)
            setattr(sys, name, os.fdopen(fd, mode))
