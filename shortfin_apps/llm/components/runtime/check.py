"""Checks, before serving, that a VMFB has the entries that its config.json describes (ABI: abi.py).

The types of entries without reflection data are not checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from shortfin_apps.llm.components.runtime.declaration import MLIR_DTYPES, format_type
from shortfin_apps.llm.components.runtime.device import EntrySignature, Program, TensorType
from shortfin_apps.llm.contract.abi import (
    ARGUMENT_TYPES,
    Entry,
    EntryFamily,
    Layout,
    TermField,
    named_results,
)
from shortfin_apps.llm.contract.config import ModelConfig
from shortfin_apps.llm.contract.errors import ArtifactError

_I64, _F32 = np.dtype(np.int64), np.dtype(np.float32)


def check_program(program: Program, config: ModelConfig, tokenizer_vocab_size: int | None = None) -> None:
    """Raise ArtifactError if entries are missing from the program or differ from `config`.

    The message names the entry, what was found, what was expected and what to do.
    """
    for required in _required_entries(config):
        if required.name not in program.entries:
            _fail_missing(required, program)
    for name, signature in program.entries.items():
        if entry := Entry.parse(name):
            _check_arguments(signature, _expected_arguments(entry, signature, config), config)
            check_results(signature, config, tokenizer_vocab_size)
    _check_stride(config)


def check_vocabulary(vocab_size: int | None, tokenizer_vocab_size: int | None) -> None:
    """Raise ArtifactError if the tokenizer has IDs outside the model's vocabulary; None means unknown."""
    if vocab_size is not None and tokenizer_vocab_size is not None and tokenizer_vocab_size > vocab_size:
        raise ArtifactError(
            f"the tokenizer has {tokenizer_vocab_size} tokens but the model only {vocab_size}; it belongs to "
            "another model: give the tokenizer.json that the model was made with"
        )


def _check_stride(config: ModelConfig) -> None:
    """Raise ArtifactError if `block_seq_stride` does not fit the elements per page (checked before)."""
    elements = sum(slab.elements for slab in config.slabs if slab.pool != "state")
    per_token = config.token_elements
    if elements != per_token * config.stride:
        raise ArtifactError(
            f"a page has {elements} elements, which are K and V of {elements / per_token:g} tokens, where "
            f"`paged_kv_cache.block_seq_stride` in config.json says {config.stride}; correct that field or "
            "the model's sizes there, or rebuild with `shortfin-llm build`"
        )


def _required_entries(config: ModelConfig) -> list[Entry]:
    prefills = [Entry(EntryFamily.PREFILL, size, None) for size in config.prefill_batch_sizes]
    return prefills + [Entry(EntryFamily.DECODE, size, 1) for size in config.decode_batch_sizes]


def _expected_arguments(
    entry: Entry, signature: EntrySignature, config: ModelConfig
) -> dict[str, TensorType]:
    """Return the type of every argument by name, in order; cache slabs, if the entry takes any, come last."""
    shapes = entry.argument_shapes(
        signature.tokens_rank,
        has_prefill_position=config.has_prefill_position,
        has_windows=config.has_window_table,
        takes_followers=signature.takes_followers,
        takes_hidden=signature.takes_hidden,
    )
    expected = {
        name: TensorType(shape, MLIR_DTYPES[ARGUMENT_TYPES.get(name, "i64")])
        for name, shape in shapes.items()
    }
    dtype = config.paged_kv_cache.dtype
    for slab in config.slabs if entry.takes_slabs else ():
        name = f"cache slab ({slab.pool} pages, stage {slab.stage})"
        expected[name] = TensorType((None, slab.elements), dtype)
    return expected


def _check_arguments(signature: EntrySignature, expected: dict[str, TensorType], config: ModelConfig) -> None:
    found = signature.arguments
    if found is None:
        return
    if len(found) != len(expected):
        raise ArtifactError(
            f"`{signature.name}` takes {len(found)} arguments where config.json "
            f"(has_prefill_position={str(config.has_prefill_position).lower()}, "
            f"{len(config.page_elements)} cache slab(s)) means {len(expected)}; correct "
            "`has_prefill_position` or `paged_kv_block_size_elements_per_device` there, or rebuild with "
            "`shortfin-llm build`"
        )
    for actual, (name, wanted) in zip(found, expected.items(), strict=True):
        if not _fits(actual, wanted):
            field = _field(name, actual, wanted)
            raise ArtifactError(
                f"`{signature.name}` takes {format_type(actual)} as {name} where config.json means "
                f"{format_type(wanted)}; correct {field} there, or rebuild with `shortfin-llm build`"
            )


def check_results(
    signature: EntrySignature, config: ModelConfig, tokenizer_vocab_size: int | None = None
) -> None:
    """Raise ArtifactError if declared results do not match `config.top_k` or the tokenizer's vocabulary."""
    found, entry = signature.results, Entry.parse(signature.name)
    if found is None:
        return
    if entry is not None and entry.layout() is Layout.LOGPROBS:
        _check_terms(signature.name, found, entry, config)
        return
    if entry is not None and entry.returns_token_ids:
        _check_token_ids(signature.name, found, entry)
        found = found[1:]
        if not entry.takes_slabs:
            return
    fits = len(found) == 1 if config.top_k is None else len(found) >= 2
    if not fits:
        wanted = "1 (logits)" if config.top_k is None else "at least 2 (values and indices)"
        raise ArtifactError(
            f"`{signature.name}` returns {len(found)} results where `top_k`={config.top_k} in config.json "
            f"means {wanted}; correct `top_k` there, or rebuild with `shortfin-llm build`"
        )
    if config.top_k is not None and (width := found[0].shape[-1]) not in (None, config.top_k):
        raise ArtifactError(
            f"`{signature.name}` returns {width} candidates a token where `top_k` in config.json says "
            f"{config.top_k}; correct `top_k` there, or rebuild with `shortfin-llm build`"
        )
    if logits := named_results(found, config.top_k).get("logits"):
        check_vocabulary(logits.shape[-1], tokenizer_vocab_size)


def _check_token_ids(name: str, found: Sequence[TensorType], entry: Entry) -> None:
    wanted = TensorType((entry.rows,), _I64)
    fits = bool(found) and (entry.takes_slabs or len(found) == 1) and _fits(found[0], wanted)
    if not fits:
        types = ", ".join(map(format_type, found)) or "nothing"
        raise ArtifactError(
            f"`{name}` returns {types} where an entry that draws tokens returns {format_type(wanted)}; "
            "rebuild with `shortfin-llm build`"
        )


def _check_terms(name: str, found: Sequence[TensorType], entry: Entry, config: ModelConfig) -> None:
    candidates = (entry.rows, config.top_k)
    wanted = [
        TensorType((len(TermField), entry.rows), _I64),
        TensorType(candidates, _F32),
        TensorType(candidates, _I64),
    ]
    if len(found) != len(wanted) or not all(map(_fits, found, wanted)):
        returned, expected = (", ".join(map(format_type, types)) or "nothing" for types in (found, wanted))
        raise ArtifactError(
            f"`{name}` returns {returned} where config.json means {expected}; correct `top_k` there, or "
            "rebuild with `shortfin-llm build`"
        )


def _fits(actual: TensorType, wanted: TensorType) -> bool:
    """Return whether the types agree; a dynamic dimension on either side fits any size."""
    return (
        actual.dtype == wanted.dtype
        and len(actual.shape) == len(wanted.shape)
        and all(a == w or None in (a, w) for a, w in zip(actual.shape, wanted.shape, strict=True))
    )


def _field(argument: str, actual: TensorType, wanted: TensorType) -> str:
    """Return the config fields to correct for a mismatch of `argument`."""
    if not argument.startswith("cache slab"):
        return "the batch sizes or `has_prefill_position`"
    if actual.dtype != wanted.dtype:
        return "`kv_cache_dtype`"
    return "the page geometry (`paged_kv_cache`)"


def _fail_missing(entry: Entry, program: Program) -> NoReturn:
    present = ", ".join(sorted(program.entries)) or "nothing"
    raise ArtifactError(
        f"the VMFB has no entry `{entry.name}` (it has {present}) though config.json lists that size; "
        f"correct `{entry.family}_batch_sizes` there, or rebuild with `shortfin-llm build`"
    )
