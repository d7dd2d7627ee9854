"""Measures the quality of weight types: perplexity on a text.

    python bench/perplexity.py F32_DIR BF16_DIR Q8_DIR ...     # artefacts of `shortfin-llm build`

The text is this repository's LICENSE and generated prose of a fixed seed, or the files of `--text`. One
window per row of the model's largest decode batch is taken from it, at equal distances, and begins with the
token that the tokenizer puts before a prompt. Each window is decoded token by token with the text's own
tokens (teacher forcing), so that the decode entry is measured as it serves.

Each artefact is compared with the first one on the same tokens. The standard errors are of the mean
difference of the tokens' log-probabilities, over tokens and over windows. Neighbouring tokens are not
independent, so the larger one counts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.components.runtime.device import Device, DeviceBuffer, Program
from shortfin_apps.llm.components.runtime.open import open_device
from shortfin_apps.llm.contract.config import ModelConfig
from shortfin_apps.llm.serving.text.tokenizer import Tokenizer
from shortfin_apps.llm.tools.bench.workload import text

LICENSE = Path(__file__).parents[1] / "LICENSE"
Tokens = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Scores:
    """Of each token of a text but a window's first, [windows, length - 1].

    `logprobs`: the token's log-probability; `best`: the most likely token in its place.
    """

    logprobs: Numbers
    best: Tokens

    @property
    def perplexity(self) -> float:
        return float(np.exp(-self.logprobs.mean()))

    def compared(self, first: Scores) -> str:
        """Return cells: the change of perplexity, its standard errors, and how often `best` is the same."""
        lost = first.logprobs - self.logprobs
        errors = standard_error(lost), standard_error(lost.mean(axis=1))
        cells = [f"{np.expm1(lost.mean()):+.3%}", *(f"{each:.3%}" for each in errors)]
        return " | ".join([*cells, f"{np.mean(self.best == first.best):.1%}"])


def standard_error(values: Numbers) -> float:
    """Return the standard error of the mean of independent values; NaN for a single one."""
    return float(values.std(ddof=1) / np.sqrt(values.size)) if values.size > 1 else float("nan")


def content(num_tokens: int) -> str:
    """Return the text, with at least `num_tokens` tokens."""
    return LICENSE.read_text(encoding="utf-8") + text("perplexity", num_tokens)


def windows(artifact: Artifact, rows: int, length: int, files: Sequence[Path]) -> Tokens:
    """Return token ids of the text, [rows, length]."""
    tokenizer = Tokenizer.load(artifact.tokenizer, artifact.tokenizer_config)
    prose = "".join(file.read_text(encoding="utf-8") for file in files) or content(rows * length)
    token_ids = tokenizer.encode(prose, add_special_tokens=False)
    if len(token_ids) < rows * length:
        raise SystemExit(f"the text has {len(token_ids)} tokens, fewer than {rows} windows of {length}")
    begin = tokenizer.encode("", add_special_tokens=True)[:1]
    return cut(token_ids if files else token_ids[: rows * length], begin, rows, length)


def cut(token_ids: Sequence[int], begin: Sequence[int], rows: int, length: int) -> Tokens:
    """Return `rows` windows at equal distances, each of `begin` and then tokens of the text."""
    own, distance = length - len(begin), len(token_ids) // rows
    starts = range(0, distance * rows, distance)
    return np.array([[*begin, *token_ids[start : start + own]] for start in starts], np.int64)


def decode(
    device: Device, program: Program, slabs: Sequence[DeviceBuffer], stride: int, tokens: Tokens
) -> Iterator[npt.NDArray[np.float32]]:
    """Yield log-probabilities [rows, vocabulary] after each column of `tokens` but the last."""
    rows, length = tokens.shape
    width = -(-length // stride)
    table = device.upload(1 + np.arange(rows * width, dtype=np.int64).reshape(rows, width))
    pages = [table, *slabs] if len(slabs) == 1 else [table, table, *slabs]
    for position in range(length - 1):
        inputs = [tokens[:, position : position + 1], np.full(rows, position + 1), np.full(rows, position)]
        arguments = [device.upload(np.ascontiguousarray(array, np.int64)) for array in inputs]
        results = program.submit(f"decode_bs{rows}", [*arguments, *pages]).wait()
        logits = device.download(results[2])[:, 0].astype(np.float64)
        shifted = logits - logits.max(axis=1, keepdims=True)
        yield shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def allocate_slabs(device: Device, config: ModelConfig, tokens: Tokens) -> list[DeviceBuffer]:
    """Allocate a KV cache for these rows."""
    rows, length = tokens.shape
    pages, dtype = 1 + rows * -(-length // config.stride), config.paged_kv_cache.dtype
    return [device.allocate((pages, elements), dtype) for elements in config.page_elements]


def score(device: Device, directory: Path, length: int, files: Sequence[Path]) -> tuple[Scores, str]:
    """Score the text, and describe the types of the weights and the cache."""
    artifact = Artifact.open(directory)
    assert artifact.manifest is not None
    options, config = artifact.manifest.options, artifact.config
    rows = max(options.decode_batch_sizes)
    program = device.load_program(artifact.vmfb, artifact.parameters, config.module_name)
    tokens = windows(artifact, rows, length, files)
    slabs = allocate_slabs(device, config, tokens)
    known, best = [], []
    for position, logprobs in enumerate(decode(device, program, slabs, config.stride, tokens)):
        known.append(logprobs[np.arange(rows), tokens[:, position + 1]])
        best.append(logprobs.argmax(axis=1))
        if sys.stderr.isatty():
            print(f"\r{directory}: {position + 2} of {length}", end="", file=sys.stderr)
    scores = Scores(np.stack(known, axis=1), np.stack(best, axis=1))
    return scores, f"{options.weights}, KV {options.kv}"


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR")
    parser.add_argument("--length", type=int, default=256, help="tokens in a window (default: %(default)s)")
    parser.add_argument("--text", nargs="+", type=Path, default=[], metavar="FILE", help="another text")
    args = parser.parse_args()
    device = open_device("cpu")
    first = None
    print("| weights | perplexity | to the first | error, tokens | error, windows | same best token |")
    print("|" + 6 * " --- |")
    for directory in args.directories:
        scores, what = score(device, directory, args.length, args.text)
        first = first or scores
        print(f"| {what} | {scores.perplexity:.3f} | {scores.compared(first)} |", flush=True)
    device.close()


if __name__ == "__main__":
    main()
