"""`shortfin-llm qualify`."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from shortfin_apps.llm.contract.errors import ArtifactError, InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shortfin_apps.llm.tools.qualify.bench import Plan
    from shortfin_apps.llm.tools.qualify.outcome import Outcome

EXIT_OK, EXIT_FAILED, EXIT_ERROR, EXIT_INTERRUPTED = 0, 1, 2, 130

DESCRIPTION = """\
Tests a device on which this package may never have run, in at most 10 minutes: what its kernels compute,
what a server on it answers under preemption and harmless faults, and how fast it is. Writes qualify.json and
qualify.html into a folder, to be attached to a report of success or failure. They hold the chip, driver and
firmware, and no names of people, machines or folders."""

EPILOG = """\
examples:
  shortfin-llm qualify                             # this machine's GPU, or else its CPU, with random:tiny
  shortfin-llm qualify smollm2-mi300 --out report  # an artefact, so that speeds are of a real model
  shortfin-llm qualify --device hip:gfx1151 --only self-test,weights
  shortfin-llm qualify --soak 60                   # and an hour of requests

The exit status is 1 if a check failed, and 130 if Ctrl-C or SIGTERM ended the checks; the report then has
those so far. Each check runs in a process that is ended if it hangs.
docs/qualify.md says what each check proves, and which faults it can name."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "subject",
        nargs="?",
        default="random:tiny",
        metavar="MODEL",
        help="an artefact of `shortfin-llm build`, or a source, which is built first (default: %(default)s)",
    )
    parser.add_argument(
        "--device", metavar="DEVICE", help="as for `build`, with the chip (default: what this machine has)"
    )
    parser.add_argument("--only", metavar="NAME,..", help="run only these checks")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("qualification"),
        metavar="DIR",
        help="folder for the report (default: %(default)s)",
    )
    parser.add_argument(
        "--soak", type=float, default=0.0, metavar="MIN", help="also keep a server busy for so many minutes"
    )


def run(args: argparse.Namespace) -> int:
    """Run the checks and write the report; return the exit status. Raises LlmError."""
    from shortfin_apps.llm.tools.qualify.checks import chosen
    from shortfin_apps.llm.tools.qualify.page import verdict
    from shortfin_apps.llm.tools.qualify.report import as_json, document, prepare, shown, write
    from shortfin_apps.llm.tools.qualify.run import TOTAL_S, run_checks

    if not (math.isfinite(args.soak) and args.soak >= 0):
        raise InvalidRequestError("`--soak` is a number of minutes, 0 or more", "soak")
    names = _names(args.only)
    if names is not None and "soak" in names and not args.soak:
        raise InvalidRequestError("`--only soak` needs `--soak` with a number of minutes", "only")
    prepare(args.out)  # before work that would be lost
    plan = _plan(args)
    checks = chosen(names, soaks=args.soak > 0)
    minutes = TOTAL_S / 60 + plan.soak_minutes
    _print(f"{shown(plan.subject)} on {plan.device}: {len(checks)} checks, at most {minutes:g} minutes")
    outcomes: list[Outcome] = []

    def note(outcome: Outcome) -> None:
        outcomes.append(outcome)
        _print_outcome(outcome)

    is_interrupted = False
    try:
        run_checks(checks, plan, note)
    except KeyboardInterrupt:
        is_interrupted = True
    folders = [(args.subject, shown(args.subject)), (args.out, "OUT")]
    doc = document(plan, checks, outcomes, folders, is_interrupted=is_interrupted)
    _print(verdict(doc))
    try:
        print(*write(doc, args.out), sep="\n")
    except InvalidRequestError as error:
        _print(f"{error}; the report follows")
        print(as_json(doc), end="")
        return EXIT_ERROR
    if is_interrupted:
        return EXIT_INTERRUPTED
    return EXIT_OK if doc["passed"] else EXIT_FAILED


def _plan(args: argparse.Namespace) -> Plan:
    """Return what to qualify, and say what it is. Raises LlmError."""
    from shortfin_apps.llm.artifact.advice import advice
    from shortfin_apps.llm.contract.source_name import SCHEMES
    from shortfin_apps.llm.tools.qualify.bench import TINY, Plan
    from shortfin_apps.llm.tools.qualify.place import device_to_build, program_to_test
    from shortfin_apps.llm.tools.qualify.report import shown

    path = Path(args.subject)
    if Plan(args.subject, "").is_artefact:
        program, manifest = program_to_test(path, args.device)
        device = program.target.device
        if len(manifest.programs) > 1:
            _print(f"{shown(args.subject)}: its program for {device}, of those for {manifest.device}")
        return Plan(args.subject, device, args.soak)
    if not path.exists() and not args.subject.startswith(SCHEMES):
        raise ArtifactError(advice(path))
    device = device_to_build(args.device, _print)
    plan = Plan(_built(args.subject, device), device, args.soak)
    if plan.subject != TINY and not plan.is_artefact:  # not a source, so nothing was built
        raise ArtifactError(advice(path))
    return plan


def _built(source: str, device: str) -> str:
    """Return the artefact of a source, built as `serve` does; `random:tiny` is built by a check."""
    from shortfin_apps.llm.offline.settings import local_config, with_model
    from shortfin_apps.llm.tools.qualify.bench import TINY

    if source == TINY:
        return source
    return str(with_model(local_config(source, {"device": device}, _print)).model.artifact)


def _names(only: str | None) -> Sequence[str] | None:
    """Return the checks named by `--only`, None without it. Raises InvalidRequestError."""
    from shortfin_apps.llm.tools.qualify.checks import BY_NAME

    if only is None:
        return None
    names = [name.strip() for name in only.split(",")]
    if unknown := [name for name in names if name not in BY_NAME]:
        raise InvalidRequestError(f"no check is named {unknown[0]!r}; there are {', '.join(BY_NAME)}", "only")
    return names


def _print_outcome(outcome: Outcome) -> None:
    fault = f"{outcome.fault}: " if outcome.fault else ""
    _print(f"{outcome.seconds:6.1f} s  {outcome.name:14} {outcome.status:8} {fault}{outcome.text}")


def _print(text: str) -> None:
    from shortfin_apps.llm.console import visible

    print(visible(text), file=sys.stderr, flush=True)
