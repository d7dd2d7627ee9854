"""Operations of draft layers (model/draft_layer.py, model/eagle_head.py), in linalg."""

from __future__ import annotations

from shortfin_apps.llm.builder.graph.batch import Batch
from shortfin_apps.llm.builder.graph.emitter import Dim, Emitter, Tensor
from shortfin_apps.llm.builder.graph.token_layout import even_offsets, token_rows
from shortfin_apps.llm.builder.lowering.linalg.norms import rms_norm
from shortfin_apps.llm.builder.lowering.lowering import LoweringContext, Values
from shortfin_apps.llm.contract.abi import HIDDEN_PER_SLOT, NO_HIDDEN, NO_LOGIT
from shortfin_apps.llm.model.draft_layer import HiddenBefore, JoinHidden, KeepHidden, NormHidden
from shortfin_apps.llm.model.eagle_head import PlaceLogits

_UNUSUAL = "0x7F4C5A1D"  # 2.7e38, as a f32's bits: of a value that no hidden state has


def norm_hidden(c: LoweringContext, e: Emitter, operation: NormHidden, values: Values) -> Tensor:
    return rms_norm(e, c.spec, values[operation.x], c.weights.load_one(e, operation.weight), "f32")


def join_hidden(c: LoweringContext, e: Emitter, operation: JoinHidden, values: Values) -> Tensor:
    named = ((operation.x, operation.weight), (operation.hidden, operation.hidden_weight))
    act = c.options.activations
    normed = [rms_norm(e, c.spec, values[x], c.weights.load_one(e, weight), act) for x, weight in named]
    return e.concat(normed, 1)


def hidden_before(_: LoweringContext, e: Emitter, operation: HiddenBefore, values: Values) -> Tensor:
    table, source, batch = values[operation.x], values[operation.source], values.batch
    shape = (batch.tokens, table.shape[1])
    if operation.hidden is None or batch.is_decode:
        body = f"""\
  %d = linalg.index 1 : index
{_kept(table, "%a")}
  linalg.yield %y : f32"""
        return e.elementwise("td", ("td", shape, "f32"), [(source, "t")], body)
    hidden, offsets = values[operation.hidden], _offsets(e, batch)
    body = f"""\
  %t = linalg.index 0 : index
  %d = linalg.index 1 : index
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %zero.i64 = arith.constant 0 : i64
  %row = arith.index_cast %a : i64 to index
  %first.i64 = tensor.extract {offsets.name}[%row] : {offsets.type}
  %first = arith.index_cast %first.i64 : i64 to index
  %from = tensor.extract {source.name}[%row] : {source.type}
{_kept(table, "%from")}
  %is_first = arith.cmpi eq, %t, %first : index
  %is_kept = arith.cmpi sge, %from, %zero.i64 : i64
  %reads_table = arith.andi %is_first, %is_kept : i1
  %has_before = arith.cmpi ugt, %t, %c0 : index
  %last = arith.subi %t, %c1 : index
  %before = arith.select %has_before, %last, %c0 : index
  %computed = tensor.extract {hidden.name}[%before, %d] : {hidden.type}
  %state = arith.select %reads_table, %y, %computed : f32
  linalg.yield %state : f32"""
    rows = token_rows(e, offsets, batch.tokens)
    return e.elementwise("td", ("td", shape, "f32"), [(rows, "t")], body)


def keep_hidden(_: LoweringContext, e: Emitter, operation: KeepHidden, values: Values) -> Tensor:
    """Write the table, ordered after all reads of it.

    IREE does not know that the table is the same memory as the one that is read. The comparison of `after`
    orders the write after the reads.
    """
    hidden, table = values[operation.x], values[operation.out]
    target = _targets(e, values[operation.target], values[operation.after], values.batch)
    return e.tensor(
        f"iree_linalg_ext.scatter dimension_map = [0] unique_indices(true) "
        f"ins({hidden.name}, {target.name} : {hidden.type}, {target.type}) "
        f"outs({table.name} : {table.type}) {{\n^bb0(%new: f32, %old: f32):\n"
        f"  iree_linalg_ext.yield %new : f32\n}} -> {table.type}",
        table.shape,
        "f32",
    )


def place_logits(c: LoweringContext, e: Emitter, operation: PlaceLogits, values: Values) -> Tensor:
    logits, rows = values[operation.x], c.weights.load_one(e, operation.weight)
    body = f"""\
  %r = linalg.index 0 : index
  %zero = arith.constant 0 : i32
  %none = arith.constant {NO_LOGIT:.9e} : f32
  %row = arith.fptosi %a : f32 to i32
  %named = arith.maxsi %row, %zero : i32
  %at = arith.index_cast %named : i32 to index
  %logit = tensor.extract {logits.name}[%r, %at] : {logits.type}
  %is_known = arith.cmpi sge, %row, %zero : i32
  %y = arith.select %is_known, %logit, %none : f32
  linalg.yield %y : f32"""
    shape = (logits.shape[0], operation.vocab_size)
    return e.elementwise("rv", ("rv", shape, "f32"), [(rows, "v")], body)


def loop_rows(e: Emitter, slots: Tensor, positions: Tensor, given: Tensor, count: Dim) -> dict[str, Tensor]:
    """Return `hidden_from` and `hidden_to` of a decode loop: the rows of its tokens and those before.

    `given` is the argument `hidden_from`. Slots outside of the table of `count` rows have none.
    """
    size = e.value(f"arith.index_cast {e.index(count)} : index to i64")

    def rows(distance: int, given: Tensor) -> Tensor:
        body = f"""\
  %none = arith.constant {NO_HIDDEN} : i64
  %zero = arith.constant 0 : i64
  %one = arith.constant 1 : i64
  %distance = arith.constant {distance} : i64
  %count = arith.constant {HIDDEN_PER_SLOT} : i64
  %mask = arith.constant {HIDDEN_PER_SLOT - 1} : i64
  %position = arith.subi %b, %distance : i64
  %place = arith.andi %position, %mask : i64
  %first = arith.muli %a, %count : i64
  %after = arith.addi %first, %place : i64
  %named = arith.addi %after, %one : i64
  %has_slot = arith.cmpi sge, %a, %zero : i64
  %has_token = arith.cmpi sge, %position, %zero : i64
  %is_used = arith.andi %has_slot, %has_token : i1
  %is_inside = arith.cmpi slt, %named, {size} : i64
  %is_given = arith.cmpi ne, %c, %none : i64
  %is_there = arith.andi %is_used, %is_inside : i1
  %has_row = arith.andi %is_there, %is_given : i1
  %row = arith.select %has_row, %named, %none : i64
  linalg.yield %row : i64"""
        ins = [(slots, "n"), (positions, "n"), (given, "n")]
        return e.elementwise("n", ("n", slots.shape, "i64"), ins, body)

    return {"hidden_from": rows(1, given), "hidden_to": rows(0, e.fill("1", slots.shape, "i64"))}


def _targets(e: Emitter, target: Tensor, after: Tensor, batch: Batch) -> Tensor:
    """Return the table's row for each token, [tokens, 1] i64: NO_HIDDEN if it is not the last of its row.

    Rows are unique except for NO_HIDDEN, which tokens write in any order.
    """
    unusual = f"""\
  %t = linalg.index 0 : index
  %c0 = arith.constant 0 : index
  %scratch = arith.constant {NO_HIDDEN} : i64
  %read = tensor.extract {after.name}[%t, %c0] : {after.type}
{"" if after.dtype == "f32" else f"  %wide = arith.extf %read : {after.dtype} to f32"}
  %unusual = arith.constant {_UNUSUAL} : f32
  %is_unusual = arith.cmpf oeq, {"%read" if after.dtype == "f32" else "%wide"}, %unusual : f32"""
    shape = (batch.tokens, 1)
    if batch.is_decode:
        body = f"""\
{unusual}
  %y = arith.select %is_unusual, %scratch, %a : i64
  linalg.yield %y : i64"""
        return e.elementwise("tu", ("tu", shape, "i64"), [(target, "t")], body)
    offsets = _offsets(e, batch)
    body = f"""\
{unusual}
  %one = arith.constant 1 : i64
  %row = arith.index_cast %a : i64 to index
  %first = tensor.extract {offsets.name}[%row] : {offsets.type}
  %start = tensor.extract {batch.starts.name}[%row] : {batch.starts.type}
  %seq_len = tensor.extract {batch.seq_lens.name}[%row] : {batch.seq_lens.type}
  %named = tensor.extract {target.name}[%row] : {target.type}
  %length = arith.subi %seq_len, %start : i64
  %end = arith.addi %first, %length : i64
  %last = arith.subi %end, %one : i64
  %token = arith.index_cast %t : index to i64
  %is_other = arith.cmpi ne, %token, %last : i64
  %is_scratch = arith.ori %is_other, %is_unusual : i1
  %y = arith.select %is_scratch, %scratch, %named : i64
  linalg.yield %y : i64"""
    rows = token_rows(e, offsets, batch.tokens)
    return e.elementwise("tu", ("tu", shape, "i64"), [(rows, "t")], body)


def _kept(table: Tensor, row: str) -> str:
    """Return MLIR that sets %y to element %d of row `row` i64 of the table; to 0 if the row is NO_HIDDEN."""
    return f"""\
  %none = arith.constant {NO_HIDDEN} : i64
  %nothing = arith.constant 0.0 : f32
  %named = arith.maxsi {row}, %none : i64
  %at = arith.index_cast %named : i64 to index
  %stored = tensor.extract {table.name}[%at, %d] : {table.type}
  %is_none = arith.cmpi eq, %named, %none : i64
  %y = arith.select %is_none, %nothing, %stored : f32"""


def _offsets(e: Emitter, batch: Batch) -> Tensor:
    """Return the index of each row's first token; not every target prepares the batch's `offsets`."""
    if batch.given_offsets is not None:
        return batch.given_offsets
    assert batch.chunk is not None
    return even_offsets(e, batch.rows, batch.chunk)
