"""The entries of the module as a caller sees them: upstream shortfin's ABI for paged language models.

    prefill_bs{N}(tokens [N,S], start_positions [N], seq_lens [N], seq_block_ids [N,B], cache)
    prefill_bs{N}_s{S}    the same with S fixed
    decode_bs{N}(tokens [N,1], seq_lens [N], start_positions [N], seq_block_ids [N,B], cache)

all i64 but the cache [pages, elements], which is mutated in place; mind the order of the second and third
argument. Results: values [N,1,K] f32, indices [N,1,K] i64, logits [N,1,V] f32, of each row's last valid
token. `seq_lens` counts from position 0, this call included. Entries follow IREE's coarse-fences model
(`name$async`, two fences last).
Source: amdsharktank's export_paged_llm_v1 with has_prefill_position and top_k.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shortfin_apps.llm.build.graph_form import Batch
from shortfin_apps.llm.build.graph_text import Dim, Emitter, Tensor, tensor_type
from shortfin_apps.llm.build.spec import BuildOptions, LlamaSpec

Body = Callable[[Emitter, Tensor, Batch], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Entry:
    """One exported function; `chunk` is None where S is dynamic, and 1 in a decode."""

    name: str
    rows: int
    chunk: int | None
    is_decode: bool


def entries_of(options: BuildOptions) -> list[Entry]:
    """Every entry that the options ask for."""
    prefills = [Entry(f"prefill_bs{n}", n, None, False) for n in options.prefill_batch_sizes]
    chunks = [
        Entry(f"prefill_bs{n}_s{s}", n, s, False)
        for n in options.prefill_batch_sizes
        for s in options.chunk_sizes
    ]
    decodes = [Entry(f"decode_bs{n}", n, 1, True) for n in options.decode_batch_sizes]
    return [*prefills, *chunks, *decodes]


def page_elements(spec: LlamaSpec, options: BuildOptions) -> int:
    """Elements of one page: K and V of `block_seq_stride` tokens in every layer."""
    per_token = 2 * spec.num_key_value_heads * spec.head_dim
    return spec.num_hidden_layers * per_token * options.block_seq_stride


def write_entry(entry: Entry, spec: LlamaSpec, options: BuildOptions, elements: int, body: Body) -> str:
    """The function's text; `body` gets the imported tensors (and sets the batch's rotary)."""
    e = Emitter()
    chunk: Dim = entry.chunk or e.value("hal.buffer_view.dim<%tokens : !hal.buffer_view>[1] : index")
    width = e.value("hal.buffer_view.dim<%seq_block_ids : !hal.buffer_view>[1] : index")
    pages = e.value("hal.buffer_view.dim<%cache : !hal.buffer_view>[0] : index")
    tokens = _import(e, "tokens", (entry.rows, chunk), "i64")
    starts = _import(e, "start_positions", (entry.rows,), "i64")
    seq_lens = _import(e, "seq_lens", (entry.rows,), "i64")
    blocks = _import(e, "seq_block_ids", (entry.rows, width), "i64")
    # `consume` hands the buffer over to the function; without it every call copies the cache.
    cache = _import(e, "cache", (pages, elements), options.kv, "consume ")
    total = e.times(entry.rows, chunk)
    batch = Batch(
        rows=entry.rows,
        chunk=chunk,
        tokens=total,
        is_decode=entry.is_decode,
        starts=starts,
        seq_lens=seq_lens,
        blocks=blocks,
        cache=cache,
        rotary=cache,
    )
    values, indices, logits = body(e, e.reshape(tokens, (total,)), batch)
    results = [e.reshape(t, (entry.rows, 1, t.shape[1])) for t in (values, indices, logits)]
    _return(e, results, batch.cache)
    declaration = _declaration(entry, elements, options, results)
    names = _argument_names(entry)
    arguments = ", ".join(f"%{name}: !hal.buffer_view" for name in names)
    body_text = "\n".join(e.lines)
    return (
        f"util.func public @{entry.name}$async({arguments}, %wait: !hal.fence, %signal: !hal.fence) "
        f"-> (!hal.buffer_view, !hal.buffer_view, !hal.buffer_view) attributes {{\n"
        f'inlining_policy = #util.inline.never, iree.abi.model = "coarse-fences", iree.abi.stub,\n'
        f'iree.reflection = {{iree.abi.declaration = "{declaration}", '
        f'iree.abi.model = "coarse-fences"}}}} {{\n'
        f"{body_text}\n}}"
    )


def _argument_names(entry: Entry) -> list[str]:
    middle = ["seq_lens", "start_positions"] if entry.is_decode else ["start_positions", "seq_lens"]
    return ["tokens", *middle, "seq_block_ids", "cache"]


def _import(e: Emitter, name: str, shape: tuple[Dim, ...], dtype: str, how: str = "") -> Tensor:
    result = Tensor(e.fresh(), shape, dtype)
    e.line(
        f'{result.name} = hal.tensor.import wait(%wait) => {how}%{name} "{name}" : '
        f"!hal.buffer_view -> {result.sized_type}"
    )
    return result


def _return(e: Emitter, results: list[Tensor], cache: Tensor) -> None:
    alias = e.value(
        f"hal.tensor.alias wait(%wait) => {cache.name} : {cache.sized_type} to %cache : !hal.buffer_view"
    )
    joined = [*results, Tensor(alias, cache.shape, cache.dtype)]
    ready = e.fresh()
    e.line(
        f"{ready}:{len(joined)} = hal.tensor.barrier join({', '.join(t.name for t in joined)} : "
        f"{', '.join(t.type for t in joined)}) => %signal : !hal.fence"
    )
    views = [
        e.value(f"hal.tensor.export {ready}#{i} : {t.type} -> !hal.buffer_view")
        for i, t in enumerate(results)
    ]
    e.line(f"util.return {', '.join(views)} : {', '.join(['!hal.buffer_view'] * len(views))}")


def _declaration(entry: Entry, elements: int, options: BuildOptions, results: list[Tensor]) -> str:
    """The signature in the words IREE uses for its own entries; the runtime border reads it back."""
    chunk: Dim = entry.chunk or "?"
    vector = tensor_type((entry.rows,), "i64")
    inputs = [
        tensor_type((entry.rows, chunk), "i64"),
        vector,
        vector,
        tensor_type((entry.rows, "?"), "i64"),
        tensor_type(("?", elements), options.kv),
    ]
    ins = ", ".join(f"%input{i}: {kind}" for i, kind in enumerate(inputs))
    outs = ", ".join(f"%output{i}: {t.type}" for i, t in enumerate(results))
    return f"async func @{entry.name}({ins}) -> ({outs})"
