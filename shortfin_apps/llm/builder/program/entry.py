"""Emit the entries of a module: functions with the ABI in `contract/abi.py` around the model's operations.

Entries follow IREE's coarse-fences ABI: they are named `name$async`, and take a wait fence and a signal
fence as their last arguments. Their reflection data declares their types, and that only dispatches write the
KV cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from shortfin_apps.llm.builder.graph.batch import Batch, Slab
from shortfin_apps.llm.builder.graph.emitter import Bounded, Dim, Emitter, Tensor, tensor_type
from shortfin_apps.llm.builder.lowering.linalg.draft_rows import draft_rows
from shortfin_apps.llm.builder.lowering.linalg.hidden_states import loop_rows
from shortfin_apps.llm.builder.lowering.lowering import LOGITS_MEMORY, RowResults, Values
from shortfin_apps.llm.contract.abi import (
    ARGUMENT_TYPES,
    ASYNC_SUFFIX,
    BLOCK_TABLES,
    CALLER_OWNED,
    COMPUTE_UNITS,
    ONLY_DISPATCHES,
    TAKES_FOLLOWERS,
    TAKES_HIDDEN,
    Entry,
    EntryFamily,
    Layout,
    SamplingField,
)
from shortfin_apps.llm.contract.config import Pool
from shortfin_apps.llm.model.spec import BuildOptions

# Maximum number of sequences in an `extend_t{T}` entry with caller-owned results. Each needs memory for its
# logits. The largest decode by default has as many sequences, and the two share this memory.
MOST_PACKED_ROWS = 256

CACHES = ("cache", "window_cache")  # argument names of the slabs
LOOP_STATE = ("positions", "last_tokens")  # arguments that a decode loop updates in place
ROW_UPDATES = {  # arguments that entries update which read existing rows
    EntryFamily.SAMPLE: ("last_tokens",),
    EntryFamily.ADJUSTED_SAMPLE: ("positions", "last_tokens", "counts"),
    EntryFamily.LOGPROBS: (),
}


class SlabSizes(NamedTuple):
    """The layers with pages in a pool's slab, the elements of a page, and cache rows per token and layer."""

    layers: Sequence[int]
    elements: int
    planes: int


Slabs = Mapping[Pool, SlabSizes]
Body = Callable[[Emitter, Mapping[str, Tensor], Batch], Values]
RowBody = Callable[[Emitter, Mapping[str, Tensor]], RowResults]


def entries_of(options: BuildOptions, *, draws_rows: bool = False, has_draft: bool = False) -> list[Entry]:
    """List the entries for `options`.

    `draws_rows` adds the entries that read existing rows of logits, `has_draft` the entries `draft`.
    """
    sizes = options.prefill_batch_sizes
    return [
        *(Entry(EntryFamily.PREFILL, n, None) for n in sizes),
        *(Entry(EntryFamily.PREFILL, n, s) for n in sizes for s in options.chunk_sizes),
        *(Entry(EntryFamily.DECODE, n, 1) for n in options.decode_batch_sizes),
        *(Entry(EntryFamily.EXTEND, None, t) for t in (None, *options.extend_sizes)),
        *(Entry(EntryFamily.DRAFT, n, 1) for n in options.decode_batch_sizes if has_draft),
        *(Entry(EntryFamily.DECODE_LOOP, n, 1) for n in options.loop_sizes),
        *(Entry(EntryFamily.SAMPLE, n, None) for n in options.loop_sizes if draws_rows),
        *(Entry(EntryFamily.ADJUSTED_SAMPLE, n, None) for n in options.loop_sizes if draws_rows),
        *(Entry(EntryFamily.LOGPROBS, n, None) for n in options.loop_sizes if draws_rows),
    ]


def write_entry(
    entry: Entry,
    options: BuildOptions,
    slabs: Slabs,
    body: Body,
    *,
    static_workspace: bool,
    logits_size: int | None,
    hidden_size: int | None = None,
) -> str:
    """Return the MLIR of a prefill, decode or extend entry.

    `body` emits the operations from the imported tensors to values, indices and logits. `static_workspace`:
    the size of the temporaries of `body` does not depend on the block table's size. `logits_size`: the number
    of a row's logits, if `body` can write them to LOGITS_MEMORY. `hidden_size`: the size of a hidden state,
    if the model has a draft layer.
    """
    e = Emitter()
    inputs, batch = _arguments(e, entry, options, slabs)
    if hidden_size is not None:
        inputs |= {name: _import(e, name, (batch.rows,), "i64") for name in ("hidden_from", "hidden_to")}
        inputs |= _hidden_table(e, hidden_size)
    if static_workspace:
        batch.rows = _bounded(batch)
    owned = static_workspace and isinstance(batch.tokens, int)
    if owned and logits_size is not None:
        inputs[LOGITS_MEMORY] = _logits_memory(e, batch.rows, logits_size)
    if "last_tokens" in inputs:
        inputs["tokens"] = _known_tokens(e, inputs["tokens"], inputs["last_tokens"])
    values = body(e, inputs, batch)
    results, updated = _of_rows(e, values), _written(entry, batch, values, hidden_size)
    types = _argument_types(entry, options, slabs, hidden_size)
    units = batch.compute_units
    return _function(e, entry, types, results, updated, owned=owned, compute_units=units)


def write_decode_loop(
    entry: Entry,
    options: BuildOptions,
    slabs: Slabs,
    body: Body,
    *,
    static_workspace: bool,
    logits_size: int | None,
    hidden_size: int | None = None,
) -> str:
    """Return the MLIR of a decode loop (a decode that also draws tokens and advances positions), or a draft.

    `body` emits the operations up to the drawn token of each batch row and the updated positions and table.
    The keyword arguments are as in `write_entry`.
    """
    e = Emitter()
    rows = entry.rows
    assert rows is not None, "a decode loop has a fixed number of rows"
    of_rows = ("tokens", "slots", "positions", *(["checked"] if entry.layout() is Layout.DRAFT else []))
    shapes: dict[str, Sequence[Dim]] = {
        **dict.fromkeys(of_rows, (rows,)),
        "sampling": (len(SamplingField), rows),
        "last_tokens": (_dim(e, "last_tokens", 0),),
    }
    inputs = {
        name: _import(e, name, shape, "i64", updated=name in LOOP_STATE) for name, shape in shapes.items()
    }
    positions, last_tokens = (_import_read(e, name, shapes[name], "i64") for name in LOOP_STATE)
    imported = _slabs(e, rows, options, slabs)
    if static_workspace and logits_size is not None:
        inputs[LOGITS_MEMORY] = _logits_memory(e, rows, logits_size)
    slots = inputs["slots"]
    if hidden_size is not None:
        inputs |= _hidden_table(e, hidden_size)
        inputs["hidden_from"] = _import(e, "hidden_from", (rows,), "i64")
    if entry.layout() is Layout.DRAFT:
        count, _ = inputs["hidden_table"].shape
        found = draft_rows(e, {**inputs, "positions": positions}, last_tokens, count)
        positions = found.positions
        inputs |= {"tokens": found.tokens, "hidden_from": found.hidden_from, "slots": found.places}
        inputs["positions"] = _written_over(e, inputs["positions"], positions)
    else:
        inputs["tokens"] = _known_tokens(e, inputs["tokens"], last_tokens)
    starts = e.elementwise("n", ("n", (rows,), "i64"), [(positions, "n")], _START)
    seq_lens = e.elementwise("n", ("n", (rows,), "i64"), [(starts, "n")], _SEQ_LEN)
    batch = _batch(e, entry, imported, starts, seq_lens)
    if hidden_size is not None:
        count, _ = inputs["hidden_table"].shape
        inputs |= loop_rows(e, slots, positions, inputs["hidden_from"], count)
    values = body(e, inputs, batch)
    results = {"token_ids": values["token_ids"], **_of_rows(e, values)}
    updated = {name: values[name] for name in LOOP_STATE} | _written(entry, batch, values, hidden_size)
    types = _argument_types(entry, options, slabs, hidden_size)
    units = batch.compute_units
    return _function(e, entry, types, results, updated, owned=static_workspace, compute_units=units)


def write_row_entry(
    entry: Entry, top_k: int, vocab_size: int, body: RowBody, *, static_workspace: bool
) -> str:
    """Return the MLIR of a `sample`, `adjusted_sample` or `logprobs`, which reads rows left by another entry.

    `body` emits the operations from the imported arguments to the results and the updated arguments.
    """
    e = Emitter()
    widths = {
        **dict.fromkeys(("values", "indices"), top_k),
        "logits": vocab_size,
        "allowed": -(-vocab_size // 32),
        "counts": vocab_size,
    }
    imported = {}
    for name, (*leading, last) in entry.argument_shapes().items():
        shape = [*leading, widths.get(name, last)]
        dims = [_dim(e, name, axis) if size is None else size for axis, size in enumerate(shape)]
        dtype = ARGUMENT_TYPES.get(name, "i64")
        imported[name] = _import(e, name, dims, dtype, updated=name in ROW_UPDATES[entry.family])
    types = {name: each.type for name, each in imported.items()}
    results, updated = body(e, imported)
    return _function(e, entry, types, results, updated, owned=static_workspace)


def _hidden_table(e: Emitter, size: int) -> dict[str, Tensor]:
    """Import the table of hidden states, to be read and to be updated."""
    shape = (_dim(e, "hidden_states", 0), size)
    return {
        "hidden_table": _import(e, "hidden_states", shape, "f32", updated=True),
        "known_hidden": _import_read(e, "hidden_states", shape, "f32"),
    }


def _logits_memory(e: Emitter, rows: Dim, size: int) -> Tensor:
    """Import the caller's memory for the logits. If `body` did not write there, IREE would copy them."""
    return _import(e, "logits", (rows, 1, size), "f32", updated=True)


def _of_rows(e: Emitter, values: Values) -> dict[str, Tensor]:
    """Return the results that all decodes have: candidates and logits of each row's last token."""
    shapes = {name: values[name].shape for name in ("values", "indices", "logits")}
    return {name: e.reshape(values[name], (rows, 1, width)) for name, (rows, width) in shapes.items()}


def _known_tokens(e: Emitter, tokens: Tensor, last_tokens: Tensor) -> Tensor:
    """Replace each negative token -1-s by `last_tokens[s]`; return [tokens] i64."""
    body = f"""\
  %zero = arith.constant 0 : i64
  %minus_one = arith.constant -1 : i64
  %is_slot = arith.cmpi slt, %a, %zero : i64
  %named = arith.subi %minus_one, %a : i64
  %slot = arith.select %is_slot, %named, %zero : i64
  %s = arith.index_cast %slot : i64 to index
  %last = tensor.extract {last_tokens.name}[%s] : {last_tokens.type}
  %y = arith.select %is_slot, %last, %a : i64
  linalg.yield %y : i64"""
    return e.elementwise("t", ("t", tokens.shape, "i64"), [(tokens, "t")], body)


def _written_over(e: Emitter, memory: Tensor, values: Tensor) -> Tensor:
    """Write `values` [rows] over an argument that a later operation updates."""
    return e.elementwise("n", ("n", values.shape, "i64"), [(values, "n")], "  linalg.yield %a : i64", memory)


def _bounded(batch: Batch) -> Dim:
    """Return the batch's number of rows; as Bounded if rows share a fixed number of packed tokens."""
    if isinstance(batch.rows, str) and isinstance(batch.tokens, int):
        return Bounded(batch.rows, min(batch.tokens, MOST_PACKED_ROWS))
    return batch.rows


# A decode loop's start positions and sequence lengths. A negative position marks a padding row.
_START = """\
  %zero = arith.constant 0 : i64
  %y = arith.maxsi %a, %zero : i64
  linalg.yield %y : i64"""
_SEQ_LEN = """\
  %one = arith.constant 1 : i64
  %y = arith.addi %a, %one : i64
  linalg.yield %y : i64"""


def _function(
    e: Emitter,
    entry: Entry,
    types: Mapping[str, str],
    results: Mapping[str, Tensor],
    updated: Mapping[str, Tensor],
    *,
    owned: bool,
    compute_units: int | None = None,
) -> str:
    """Return the MLIR function of an entry; its body is the operations emitted so far.

    `types`: MLIR types of the arguments. `updated`: tensors that are written over the arguments of the same
    names. `owned`: the caller allocates results and workspace.
    """
    names = list(types)
    if owned:
        names += [*results, "workspace"]
        _return(e, {}, {**updated, **results}, "workspace")
    else:
        _return(e, results, updated)
    returned = ", ".join(["!hal.buffer_view"] * (0 if owned else len(results)))
    arguments = ", ".join(f"%{name}: !hal.buffer_view" for name in names)
    attributes = {
        "iree.abi.declaration": _declaration(entry, types.values(), list(results.values())),
        "iree.abi.model": "coarse-fences",
        ONLY_DISPATCHES: "true",
        **({CALLER_OWNED: "true"} if owned else {}),
        **({} if compute_units is None else {COMPUTE_UNITS: str(compute_units)}),
        **({TAKES_FOLLOWERS: "true"} if "followers" in types else {}),
        **({TAKES_HIDDEN: "true"} if "hidden_states" in types else {}),
    }
    reflection = ", ".join(f'{name} = "{value}"' for name, value in attributes.items())
    body_text = "\n".join(e.lines)
    return (
        f"util.func public @{entry.name}{ASYNC_SUFFIX}({arguments}, %wait: !hal.fence, %signal: !hal.fence) "
        f"-> ({returned}) attributes {{\n"
        f'inlining_policy = #util.inline.never, iree.abi.model = "coarse-fences", iree.abi.stub,\n'
        f"iree.reflection = {{{reflection}}}}} {{\n"
        f"{body_text}\n}}"
    )


def _arguments(
    e: Emitter, entry: Entry, options: BuildOptions, slabs: Slabs
) -> tuple[dict[str, Tensor], Batch]:
    """Import the arguments; return the token ids `[tokens]` i64, with the table if any, and the batch."""
    is_packed = entry.layout() is Layout.PACKED
    length = entry.length or _dim(e, "tokens", 0 if is_packed else 1)
    rows = entry.rows or _dim(e, "offsets", 0)
    tokens = _import(e, "tokens", (length,) if is_packed else (rows, length), "i64")
    offsets = _import(e, "offsets", (rows,), "i64") if is_packed else None
    starts = _import(e, "start_positions", (rows,), "i64")
    seq_lens = _import(e, "seq_lens", (rows,), "i64")
    imported = _slabs(e, rows, options, slabs)
    batch = _batch(e, entry, imported, starts, seq_lens, length=length, offsets=offsets)
    if _takes_followers(entry, slabs):
        batch.followers = _import(e, "followers", (rows,), "i64")
    inputs = {"tokens": tokens if is_packed else e.reshape(tokens, (batch.tokens,))}
    if not is_packed:
        return inputs, batch
    last_tokens = _import(e, "last_tokens", (_dim(e, "last_tokens", 0),), "i64")
    return {**inputs, "last_tokens": last_tokens}, batch


def _batch(
    e: Emitter,
    entry: Entry,
    slabs: Sequence[Slab],
    starts: Tensor,
    seq_lens: Tensor,
    *,
    length: Dim = 1,
    offsets: Tensor | None = None,
) -> Batch:
    """Return the batch.

    Without `offsets`, each batch row has `length` tokens; with `offsets`, all rows together have `length`
    tokens.
    """
    [rows] = starts.shape
    return Batch(
        rows=rows,
        tokens=e.times(rows, length) if offsets is None else length,
        chunk=length if offsets is None else None,
        whole_pages=entry.family is EntryFamily.PREFILL,
        starts=starts,
        seq_lens=seq_lens,
        slabs=slabs,
        given_offsets=offsets,
    )


def _slabs(e: Emitter, rows: Dim, options: BuildOptions, slabs: Slabs) -> list[Slab]:
    """Import the slabs of the cache, and the block tables."""
    return [
        _slab(e, rows, pool, sizes, options, has_own_table=pool != "whole" and "whole" in slabs)
        for pool, sizes in slabs.items()
    ]


def _slab(
    e: Emitter,
    rows: Dim,
    pool: Pool,
    sizes: SlabSizes,
    options: BuildOptions,
    *,
    has_own_table: bool,
) -> Slab:
    """Import the slab of a pool, and the block table that addresses its pages.

    `has_own_table`: the pool has a block table of its own, besides that of the pool "whole".
    """
    table, name = BLOCK_TABLES[has_own_table], CACHES[has_own_table]
    return Slab(
        pool=pool,
        layers=sizes.layers,
        planes=sizes.planes,
        blocks=_import(e, table, (rows, _dim(e, table, 1)), "i64"),
        cache=_import(e, name, (_dim(e, name, 0), sizes.elements), options.cache_dtype, updated=True),
        suffix="_in_windows" if has_own_table else "",
    )


def _written(entry: Entry, batch: Batch, values: Values, hidden_size: int | None) -> dict[str, Tensor]:
    """Map the names of arguments to the tensors that are written over them: slabs, and hidden states.

    A draft layer writes only pages of all tokens.
    """
    slabs = zip(CACHES, batch.slabs, strict=False)
    is_draft = entry.family is EntryFamily.DRAFT
    caches = {name: slab.cache for name, slab in slabs if slab.pool == "whole" or not is_draft}
    return caches if hidden_size is None else {**caches, "hidden_states": values["hidden_table"]}


def _dim(e: Emitter, argument: str, axis: int) -> str:
    return e.value(f"hal.buffer_view.dim<%{argument} : !hal.buffer_view>[{axis}] : index")


def _import(e: Emitter, name: str, shape: Sequence[Dim], dtype: str, *, updated: bool = False) -> Tensor:
    """Import an argument; with `updated`, the function owns it: otherwise, every call would copy it."""
    result = Tensor(e.fresh(), tuple(shape), dtype)
    e.line(
        f"{result.name} = hal.tensor.import wait(%wait) => {'consume ' if updated else ''}%{name} "
        f'"{name}" : !hal.buffer_view -> {result.sized_type}'
    )
    return result


def _import_read(e: Emitter, name: str, shape: Sequence[Dim], dtype: str) -> Tensor:
    """Import an argument a second time, to read it before it is updated in place.

    If IREE knew that both are the same memory, it would copy the argument. The update must depend on results
    of the reads.
    """
    result = Tensor(e.fresh(), tuple(shape), dtype)
    memory = e.value(f"hal.buffer_view.buffer<%{name} : !hal.buffer_view> : !hal.buffer")
    e.line(
        f'{result.name} = hal.tensor.import wait(%wait) => {memory} "{name}" : '
        f"!hal.buffer -> {result.sized_type}"
    )
    return result


def _return(
    e: Emitter, results: Mapping[str, Tensor], updated: Mapping[str, Tensor], workspace: str | None = None
) -> None:
    """Emit the end of a function that returns `results` and writes each tensor of `updated`.

    A tensor of `updated` is written over the argument of the same name. Temporaries use the argument
    `workspace`; if None, the function allocates memory for them.
    """
    written = [_alias(e, argument, t) for argument, t in updated.items()]
    if workspace is not None:
        storage = e.value(f"hal.buffer_view.buffer<%{workspace} : !hal.buffer_view> : !hal.buffer")
        written = [_with_transients(e, t, storage) for t in written]
    joined = [*results.values(), *written]
    ready = e.fresh()
    e.line(
        f"{ready}:{len(joined)} = hal.tensor.barrier join({', '.join(t.name for t in joined)} : "
        f"{', '.join(t.type for t in joined)}) => %signal : !hal.fence"
    )
    views = [
        e.value(f"hal.tensor.export {ready}#{i} : {t.sized_type} -> !hal.buffer_view")
        for i, t in enumerate(results.values())
    ]
    types = f" : {', '.join(['!hal.buffer_view'] * len(views))}" if views else ""
    e.line(f"util.return {', '.join(views)}{types}")


def _alias(e: Emitter, argument: str, t: Tensor) -> Tensor:
    """Emit that `t` is written over the argument `argument`."""
    written = f"{t.name} : {t.sized_type} to %{argument} : !hal.buffer_view"
    return e.tensor(f"hal.tensor.alias wait(%wait) => {written}", t.shape, t.dtype)


def _with_transients(e: Emitter, t: Tensor, storage: str) -> Tensor:
    """Emit that all temporaries of the computation of `t` are in `storage`, a !hal.buffer."""
    return e.tensor(
        f"hal.tensor.transients {t.name} : {t.sized_type} from {storage} : !hal.buffer", t.shape, t.dtype
    )


def _argument_types(
    entry: Entry, options: BuildOptions, slabs: Slabs, hidden_size: int | None
) -> dict[str, str]:
    """Return the MLIR types of the arguments of an entry that takes slabs, in order."""
    shapes: dict[str, list[Dim]] = {
        name: [dim or "?" for dim in shape]
        for name, shape in entry.argument_shapes(
            has_windows=len(slabs) > 1,
            takes_followers=_takes_followers(entry, slabs),
            takes_hidden=hidden_size is not None,
        ).items()
    }
    if hidden_size is not None:
        shapes["hidden_states"] = ["?", hidden_size]
    caches = {
        name: tensor_type(("?", sizes.elements), options.cache_dtype)
        for name, sizes in zip(CACHES, slabs.values(), strict=False)
    }
    of_rest = {name: tensor_type(shape, ARGUMENT_TYPES.get(name, "i64")) for name, shape in shapes.items()}
    return {**of_rest, **caches}


def _takes_followers(entry: Entry, slabs: Slabs) -> bool:
    return entry.layout() is Layout.PACKED and "state" in slabs


def _declaration(entry: Entry, types: Iterable[str], results: list[Tensor]) -> str:
    """Return the signature in the form in which IREE declares entries.

    `runtime/declaration.py` parses the signature.
    """
    ins = ", ".join(f"%input{i}: {kind}" for i, kind in enumerate(types))
    outs = ", ".join(f"%output{i}: {t.type}" for i, t in enumerate(results))
    return f"async func @{entry.name}({ins}) -> ({outs})"
