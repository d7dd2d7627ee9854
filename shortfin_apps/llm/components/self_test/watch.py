"""Schedules a server's self-test: at startup, and once an hour while the server is idle."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Mapping

from shortfin_apps.llm.components.self_test.locate import Locator
from shortfin_apps.llm.components.self_test.report import Subject, document, sentence, write
from shortfin_apps.llm.components.self_test.self_test import Key, Outcome, SelfTest
from shortfin_apps.llm.contract.errors import DeviceLostError, LlmError, SelfTestError

logger = logging.getLogger(__name__)

INTERVAL_S = 3600.0
IDLE_S = 1.0  # time without requests before a run starts or continues
ADVICE = "`shortfin-llm verify DIR` says which files differ from what was built"


class SelfTestWatch:
    """Runs a self-test when it is due, one invocation at a time. Callers must use the engine's thread.

    If the locator has `same_bits` (as on CPUs), all entries must compute bit-identical logits for a position.
    On every device, each entry must repeat the bits of the run at startup.
    """

    def __init__(
        self,
        self_test: SelfTest,
        locator: Locator,
        subject: Subject,
        *,
        hourly: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._self_test = self_test
        self._locator = locator
        self._subject = subject
        self._hourly = hourly
        self._clock = clock
        self._known_bits: Mapping[Key, bytes] = {}
        self._outcome = Outcome(self_test.file)
        self._steps: Generator[None] | None = None
        self._due_s = self._idle_since_s = clock()
        self.num_runs = 0
        self.num_failures = 0
        self.failure: str | None = None  # fault found in the last run
        self.lost_device: str | None = None  # why the device is lost, if a run has found that it is

    def run(self) -> Outcome:
        """Run the full self-test at startup. Raises SelfTestError if it fails, DeviceLostError."""
        began_s = self._clock()
        outcome = self._self_test.run()
        if outcome.lost_device is not None:
            raise outcome.lost_device
        self._finish(outcome)
        if self.failure is not None:
            raise SelfTestError(self.failure)
        self._known_bits = outcome.bits
        largest = max((row.error for row in outcome.rows), default=0.0)
        logger.info(
            "self-test passed: %d rows of %d entries in %.2f s; the largest difference is %.2g of the "
            "logits' deviation (allowed %.2g)%s",
            len(outcome.rows),
            len(outcome.entries) - len(outcome.untested),
            self._clock() - began_s,
            largest,
            outcome.file.tolerance,
            f"; too few pages to test {', '.join(outcome.untested)}" if outcome.untested else "",
        )
        return outcome

    def notice_work(self) -> None:
        """Pause a run in progress, because a request has arrived: its pages return to the cache."""
        self._idle_since_s = self._clock()
        self._pause()

    def seconds_until_due(self) -> float | None:
        """Return how many seconds to wait for requests before the next `step`; None if no run is planned."""
        if not self._hourly or self.failure is not None:
            return None
        if self._steps is not None:
            return 0.0
        return max(0.0, self._due_s - self._clock(), self._idle_since_s + IDLE_S - self._clock())

    def step(self) -> None:
        """Run the next invocation of the self-test."""
        if self._steps is None:
            self._steps = self._self_test.steps(self._outcome)
        try:
            next(self._steps)
        except StopIteration:
            self._steps = None
            outcome, self._outcome = self._outcome, Outcome(self._self_test.file)
            if outcome.lost_device is None:
                self._finish(outcome)
            else:
                self._fail_with_device(outcome.lost_device)
        except LlmError as error:  # the pages could not be returned
            self._steps = None
            self._fail_with_device(error)

    def _pause(self) -> None:
        if self._steps is not None:
            try:
                self._steps.close()
            except LlmError as error:
                logger.warning("the pages of the self-test were not zeroed: %s", error)
            self._steps = None

    def _finish(self, outcome: Outcome) -> None:
        """Count a finished run; if it failed, locate the fault and write a report."""
        self.num_runs += 1
        self._due_s = self._clock() + INTERVAL_S
        same_bits = self._locator.same_bits
        failures = outcome.failures(same_bits=same_bits, known_bits=self._known_bits)
        if not failures:
            logger.debug("self-test passed")
            return
        location = self._locator.locate_first(failures, outcome)
        path = write(document(self._subject, outcome, failures, location))
        where = "no report could be written" if path is None else f"report written to {path}"
        self._fail(f"{sentence(self._subject, failures, location)}; {where}; {ADVICE}")

    def _fail_with_device(self, error: LlmError) -> None:
        self.num_runs += 1
        if isinstance(error, DeviceLostError):
            self.lost_device = str(error)
        self._fail(f"self-test: the device failed ({error})")

    def _fail(self, reason: str) -> None:
        self.num_failures += 1
        self.failure = reason
        logger.error("%s", reason)
