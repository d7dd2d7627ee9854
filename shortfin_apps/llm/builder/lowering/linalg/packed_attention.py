"""Attention of packed rows in plain linalg, for extend entries.

Rows have different numbers of tokens, so there is no rectangle of queries for one attention operation, and
a gather of every token's pages would be tokens x context x K/V. So K and V are read from the cache inside
the two products, and what is kept between them is the scores, [tokens, heads, slots] f32.
"""

from __future__ import annotations

from dataclasses import dataclass

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor

LOWEST = "-1.0e30"


@dataclass(frozen=True, slots=True)
class CachePlane:
    """K or V of one layer: row `slots[row, n] + offset` of `cache` is slot n of that row of the batch."""

    cache: Tensor  # [cache rows, kv_heads * head_dim]
    slots: Tensor  # [rows, slots] i64
    offset: int

    def read(self, group: int, head_dim: int) -> str:
        """Text that sets %value f32: element %d of query head %h's K/V head in slot %n, 0 past the query.

        It takes the query's row as %b and its position as %c, i64 both.
        """
        dtype = self.cache.dtype
        name = "%raw" if dtype == "f32" else "%narrow"
        widen = "" if dtype == "f32" else f"  %raw = arith.extf %narrow : {dtype} to f32\n"
        return f"""\
  %group = arith.constant {group} : index
  %head_dim = arith.constant {head_dim} : index
  %plane = arith.constant {self.offset} : i64
  %nothing = arith.constant 0.0 : f32
  %row = arith.index_cast %b : i64 to index
  %position = arith.index_cast %c : i64 to index
  %visible = arith.cmpi ule, %n, %position : index
  %kv_head = arith.divui %h, %group : index
  %in_row = arith.muli %kv_head, %head_dim : index
  %column = arith.addi %in_row, %d : index
  %slot = tensor.extract {self.slots.name}[%row, %n] : {self.slots.type}
  %at.i64 = arith.addi %slot, %plane : i64
  %at = arith.index_cast %at.i64 : i64 to index
  {name} = tensor.extract {self.cache.name}[%at, %column] : {self.cache.type}
{widen}  %value = arith.select %visible, %raw, %nothing : f32
"""


def slot_rows(e: Emitter, blocks: Tensor, stride: int, page_rows: int) -> Tensor:
    """Block table [rows, width] -> [rows, width, stride] i64: each slot's cache row, in layer 0's K."""
    body = f"""\
  %slot = linalg.index 2 : index
  %page_rows = arith.constant {page_rows} : i64
  %first = arith.muli %a, %page_rows : i64
  %slot.i64 = arith.index_cast %slot : index to i64
  %row = arith.addi %first, %slot.i64 : i64
  linalg.yield %row : i64"""
    return e.elementwise("rws", ("rws", (*blocks.shape, stride), "i64"), [(blocks, "rw")], body)


def packed_attention(
    e: Emitter, q: Tensor, keys: CachePlane, values: CachePlane, token_rows: Tensor, positions: Tensor
) -> Tensor:
    """q [tokens, heads, head_dim] f32 -> the same shape: each query attends to slots 0 to its position."""
    weights = _softmax(e, _scores(e, q, keys, token_rows, positions))
    body = f"""\
  %h = linalg.index 1 : index
  %d = linalg.index 2 : index
  %n = linalg.index 3 : index
{values.read(_group(q, values), _head_dim(q))}\
  %product = arith.mulf %a, %value : f32
  %sum = arith.addf %out, %product : f32
  linalg.yield %sum : f32"""
    ins = [(weights, "thn"), (token_rows, "t"), (positions, "t")]
    zero = e.fill("0.0", q.shape, "f32")
    return e.elementwise("thdn", ("thd", q.shape, "f32"), ins, body, zero)


def _scores(e: Emitter, q: Tensor, keys: CachePlane, token_rows: Tensor, positions: Tensor) -> Tensor:
    """[tokens, heads, slots] f32, LOWEST past the query's position."""
    shape = (q.shape[0], q.shape[1], keys.slots.shape[1])
    product = f"""\
  %h = linalg.index 1 : index
  %n = linalg.index 2 : index
  %d = linalg.index 3 : index
{keys.read(_group(q, keys), _head_dim(q))}\
  %product = arith.mulf %a, %value : f32
  %sum = arith.addf %out, %product : f32
  linalg.yield %sum : f32"""
    ins = [(q, "thd"), (token_rows, "t"), (positions, "t")]
    zero = e.fill("0.0", shape, "f32")
    raw = e.elementwise("thnd", ("thn", shape, "f32"), ins, product, zero)
    mask = f"""\
  %n = linalg.index 2 : index
  %lowest = arith.constant {LOWEST} : f32
  %scale = arith.constant {_head_dim(q) ** -0.5:.9e} : f32
  %position = arith.index_cast %b : i64 to index
  %visible = arith.cmpi ule, %n, %position : index
  %scaled = arith.mulf %a, %scale : f32
  %score = arith.select %visible, %scaled, %lowest : f32
  linalg.yield %score : f32"""
    return e.elementwise("thn", ("thn", shape, "f32"), [(raw, "thn"), (positions, "t")], mask)


def _softmax(e: Emitter, scores: Tensor) -> Tensor:
    """Over the last dimension."""
    outer = scores.shape[:2]
    larger = "  %m = arith.maximumf %a, %out : f32\n  linalg.yield %m : f32"
    maxima = e.elementwise(
        "thn", ("th", outer, "f32"), [(scores, "thn")], larger, e.fill(LOWEST, outer, "f32")
    )
    power = (
        "  %under = arith.subf %a, %b : f32\n  %power = math.exp %under : f32\n  linalg.yield %power : f32"
    )
    powers = e.elementwise("thn", ("thn", scores.shape, "f32"), [(scores, "thn"), (maxima, "th")], power)
    add = "  %s = arith.addf %a, %out : f32\n  linalg.yield %s : f32"
    totals = e.elementwise("thn", ("th", outer, "f32"), [(powers, "thn")], add, e.fill("0.0", outer, "f32"))
    share = "  %share = arith.divf %a, %b : f32\n  linalg.yield %share : f32"
    return e.elementwise("thn", ("thn", scores.shape, "f32"), [(powers, "thn"), (totals, "th")], share)


def _group(q: Tensor, plane: CachePlane) -> int:
    """Query heads of one K/V head."""
    heads, columns = q.shape[1], plane.cache.shape[1]
    assert isinstance(heads, int)
    assert isinstance(columns, int)
    return heads * _head_dim(q) // columns


def _head_dim(q: Tensor) -> int:
    dim = q.shape[2]
    assert isinstance(dim, int)
    return dim
