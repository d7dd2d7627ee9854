"""Orders submissions to an iree.runtime device: each waits for the previous one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import iree.runtime as iree

Submit = Callable[[Any, Any], object]  # takes the HAL fence to wait for and the one to signal


class Fence:
    """A point on a timeline."""

    __slots__ = ("_fence", "_semaphore", "_value")

    def __init__(self, semaphore: Any, value: int) -> None:
        self._fence = iree.HalFence.create_at(semaphore, value)
        self._semaphore = semaphore
        self._value = value

    @property
    def hal(self) -> Any:
        return self._fence

    @property
    def failure(self) -> Exception | None:
        """The error that failed the timeline, or None."""
        try:
            self._semaphore.query()
        except Exception as error:
            return error
        return None

    @property
    def done(self) -> bool:
        """True if the point was reached or the timeline failed."""
        try:
            return bool(self._semaphore.query() >= self._value)
        except Exception:
            return True

    def wait(self) -> None:
        """Raises RuntimeError if the timeline failed before this point."""
        self._fence.wait()

    def next(self) -> Fence:
        return Fence(self._semaphore, self._value + 1)

    def same_timeline(self, other: Fence) -> bool:
        return self._semaphore is other._semaphore


class Timeline:
    """The order of a device's submissions.

    A semaphore becomes unusable when it fails or its next value may never be signalled; the timeline then
    continues with a new one. (If the driver's own queue breaks, every later invocation fails too, and only a
    restart helps.)
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._restart()
        self.last = self._origin  # what the next submission waits for
        self._signal = self._origin

    def submit(self, submit: Submit) -> Fence:
        """Submits work after the last submission; returns the fence of its completion.

        Raises the error of `submit`, or the one that failed the previous work.
        """
        fence = self._signal.next()
        try:
            submit(self.last.hal, fence.hal)
        except Exception as error:
            raise self._reject() or error from None
        self.last = self._signal = fence
        return fence

    def abandon(self, fence: Fence) -> None:
        """Starts a new semaphore after `fence`, and all later points of its semaphore, have failed."""
        if fence.same_timeline(self.last):
            self._restart()
            self.last = self._signal = self._origin

    def _reject(self) -> Exception | None:
        """Discards the next point, which was passed to a submission that failed.

        Returns the error of the previous submission, if it had failed. Later points use a new semaphore;
        their submissions wait for `last` unless it failed.
        """
        failure = self.last.failure
        self._restart()
        self._signal = self._origin
        if failure is not None:
            self.last = self._origin
        return failure

    def _restart(self) -> None:
        self._origin = Fence(self._device.create_semaphore(0), 0)
