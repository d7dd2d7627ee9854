"""All checks, in the order in which they run. To add one, write a function and add a line."""

from __future__ import annotations

import time
from collections.abc import Iterable

from shortfin_apps.llm.tools.qualify import answers, emulator, results, speeds
from shortfin_apps.llm.tools.qualify.bench import Bench
from shortfin_apps.llm.tools.qualify.check import Check
from shortfin_apps.llm.tools.qualify.outcome import Failed, Fault, Figures, Outcome, Skipped, Status

CHECKS = (
    Check("machine", "this user may open the GPU", results.describe_machine),
    Check("device", "the device opens", results.open_device),
    Check("build", "the models are built, or were in the cache", results.build, share=30),
    Check("files", "the artefact's files are as built", results.check_files, share=2),
    Check("self-test", "every entry gives the results of the numpy reference", results.self_test, share=6),
    Check("self-test-f32", "kernels in f32 do so, to the last digits", results.self_test_in_f32, share=4),
    Check("queued", "queued invocations give the bits of single ones", results.queued, share=2),
    Check("uploads", "the device reads what the host has just written", results.uploads, share=2),
    Check("weights", "parameters stay as loaded, and are right at once", results.weights, share=5),
    Check("tokens", "greedy tokens are the CPU's, in f32", results.tokens, share=8),
    Check("receipts", "answers have the same bits after preemption", answers.receipts, share=8),
    Check("abort", "an aborted request leaves nothing behind", answers.drill(answers.abort), share=2),
    Check("leave", "nor does a client that leaves", answers.drill(answers.leave), share=2),
    Check("deadline", "a deadline ends a request", answers.drill(answers.deadline), share=2),
    Check("pages", "requests wait where pages are few", answers.drill(answers.exhaust_pages), share=4),
    Check("bandwidth", "memory is as fast as the chip's should be", speeds.bandwidth, share=3),
    Check("matmul", "matmuls run", speeds.matmul, share=2),
    Check("headroom", "memory is left for the KV cache", speeds.headroom),
    Check("roofline", "every entry was timed", speeds.roofline, share=8),
    Check("W1", "one client, 128 tokens in and out", speeds.workload("W1"), share=5),
    Check("W2", "8 clients, 128 tokens in and out", speeds.workload("W2"), share=5),
    Check("W3", "32 clients, 16 to 512 tokens in, 64 out", speeds.workload("W3"), share=6),
    Check("emulator", "the emulated GPU found nothing wrong", emulator.findings),
    Check("soak", "memory, pages and answers stay as they are", answers.soak, is_optional=True),
)
BY_NAME = {check.name: check for check in CHECKS}
NONE: Figures = {}


def run_check(check: Check, bench: Bench, limit_s: float) -> Outcome:
    """Run a check. An exception that it raises is its failure."""
    begin = time.monotonic()
    bench.begin(limit_s)

    def outcome(status: Status, text: str, fault: Fault | None = None, figures: Figures = NONE) -> Outcome:
        return Outcome(check.name, status, text, time.monotonic() - begin, fault, figures)

    try:
        passed = check.run(bench)
        return outcome(Status.PASSED, passed.text, None, passed.figures)
    except Skipped as skipped:
        return outcome(Status.SKIPPED, str(skipped))
    except Failed as failed:
        return outcome(Status.FAILED, str(failed), failed.fault, failed.figures)
    except Exception as error:  # whatever the runtime raises
        return outcome(Status.FAILED, f"{type(error).__name__}: {error}")


def chosen(only: Iterable[str] | None, *, soaks: bool) -> list[Check]:
    """Return the checks to run. `machine` always runs, because the report describes the machine."""
    if only is None:
        return [check for check in CHECKS if not check.is_optional or soaks]
    names = {"machine", *only}
    return [check for check in CHECKS if check.name in names or (check.is_optional and soaks)]
