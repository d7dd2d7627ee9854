"""Orders submissions to an iree.runtime device: each submission waits for the previous one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import iree.runtime as iree

Submit = Callable[[Any, Any], object]  # takes the HAL fence to wait for and the one to signal


class Fence:
    """A point on a timeline: a value of a HAL semaphore."""

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
        """Whether the point was reached or the timeline has failed."""
        try:
            return bool(self._semaphore.query() >= self._value)
        except Exception:
            return True

    def wait(self) -> None:
        """Wait until the point is reached. Raises RuntimeError if the timeline failed before."""
        self._fence.wait()

    def next(self) -> Fence:
        return Fence(self._semaphore, self._value + 1)

    def same_timeline(self, other: Fence) -> bool:
        return self._semaphore is other._semaphore


class Timeline:
    """The order of a device's submissions, as values of a HAL semaphore.

    A semaphore becomes unusable if it fails, or if its next value may never be signalled. The timeline then
    continues with a new semaphore. (If the driver's own queue breaks, every later invocation fails too, and
    only a restart helps.)
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._restart()
        self.last = self._origin  # what the next submission waits for
        self._signal = self._origin

    def submit(self, submit: Submit) -> Fence:
        """Submit work that waits for the last submission; returns the fence that the work signals.

        Raises the error of `submit`, or the error of the previous work if that failed.
        """
        fence = self._signal.next()
        try:
            submit(self.last.hal, fence.hal)
        except Exception as error:
            raise self._reject() or error from None
        self.last = self._signal = fence
        return fence

    def abandon(self, fence: Fence) -> None:
        """Start a new semaphore if `fence` is on the current one; `fence` must have failed."""
        if fence.same_timeline(self.last):
            self._restart()
            self.last = self._signal = self._origin

    def _reject(self) -> Exception | None:
        """Discard the next point, which was passed to a submission that failed.

        Later points use a new semaphore. Later submissions wait for `last`, unless `last` has failed. Returns
        the error of `last`, or None if it has not failed.
        """
        failure = self.last.failure
        self._restart()
        self._signal = self._origin
        if failure is not None:
            self.last = self._origin
        return failure

    def _restart(self) -> None:
        self._origin = Fence(self._device.create_semaphore(0), 0)
