"""The batch row (sequence) and position of every token of an invocation, computed once for all layers.

The tokens of a row are contiguous, and rows follow one another; a row's `offset` is the index of its first
token. All rows of a prefill or decode have the same number of tokens; in an extend, a row has the tokens of
its task. A token is padding if and only if its position is at or after its row's `seq_len`, whether the row
was padded to a length or the invocation to a bucket.
"""

from __future__ import annotations

from collections.abc import Mapping

from shortfin_apps.llm.builder.graph.batch import Batch
from shortfin_apps.llm.builder.graph.emitter import Dim, Emitter, Tensor
from shortfin_apps.llm.builder.graph.rotary import Rotary
from shortfin_apps.llm.model.rope import Rotation


def lay_out(e: Emitter, batch: Batch, rotaries: Mapping[Rotation, Rotary]) -> None:
    """Emit each row's offset, and each token's row, position, RoPE cosines and sines, into `batch`."""
    if batch.given_offsets is None:
        assert batch.chunk is not None
        batch.offsets = even_offsets(e, batch.rows, batch.chunk)
    else:
        batch.offsets = batch.given_offsets
    batch.token_rows = token_rows(e, batch.offsets, batch.tokens)
    batch.positions = token_positions(e, batch.token_rows, batch.offsets, batch.starts)
    batch.rotaries = {rotation: each.emit(e, batch.positions) for rotation, each in rotaries.items()}


def even_offsets(e: Emitter, rows: Dim, chunk: Dim) -> Tensor:
    """Emit the index of each row's first token, [rows] i64, for rows of `chunk` tokens each."""
    body = f"""\
  %row = linalg.index 0 : index
  %first = arith.muli %row, {e.index(chunk)} : index
  %offset = arith.index_cast %first : index to i64
  linalg.yield %offset : i64"""
    return e.elementwise("r", ("r", (rows,), "i64"), [], body)


def token_rows(e: Emitter, offsets: Tensor, tokens: Dim) -> Tensor:
    """Emit each token's row, [tokens] i64: the last row with an offset at or before the token."""
    body = """\
  %t = linalg.index 0 : index
  %r = linalg.index 1 : index
  %c0 = arith.constant 0 : index
  %first = arith.index_cast %a : i64 to index
  %begun = arith.cmpi ule, %first, %t : index
  %later = arith.cmpi ne, %r, %c0 : index
  %counts = arith.andi %begun, %later : i1
  %one = arith.extui %counts : i1 to i64
  %row = arith.addi %out, %one : i64
  linalg.yield %row : i64"""
    zero = e.fill("0", (tokens,), "i64")
    return e.elementwise("tr", ("t", (tokens,), "i64"), [(offsets, "r")], body, zero)


def token_positions(e: Emitter, rows: Tensor, offsets: Tensor, starts: Tensor) -> Tensor:
    """Emit each token's position in its sequence, [tokens] i64.

    Padding has positions at and after its row's seq_len.
    """
    body = f"""\
  %t = linalg.index 0 : index
  %row = arith.index_cast %a : i64 to index
  %first = tensor.extract {offsets.name}[%row] : {offsets.type}
  %start = tensor.extract {starts.name}[%row] : {starts.type}
  %token = arith.index_cast %t : index to i64
  %index = arith.subi %token, %first : i64
  %position = arith.addi %start, %index : i64
  linalg.yield %position : i64"""
    return e.elementwise("t", ("t", rows.shape, "i64"), [(rows, "t")], body)


def last_tokens(e: Emitter, offsets: Tensor, starts: Tensor, seq_lens: Tensor, tokens: Dim) -> Tensor:
    """Emit the index of each row's last token that is not padding, [rows] i64."""
    last = e.value(f"arith.subi {e.index(tokens)}, {e.constant(1)} : index")
    body = f"""\
  %zero = arith.constant 0 : i64
  %one = arith.constant 1 : i64
  %length = arith.subi %c, %b : i64
  %index = arith.subi %length, %one : i64
  %clamped = arith.maxsi %index, %zero : i64
  %token = arith.addi %a, %clamped : i64
  %last = arith.index_cast {last} : index to i64
  %safe = arith.minui %token, %last : i64
  linalg.yield %safe : i64"""
    ins = [(offsets, "r"), (starts, "r"), (seq_lens, "r")]
    return e.elementwise("r", ("r", offsets.shape, "i64"), ins, body)


def attention_tiles(
    e: Emitter, rows: Tensor, positions: Tensor, starts: Tensor, seq_lens: Tensor, size: int
) -> Tensor:
    """Emit the number of tokens in the attention tile that starts at each token, [tokens] i64; else 0.

    A row is divided, from its first token on, into tiles of `size` tokens; the row's last tile may have
    fewer. A padding token is a tile of one.
    """
    body = f"""\
  %zero = arith.constant 0 : i64
  %one = arith.constant 1 : i64
  %size = arith.constant {size} : i64
  %row = arith.index_cast %a : i64 to index
  %start = tensor.extract {starts.name}[%row] : {starts.type}
  %seq_len = tensor.extract {seq_lens.name}[%row] : {seq_lens.type}
  %left = arith.subi %seq_len, %b : i64
  %index = arith.subi %b, %start : i64
  %in_tile = arith.remui %index, %size : i64
  %begins = arith.cmpi eq, %in_tile, %zero : i64
  %some = arith.minsi %left, %size : i64
  %tile = arith.select %begins, %some, %zero : i64
  %is_padding = arith.cmpi sle, %left, %zero : i64
  %count = arith.select %is_padding, %one, %tile : i64
  linalg.yield %count : i64"""
    return e.elementwise("t", ("t", rows.shape, "i64"), [(rows, "t"), (positions, "t")], body)


def cache_slots(e: Emitter, batch: Batch, stride: int, page_rows: int) -> Tensor:
    """Emit the cache row of each token's key in layer 0, [tokens] i64; padding goes to page 0.

    A page has `page_rows` cache rows; its first `stride` rows are the keys of layer 0.
    """
    width = e.index(batch.width)
    body = f"""\
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %stride = arith.constant {stride} : index
  %page_rows = arith.constant {page_rows} : index
  %n = arith.index_cast %a : i64 to index
  %seq_len.i64 = tensor.extract {batch.seq_lens.name}[%n] : {batch.seq_lens.type}
  %seq_len = arith.index_cast %seq_len.i64 : i64 to index
  %position = arith.index_cast %b : i64 to index
  %index = arith.divui %position, %stride : index
  %slot = arith.remui %position, %stride : index
  %last = arith.subi {width}, %c1 : index
  %safe = arith.minui %index, %last : index
  %named.i64 = tensor.extract {batch.blocks.name}[%n, %safe] : {batch.blocks.type}
  %named = arith.index_cast %named.i64 : i64 to index
  %valid = arith.cmpi ult, %position, %seq_len : index
  %in_table = arith.cmpi ult, %index, {width} : index
  %owned = arith.andi %valid, %in_table : i1
  %page = arith.select %owned, %named, %c0 : index
  %first = arith.muli %page, %page_rows : index
  %row = arith.addi %first, %slot : index
  %row.i64 = arith.index_cast %row : index to i64
  linalg.yield %row.i64 : i64"""
    ins = [(batch.token_rows, "t"), (batch.positions, "t")]
    return e.elementwise("t", ("t", (batch.tokens,), "i64"), ins, body)
