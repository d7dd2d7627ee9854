"""Exact top-k without a sort or a loop: by rank, in parallel, in plain linalg.

A row is split into tiles. Its k largest elements are in the k tiles with the largest maxima (on ties, the
lower tile), as these k maxima precede every element of the other tiles. So: rank the tiles by their maxima,
gather the elements of the k best tiles, rank these candidates by value (on ties, lower index first), and pick
ranks 0 to k - 1. The rank of an element is the number of elements that precede it, counted over all pairs.

Comparisons ignore NaN. Therefore all values of a row with a NaN become NaN, so that callers can detect it.
"""

from __future__ import annotations

from shortfin_apps.llm.builder.graph.emitter import Dim, Emitter, Tensor

MAX_TILE = 32


def top_k(e: Emitter, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest of each row of `logits` [rows, size] f32, descending, and their indices.

    Values are [rows, k] f32, indices [rows, k] i64. On ties, the lower index comes first. For a row that
    contains NaN, all values are NaN, and the indices are arbitrary, but in range.
    """
    rows, size = logits.shape
    assert isinstance(size, int)
    width = max(w for w in range(1, MAX_TILE + 1) if size % w == 0)
    tiles = size // width
    maxima = _tile_maxima(e, e.reshape(logits, (rows, tiles, width)))
    tile_ids = _pick(e, _rank(e, maxima, _indices(e, rows, tiles)), _indices(e, rows, tiles), min(k, tiles))
    values, indices = _candidates(e, logits, tile_ids, width)
    rank = _rank(e, values, indices)
    best = _spoil(e, _pick(e, rank, values, k), maxima)
    return best, _widen(e, _pick(e, rank, indices, k))


def _tile_maxima(e: Emitter, tiled: Tensor) -> Tensor:
    body = "  %m = arith.maximumf %a, %out : f32\n  linalg.yield %m : f32"
    shape = tiled.shape[:2]
    return e.elementwise(
        "ntw", ("nt", shape, "f32"), [(tiled, "ntw")], body, e.fill("0xFF800000", shape, "f32")
    )


def _indices(e: Emitter, rows: Dim, count: int) -> Tensor:
    body = "  %i = linalg.index 1 : index\n  %x = arith.index_cast %i : index to i32\n  linalg.yield %x : i32"
    return e.elementwise("ni", ("ni", (rows, count), "i32"), [], body)


def _rank(e: Emitter, values: Tensor, indices: Tensor) -> Tensor:
    """Return the rank of each element in its row, [rows, count] i32: the number of preceding elements."""
    body = """\
  %zero = arith.constant 0 : i32
  %one = arith.constant 1 : i32
  %greater = arith.cmpf ogt, %b, %a : f32
  %equal = arith.cmpf oeq, %b, %a : f32
  %earlier = arith.cmpi slt, %d, %c : i32
  %tied = arith.andi %equal, %earlier : i1
  %before = arith.ori %greater, %tied : i1
  %add = arith.select %before, %one, %zero : i32
  %sum = arith.addi %out, %add : i32
  linalg.yield %sum : i32"""
    ins = [(values, "ni"), (values, "nj"), (indices, "ni"), (indices, "nj")]
    zero = e.fill("0", values.shape, "i32")
    return e.elementwise("nij", ("ni", values.shape, "i32"), ins, body, zero)


def _pick(e: Emitter, rank: Tensor, source: Tensor, k: int) -> Tensor:
    """Return the elements of `source` with ranks 0, 1, ..., k - 1, [rows, k]."""
    kind = source.dtype
    lowest, keep = ("0xFF800000", "arith.maximumf") if kind == "f32" else ("0", "arith.maxsi")
    body = f"""\
  %k = linalg.index 1 : index
  %wanted = arith.index_cast %k : index to i32
  %is_it = arith.cmpi eq, %a, %wanted : i32
  %lowest = arith.constant {lowest} : {kind}
  %found = arith.select %is_it, %b, %lowest : {kind}
  %best = {keep} %out, %found : {kind}
  linalg.yield %best : {kind}"""
    shape = (rank.shape[0], k)
    initial = e.fill(lowest, shape, kind)
    return e.elementwise("nki", ("nk", shape, kind), [(rank, "ni"), (source, "ni")], body, initial)


def _spoil(e: Emitter, values: Tensor, maxima: Tensor) -> Tensor:
    """Return the values, with NaN for all values of a row if one of the row's tile maxima is NaN."""
    larger = "  %m = arith.maximumf %a, %out : f32\n  linalg.yield %m : f32"
    shape = (maxima.shape[0],)
    row = e.elementwise(
        "nt", ("n", shape, "f32"), [(maxima, "nt")], larger, e.fill("0xFF800000", shape, "f32")
    )
    body = """\
  %is_number = arith.cmpf ord, %b, %b : f32
  %y = arith.select %is_number, %a, %b : f32
  linalg.yield %y : f32"""
    return e.elementwise("nk", ("nk", values.shape, "f32"), [(values, "nk"), (row, "n")], body)


def _candidates(e: Emitter, logits: Tensor, tile_ids: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the elements of the tiles, [rows, tiles * width] f32, and their indices in the row (i32)."""
    rows, tiles = tile_ids.shape
    assert isinstance(tiles, int)
    index = f"""\
  %n = linalg.index 0 : index
  %w = linalg.index 2 : index
  %tile = arith.index_cast %a : i32 to index
  %width = arith.constant {width} : index
  %first = arith.muli %tile, %width : index
  %i = arith.addi %first, %w : index
"""
    value = index + f"  %v = tensor.extract {logits.name}[%n, %i] : {logits.type}\n  linalg.yield %v : f32"
    at = index + "  %x = arith.index_cast %i : index to i32\n  linalg.yield %x : i32"
    shape, flat = (rows, tiles, width), (rows, tiles * width)
    values = e.elementwise("ntw", ("ntw", shape, "f32"), [(tile_ids, "nt")], value)
    indices = e.elementwise("ntw", ("ntw", shape, "i32"), [(tile_ids, "nt")], at)
    return e.reshape(values, flat), e.reshape(indices, flat)


def _widen(e: Emitter, indices: Tensor) -> Tensor:
    body = "  %x = arith.extsi %a : i32 to i64\n  linalg.yield %x : i64"
    return e.elementwise("nk", ("nk", indices.shape, "i64"), [(indices, "nk")], body)
