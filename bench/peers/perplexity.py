"""Compares the logits of artefacts with llama.cpp's, of the same GGUF file on the same tokens.

    python -m bench.peers.perplexity SOURCE DIR ...    # artefacts that were built from SOURCE

llama-perplexity cuts the text of bench/perplexity.py into windows of 256 tokens and scores the latter half of
each. Each artefact decodes the same tokens. The table has the perplexity of both, and at how many positions
the most likely token is the same; "apart" is by how much llama.cpp's choice is less likely than an artefact's
own, at most, in logits.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.peers.__main__ import DEFAULT_CACHE
from bench.peers.cache import Cache, SetUpError
from bench.peers.kinds import KINDS
from bench.peers.llama_cpp import LlamaCpp
from bench.peers.subject import Subject
from bench.perplexity import allocate_slabs, content, decode
from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.components.runtime.open import open_device
from shortfin_apps.llm.contract.errors import LlmError
from shortfin_apps.llm.serving.text.tokenizer import Tokenizer

LENGTH = 256
MAGIC = b"_logits_"
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Scored:
    """The results of llama-perplexity: `best` are its most likely next tokens at each scored position."""

    perplexity: float
    tokens: Array  # [windows, length]
    best: Array  # [windows, scored]

    @property
    def first(self) -> int:
        """The last column before the first scored one."""
        length: int = self.tokens.shape[1]
        return length // 2


@dataclass(frozen=True, slots=True)
class Agreement:
    """An artefact compared with llama.cpp."""

    perplexity: float
    same: float  # share of positions with the same best token
    apart: float  # logits


def read_logits(file: Path) -> tuple[Array, Array]:
    """Return tokens [windows, length] and best tokens [windows, scored] of `--kl-divergence-base`.

    The format is llama.cpp's: MAGIC; length, vocabulary size and number of windows, all i32; tokens, i32;
    then for each scored token two f32, and the vocabulary's log-probabilities as u16 steps of the first f32,
    padded to an even number.
    """
    with file.open("rb") as opened:
        if opened.read(len(MAGIC)) != MAGIC:
            raise SetUpError(f"{file}: not written by llama-perplexity")
        length, vocabulary, count = (int(number) for number in np.fromfile(opened, np.int32, 3))
        tokens = np.fromfile(opened, np.int32, count * length).reshape(count, length)
        rows = np.memmap(
            file,
            np.uint16,
            "r",
            opened.tell(),
            (count, length - 1 - length // 2, 4 + vocabulary + vocabulary % 2),
        )
    best = [[int(row[4 : 4 + vocabulary].argmax()) for row in window] for window in rows]
    return tokens.astype(np.int64), np.array(best)


def score(llama: LlamaCpp, cache: Cache, count: int, threads: int) -> Scored:
    """Run llama-perplexity on `count` windows. Raises SetUpError."""
    text, logits, log = cache.root / "text", cache.root / "logits", cache.root / "logs" / "perplexity.log"
    text.write_text(content((count + 2) * LENGTH), encoding="utf-8")
    log.unlink(missing_ok=True)
    command: list[str | Path] = [
        llama.program("llama-perplexity"),
        "-m",
        llama.model,
        "-f",
        text,
        "-c",
        str(LENGTH),
    ]
    command += ["--chunks", str(count), "-t", str(threads), "--kl-divergence-base", logits]
    cache.run("perplexity", command)
    found = re.search(r"Final estimate: PPL = ([0-9.]+)", log.read_text(encoding="utf-8", errors="replace"))
    if found is None:
        raise SetUpError(f"llama-perplexity has printed no perplexity; its output is in {log}")
    tokens, best = read_logits(logits)
    logits.unlink()
    return Scored(float(found[1]), tokens, best)


def compare(directory: Path, scored: Scored) -> Agreement:
    """Decode the tokens with an artefact that has a decode entry with one row per window."""
    artifact = Artifact.open(directory)
    tokenizer = Tokenizer.load(artifact.tokenizer, artifact.tokenizer_config)
    tokens = scored.tokens.copy()
    if begin := tokenizer.encode("", add_special_tokens=True):
        tokens[:, 0] = begin[0]  # as llama-perplexity does
    lost, same, apart = [], [], [0.0]
    for column, logprobs in scored_columns(artifact, tokens, scored.first):
        rows = np.arange(len(tokens))
        lost += list(-logprobs[rows, tokens[:, column + 1]])
        theirs = scored.best[:, column - scored.first]
        gaps = logprobs.max(axis=1) - logprobs[rows, theirs]
        same += list(logprobs.argmax(axis=1) == theirs)
        apart += list(gaps)
    return Agreement(float(np.exp(np.mean(lost))), float(np.mean(same)), float(max(apart)))


def scored_columns(artifact: Artifact, tokens: Array, first: int) -> Iterator[tuple[int, Array]]:
    """Yield columns from `first` on, with the log-probabilities [windows, vocabulary] of the next token."""
    config = artifact.config
    device = open_device("cpu")
    program = device.load_program(artifact.vmfb, artifact.parameters, config.module_name)
    slabs = allocate_slabs(device, config, tokens)
    for column, logprobs in enumerate(decode(device, program, slabs, config.stride, tokens)):
        if column >= first:
            yield column, logprobs
    device.close()


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", metavar="SOURCE", help="a GGUF file or pypi:NAME")
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR")
    parser.add_argument(
        "--windows", type=int, default=8, help="a batch size of the artefacts (default: %(default)s)"
    )
    parser.add_argument(
        "--device", default="cpu", metavar="cpu[:NAME]", help="of llama.cpp (default: this host's)"
    )
    parser.add_argument("--threads", type=int, default=2, help="of llama.cpp (default: %(default)s)")
    parser.add_argument(
        "--cache", type=Path, default=DEFAULT_CACHE, metavar="DIR", help="(default: %(default)s)"
    )
    args = parser.parse_args()
    cache = Cache(args.cache, lambda line: print(line, file=sys.stderr, flush=True))
    llama = LlamaCpp(cache, args.threads, 1, Subject(args.source, args.device))
    try:
        llama.set_up(KINDS["own"])
        scored = score(llama, cache, args.windows, args.threads)
        print("| | perplexity | to llama.cpp | same best token | apart |\n|---|---|---|---|---|")
        print(f"| llama.cpp | {scored.perplexity:.3f} | | | |", flush=True)
        for directory in args.directories:
            found = compare(directory, scored)
            ratio = found.perplexity / scored.perplexity - 1
            told = f"{found.perplexity:.3f} | {ratio:+.2%} | {found.same:.2%} | {found.apart:.3f}"
            print(f"| {directory.name} | {told} |", flush=True)
    except (SetUpError, LlmError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
