"""Completes a packed model on the target machine by creating its parameters and tokenizer.

A pack has the program and only a list of its parameters, which take 16 GB for an 8B model.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter

from shortfin_apps.llm.artifact import file_names
from shortfin_apps.llm.artifact.artifact import Manifest
from shortfin_apps.llm.artifact.file_record import FileRecord, record
from shortfin_apps.llm.builder.sources.random_tiny import (
    NUM_BYTES,
    NUM_RESERVED,
    SPECIAL_TOKENS,
    RandomTinySource,
)
from shortfin_apps.llm.builder.weights.layout import PANEL
from shortfin_apps.llm.components.runtime.declaration import MLIR_DTYPES
from shortfin_apps.llm.contract.irpa import ArchiveEntry, write_archive

LIST = "parameters.json"
SEED = 20261122
BLOCK_TERMS = (".scales", ".minima")
QUANT_DEVIATION = 74  # standard deviation of random bytes
NOT_HASHED = ""  # instead of the SHA-256 of parameters; they are served with `--verify size`

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the program; `features` is the number of input features of its weight.

    `deviation` is the standard deviation of its noise, relative to other parameters. With `is_identity`, the
    noise is added to an identity matrix.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    features: int
    deviation: float = 1.0
    is_identity: bool = False


PARAMETER_LIST = TypeAdapter(list[Parameter])


def complete(packed: Path, out: Path) -> None:
    """Complete a packed model to a directory `out` like one from `shortfin-llm build`.

    Its parameters are copied from the pack, or else noise for each listed one; it has no self-test.
    """
    out.mkdir(parents=True)
    manifest = Manifest.load(packed / file_names.MANIFEST, lists_files=False)
    for name in (file_names.VMFB, file_names.CONFIG):
        shutil.copyfile(packed / name, out / name)
    write_tokenizer(manifest.vocab_size, out)
    parameters = out / file_names.PARAMETERS
    if (packed / file_names.PARAMETERS).exists():
        shutil.copyfile(packed / file_names.PARAMETERS, parameters)
    else:
        write_noise(PARAMETER_LIST.validate_json((packed / LIST).read_bytes()), parameters)
    files = {name: record(out / name) for name in (file_names.VMFB, file_names.CONFIG, *file_names.TEXTS)}
    files[file_names.PARAMETERS] = FileRecord(sha256=NOT_HASHED, size_bytes=parameters.stat().st_size)
    (out / file_names.MANIFEST).write_bytes(replace(manifest, files=files).to_json())


def write_noise(parameters: Sequence[Parameter], path: Path) -> None:
    """Write an archive of noise, seeded by the parameter's name.

    Weights are normal with a standard deviation of 1 / sqrt(input features), so that activations neither
    vanish nor overflow. Weights in blocks have about the same, with random bytes as quants and f16 terms.
    """
    entries = [
        ArchiveEntry(each.name, prod(each.shape) * MLIR_DTYPES[each.dtype].itemsize) for each in parameters
    ]
    write_archive(path, entries, _made_ahead(parameters))


def _noise(parameter: Parameter) -> bytes | memoryview:
    random = np.random.default_rng([SEED, zlib.crc32(parameter.name.encode())])
    dtype = MLIR_DTYPES[parameter.dtype]
    is_term = parameter.name.endswith(BLOCK_TERMS)
    if dtype == np.int8 and is_term:  # f16 and i8 terms with a product of 2^-12
        return np.full(parameter.shape, 4, np.int8).reshape(-1).data
    if dtype == np.int8:
        quants: Array = random.integers(-128, 128, parameter.shape, np.int8)
        return quants.reshape(-1).data
    values: Array = random.standard_normal(parameter.shape, np.float32)
    if parameter.name.endswith("ssm_steps.bias"):  # only negative ones, or states grow
        values = -np.abs(values)
    elif len(parameter.shape) == 1:  # a norm, or scales of an 8-bit float weight
        values = 1 + np.float32(0.1 * parameter.deviation) * values
    else:
        values *= np.float32(parameter.deviation / np.sqrt(parameter.features))
        values /= QUANT_DEVIATION if is_term else 1
    if parameter.is_identity:
        _add_identity(values)
    stored: Array = values.astype(dtype)
    return stored.view(np.uint8).reshape(-1).data


def _add_identity(values: Array) -> None:
    """Add an identity matrix in place to a weight, row-major or in panels (builder/weights/layout.py)."""
    if values.ndim == 2:
        features = np.arange(len(values))
        values[features, features] += 1
    else:
        panels, _, width = values.shape
        features, pair = np.arange(panels * PANEL), width // PANEL
        values[features // PANEL, features // pair, features % PANEL * pair + features % pair] += 1


def _made_ahead(parameters: Sequence[Parameter]) -> Iterator[bytes | memoryview]:
    """Yield the noise of each parameter, in order; threads prepare the next few."""
    waiting: deque[Future[bytes | memoryview]] = deque()
    num_threads = os.cpu_count() or 1
    with ThreadPoolExecutor(num_threads, thread_name_prefix="noise") as pool:
        for parameter in parameters:
            waiting.append(pool.submit(_noise, parameter))
            if len(waiting) > num_threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def write_tokenizer(vocab_size: int, out: Path) -> None:
    """Write random:tiny's byte tokenizer with a word for each further token id, so that all have a text."""
    files = RandomTinySource().tokenizer_files()
    tokenizer = json.loads(files.tokenizer)
    first = NUM_BYTES + len(SPECIAL_TOKENS) + NUM_RESERVED
    tokenizer["model"]["vocab"] |= {f"\u0120w{number}": number for number in range(first, vocab_size)}
    (out / file_names.TOKENIZER).write_text(json.dumps(tokenizer), encoding="utf-8")
    (out / file_names.TOKENIZER_CONFIG).write_text(json.dumps(files.config), encoding="utf-8")
    (out / file_names.GENERATION_CONFIG).write_text(json.dumps(files.generation), encoding="utf-8")
