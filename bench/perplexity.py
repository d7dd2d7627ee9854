"""Measures the quality of weight types: perplexity on a fixed text.

    python bench/perplexity.py F32_DIR BF16_DIR Q8_DIR ...     # artefacts of `shortfin-llm build`

The text is this repository's LICENSE and generated prose of a fixed seed, cut into one window per row of the
model's largest decode batch. Each window is decoded token by token with the text's own tokens (teacher
forcing), so that the decode entry is measured as it serves. Ratios are to the first artefact.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
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


def content(num_tokens: int) -> str:
    """Return the text, with at least `num_tokens` tokens."""
    return LICENSE.read_text(encoding="utf-8") + text("perplexity", num_tokens)


def windows(artifact: Artifact, rows: int, length: int) -> Tokens:
    """Return token ids of the text, [rows, length]."""
    tokenizer = Tokenizer.load(artifact.tokenizer, artifact.tokenizer_config)
    token_ids = tokenizer.encode(content(rows * length), add_special_tokens=False)
    return np.array(token_ids[: rows * length], np.int64).reshape(rows, length)


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


def perplexity(device: Device, directory: Path, length: int) -> tuple[float, str]:
    """Return the perplexity, and a description of the weight and cache types."""
    artifact = Artifact.open(directory)
    assert artifact.manifest is not None
    options, config = artifact.manifest.options, artifact.config
    rows = max(options.decode_batch_sizes)
    program = device.load_program(artifact.vmfb, artifact.parameters, config.module_name)
    tokens = windows(artifact, rows, length)
    slabs = allocate_slabs(device, config, tokens)
    total = 0.0
    for position, logprobs in enumerate(decode(device, program, slabs, config.stride, tokens)):
        total -= float(logprobs[np.arange(rows), tokens[:, position + 1]].sum())
        if sys.stderr.isatty():
            print(f"\r{directory}: {position + 2} of {length}", end="", file=sys.stderr)
    return float(np.exp(total / (rows * (length - 1)))), f"{options.weights}, KV {options.kv}"


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR")
    parser.add_argument("--length", type=int, default=256, help="tokens in a window (default: %(default)s)")
    args = parser.parse_args()
    device = open_device("cpu")
    first = None
    print("| weights | perplexity | to the first |\n| --- | --- | --- |")
    for directory in args.directories:
        value, what = perplexity(device, directory, args.length)
        first = first or value
        print(f"| {what} | {value:.3f} | {value / first - 1:+.2%} |", flush=True)
    device.close()


if __name__ == "__main__":
    main()
