"""Does a VMFB hold what its `config.json` says? Asked once, before anything is served.

The ABI is upstream's (`module_abi_version` 1), for N in the batch sizes, one cache slab per pipeline stage:

    prefill_bsN(tokens [N,S], [start_positions [N],] seq_lens [N], seq_block_ids [N,B], slabs...)
    decode_bsN(tokens [N,1], seq_lens [N], start_positions [N], seq_block_ids [N,B], slabs...)

and, where the VMFB has any (names tell, config.json does not), R tasks packed into T tokens:

    extend, extend_tT(tokens [T], offsets [R], start_positions [R], seq_lens [R], seq_block_ids [R,B],
                      slabs...)

or a padded `extend` with a prefill's arguments for any N. All are i64, with slabs `[pages, elements]` of
`kv_cache_dtype`; one result (logits) without `top_k`, else at least two (values, indices). Entries without
reflection data are taken as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NoReturn

import numpy as np

from shortfin_apps.llm.components.runtime.declaration import format_type
from shortfin_apps.llm.components.runtime.device import EntrySignature, Program, TensorType
from shortfin_apps.llm.config import ModelConfig
from shortfin_apps.llm.errors import ArtifactError

_I64 = np.dtype(np.int64)
_EXTEND = re.compile(r"extend(?:_t(\d+))?")


def check_program(program: Program, config: ModelConfig) -> None:
    """Raises ArtifactError naming the entry, what was found, what was expected and what to do."""
    expected = [*_expected_entries(config), *_expected_extends(program.entries, config)]
    for name, arguments in expected:
        signature = program.entries.get(name)
        if signature is None:
            _fail_missing(name, program)
        _check_arguments(signature, arguments, config)
        check_results(signature, config)
    _check_stride(config)


def check_vocabulary(rows: int | None, num_tokens: int | None) -> None:
    """Raises ArtifactError when a tokenizer of `num_tokens` makes ids that an embedding of `rows` lacks.

    None is not known.
    """
    if rows is not None and num_tokens is not None and num_tokens > rows:
        raise ArtifactError(
            f"the tokenizer has {num_tokens} tokens but the model only {rows}; it belongs to another model: "
            "give the tokenizer.json that the model was made with"
        )


def logits_width(signature: EntrySignature, config: ModelConfig) -> int | None:
    """The model's vocabulary, where the entry's results tell: logits are the only result, or the third."""
    results, place = signature.results, 0 if config.top_k is None else 2
    return None if results is None or len(results) <= place else results[place].shape[-1]


def _check_stride(config: ModelConfig) -> None:
    """Holds `block_seq_stride` against a page's elements, which the entries' signatures were held against."""
    cache = config.paged_kv_cache
    per_token = 2 * config.transformer_block_count * cache.attention_head_count_kv * config.attn_head_dim
    elements = sum(config.page_elements)
    if elements != per_token * config.stride:
        raise ArtifactError(
            f"a page has {elements} elements, which are K and V of {elements / per_token:g} tokens, where "
            f"`paged_kv_cache.block_seq_stride` in config.json says {config.stride}; correct that field or "
            "the model's sizes there, or rebuild with `shortfin-llm build`"
        )


def _expected_entries(config: ModelConfig) -> Iterator[tuple[str, dict[str, TensorType]]]:
    for size in config.prefill_batch_sizes:
        yield f"prefill_bs{size}", _prefill_arguments(size, config) | _slabs(config)
    for size in config.decode_batch_sizes:
        yield f"decode_bs{size}", _decode_arguments(size) | _slabs(config)


def _expected_extends(
    entries: Mapping[str, EntrySignature], config: ModelConfig
) -> Iterator[tuple[str, dict[str, TensorType]]]:
    for name, signature in entries.items():
        if (match := _EXTEND.fullmatch(name)) is None:
            continue
        is_padded = signature.arguments is not None and len(signature.arguments[0].shape) == 2
        arguments = _prefill_arguments(None, config) if is_padded else _packed_arguments(match[1])
        yield name, arguments | _slabs(config)


def _packed_arguments(tokens: str | None) -> dict[str, TensorType]:
    rows = TensorType((None,), _I64)
    return {
        "tokens": TensorType((int(tokens) if tokens else None,), _I64),
        "offsets": rows,
        "start_positions": rows,
        "seq_lens": rows,
        "seq_block_ids": TensorType((None, None), _I64),
    }


def _prefill_arguments(size: int | None, config: ModelConfig) -> dict[str, TensorType]:
    start = {"start_positions": TensorType((size,), _I64)} if config.has_prefill_position else {}
    return {
        "tokens": TensorType((size, None), _I64),
        **start,
        "seq_lens": TensorType((size,), _I64),
        "seq_block_ids": TensorType((size, None), _I64),
    }


def _decode_arguments(size: int) -> dict[str, TensorType]:
    return {
        "tokens": TensorType((size, 1), _I64),
        "seq_lens": TensorType((size,), _I64),
        "start_positions": TensorType((size,), _I64),
        "seq_block_ids": TensorType((size, None), _I64),
    }


def _slabs(config: ModelConfig) -> dict[str, TensorType]:
    dtype = config.paged_kv_cache.dtype
    return {f"cache slab {i}": TensorType((None, n), dtype) for i, n in enumerate(config.page_elements)}


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


def check_results(signature: EntrySignature, config: ModelConfig) -> None:
    """Raises ArtifactError when the results, where they are known, are not what `top_k` means."""
    found = signature.results
    if found is None:
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


def _fits(actual: TensorType, wanted: TensorType) -> bool:
    """A dimension that either side leaves open fits any."""
    return (
        actual.dtype == wanted.dtype
        and len(actual.shape) == len(wanted.shape)
        and all(a == w or None in (a, w) for a, w in zip(actual.shape, wanted.shape, strict=True))
    )


def _field(argument: str, actual: TensorType, wanted: TensorType) -> str:
    """The config field that a mismatch of `argument` points at."""
    if not argument.startswith("cache slab"):
        return "the batch sizes or `has_prefill_position`"
    if actual.dtype != wanted.dtype:
        return "`kv_cache_dtype`"
    return "the page geometry (`paged_kv_cache`)"


def _fail_missing(name: str, program: Program) -> NoReturn:
    field = "prefill_batch_sizes" if name.startswith("prefill") else "decode_batch_sizes"
    present = ", ".join(sorted(program.entries)) or "nothing"
    raise ArtifactError(
        f"the VMFB has no entry `{name}` (it has {present}) though config.json lists that size; correct "
        f"`{field}` there, or rebuild with `shortfin-llm build`"
    )
