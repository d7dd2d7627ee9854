"""`shortfin-llm verify`."""

from __future__ import annotations

import argparse
from pathlib import Path

from shortfin_apps.llm.contract.errors import SelfTestError
from shortfin_apps.llm.tools.bench.console import add_json, positive, show

EXIT_OK, EXIT_WRONG = 0, 1

DESCRIPTION = """\
Checks that an artefact's files are unchanged since the build, and that its programs compute correct
results. First, all files are hashed and compared with the manifest. Then the self-test runs every entry
of every program that a device of this machine supports: on CPUs, the programs whose features the CPU has;
of an artefact for GPUs, its program on each available GPU. A row's error is the root mean square of the
differences between its logits and the f32 reference that was computed by the build, in standard
deviations of the logits. An entry's error is the maximum of its rows. On CPUs, a token must also have
bit-identical logits in every batch. The exit status is 0 if everything is correct, 1 if a file or an
entry is wrong, and 2 if nothing was tested."""

EPILOG = """\
examples:
  shortfin-llm verify smollm2                  # files, then entries, in a table
  shortfin-llm verify smollm2 --json -         # the same as JSON
  shortfin-llm verify smollm2 --threads 1      # with one worker, to tell a kernel's fault from the workers'

An artefact of an older version, or of `build --no-self-test`, has no self-test: only its files are compared.
docs/self_test.md says what the self-test sees, and what it does not."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR", help="an artefact of `shortfin-llm build`")
    parser.add_argument(
        "--threads", type=positive, metavar="N", help="CPU workers (default: all CPUs, at most 64)"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Verify the artefact and print the results; return the exit status. Raises LlmError."""
    from shortfin_apps.llm.tools.verify.run import document, tables, verify

    found = verify(args.directory, threads=args.threads)
    show(document(found), args.json, lambda console: console.print(*tables(found), sep="\n", highlight=False))
    if not found.is_tested and not found.wrong_files:
        raise SelfTestError(f"{args.directory}: {found.untested}; its files are unchanged since the build")
    return EXIT_OK if found.is_right else EXIT_WRONG
