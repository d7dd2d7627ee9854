"""`shortfin-llm verify`."""

from __future__ import annotations

import argparse
from pathlib import Path

from shortfin_apps.llm.contract.errors import SelfTestError
from shortfin_apps.llm.tools.bench.console import add_json, positive, show

EXIT_OK, EXIT_WRONG = 0, 1

DESCRIPTION = """\
Says whether an artefact is what was built, and computes what it should. All files are hashed and compared
with the manifest. Then the self-test runs every entry of every program that a device here can run: each of
the artefact's programs that this CPU has the features for, or, of one built for GPUs, each GPU at hand. The
error of a row is the root mean square of its logits' differences from what the reference computed in f32
when the artefact was built, in standard deviations of the logits; an entry's is its largest. Entries on a
CPU must also give a token the same logits to the bit, whatever else is in the batch.
Exits with 0 if all is well, 1 if a file or an entry is wrong, and 2 if there was nothing to test."""

EPILOG = """\
examples:
  shortfin-llm verify smollm2                  # files, then entries, in a table
  shortfin-llm verify smollm2 --json -         # the same as JSON
  shortfin-llm verify smollm2 --threads 1      # with one worker, to tell a kernel's fault from the workers'

An artefact of an older version, or of `build --no-self-test`, has no self-test: only its files are compared.
docs/self_test.md says what the self-test sees, and what it does not."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR", help="an artefact of `shortfin-llm build`")
    parser.add_argument("--threads", type=positive, metavar="N", help="CPU workers (default: all CPUs)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the results. Raises LlmError."""
    from shortfin_apps.llm.tools.verify.run import document, tables, verify

    found = verify(args.directory, threads=args.threads)
    show(
        document(found),
        args.json,
        lambda console: console.print(*tables(found), sep="\n", highlight=False),
    )
    if not found.is_tested and not found.wrong_files:
        raise SelfTestError(f"{args.directory}: {found.untested}; its files are unchanged since the build")
    return EXIT_OK if found.is_right else EXIT_WRONG
