"""Attention of sequences packed end to end, in plain linalg, for extend entries.

The sequences have different numbers of new tokens, so q is not rectangular, as one attention operation needs.
Gathering the pages of every token would take memory for tokens x context x K/V. Instead, both products read K
and V from the cache directly, and only scores are stored between them: [tokens, heads, tiles, TILE] f32.

Slots are split into tiles. Each tile has its own softmax, and then the results of the tiles are combined, as
in flash-decoding. So every reduction has a static size or runs over the tiles. (IREE 3.9 miscompiles
reductions of a dynamic size above 4,096 for GPUs: docs/iree/partial_reduction.mlir.)

`math.fma` in a reduction keeps IREE from distributing the reduction over the lanes of a workgroup, where each
lane would read another cache row. Instead, lanes hold different elements of a head, and read the same row.
"""

from __future__ import annotations

from dataclasses import dataclass

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.lowering.linalg.bodies import capped, sees
from shortfin_apps.llm.builder.lowering.linalg.quantised_rows import dequantise
from shortfin_apps.llm.contract.config import SCALE_BYTES

LOWEST = "-1.0e30"
HIDDEN = -1  # instead of a cache row, for a slot to which the token does not attend
TILE = 512  # slots

_LARGER = "  %m = arith.maximumf %a, %out : f32\n  linalg.yield %m : f32"
_LARGEST = "  %m = arith.maximumf %a, %b : f32\n  linalg.yield %m : f32"
_ADD = "  %sum = arith.addf %a, %out : f32\n  linalg.yield %sum : f32"
_ADD_PRODUCT = "  %sum = math.fma %a, %b, %out : f32\n  linalg.yield %sum : f32"
_POWER = "  %under = arith.subf %a, %b : f32\n  %power = math.exp %under : f32\n  linalg.yield %power : f32"
_ADD_POWER = """\
  %under = arith.subf %a, %b : f32
  %power = math.exp %under : f32
  %sum = arith.addf %power, %c : f32
  linalg.yield %sum : f32"""
_SHARE = "  %share = arith.divf %a, %b : f32\n  linalg.yield %share : f32"
_VISIBLE = f"""\
  %hidden = arith.constant {HIDDEN} : i64
  %visible = arith.cmpi ne, %b, %hidden : i64
"""


@dataclass(frozen=True, slots=True)
class CachePlane:
    """K or V of one layer in the cache: row `slot + offset` of `cache`, for each slot in `token_slots`."""

    cache: Tensor  # [cache rows, kv_heads * head_dim]; longer rows for a q8_0 cache (see quantised_rows.py)
    last_row: str  # MLIR value of type index: cache rows - 1
    offset: int
    kv_heads: int
    scales: Tensor | None = None  # of a q8_0 cache: the same rows as f32 (`scales_of`)

    def read(self, group: int, head_dim: int) -> str:
        """Return MLIR that sets %value f32 to element %d of K or V for query head %h in slot %b.

        %value is 0 if %b is HIDDEN. `group`: query heads per K/V head.
        """
        name = "%raw" if self.cache.dtype == "f32" else "%narrow"
        return f"""\
  %group = arith.constant {group} : index
  %head_dim = arith.constant {head_dim} : index
  %plane = arith.constant {self.offset} : i64
  %nothing = arith.constant 0.0 : f32
  %kv_head = arith.divui %h, %group : index
  %in_row = arith.muli %kv_head, %head_dim : index
  %column = arith.addi %in_row, %d : index
  %at.i64 = arith.addi %b, %plane : i64
  %at = arith.index_cast %at.i64 : i64 to index
  %safe = arith.minui %at, {self.last_row} : index
  {name} = tensor.extract {self.cache.name}[%safe, %column] : {self.cache.type}
{self._widen(head_dim)}{_VISIBLE}  %value = arith.select %visible, %raw, %nothing : f32
"""

    def _widen(self, head_dim: int) -> str:
        """Return MLIR that converts %narrow, an element of cache row %safe, to %raw f32.

        For an f32 cache, the MLIR is empty, as the element is already called %raw.
        """
        dtype = self.cache.dtype
        if self.scales is None:
            return "" if dtype == "f32" else f"  %raw = arith.extf %narrow : {dtype} to f32\n"
        return f"""\
  %first_scale = arith.constant {self.kv_heads * head_dim // SCALE_BYTES} : index
  %scale_at = arith.addi %first_scale, %kv_head : index
  %scale = tensor.extract {self.scales.name}[%safe, %scale_at] : {self.scales.type}
{dequantise("%raw", "%narrow", "%scale")}
"""


def token_slots(
    e: Emitter,
    blocks: Tensor,
    token_rows: Tensor,
    positions: Tensor,
    stride: int,
    page_rows: int,
    window: int | None = None,
) -> Tensor:
    """Return the cache row (in K of the slab's first layer) of each slot of each token's sequence.

    The result is [tokens, tiles, TILE] i64, with HIDDEN for slots to which the token does not attend. A token
    attends to slots up to its position; with a `window`, only to the last `window` of these. `blocks` [rows,
    width]: page ids of each sequence; `stride`: slots per page. The last tile may extend beyond the block
    table; its loads are clamped to the table.
    """
    width = blocks.shape[1]
    last = e.value(f"arith.subi {e.index(width)}, {e.constant(1)} : index")
    body = f"""\
  %tile = linalg.index 1 : index
  %in_tile = linalg.index 2 : index
  %tile_size = arith.constant {TILE} : index
  %stride = arith.constant {stride} : index
  %page_rows = arith.constant {page_rows} : i64
  %hidden = arith.constant {HIDDEN} : i64
  %row = arith.index_cast %a : i64 to index
  %position = arith.index_cast %b : i64 to index
  %before = arith.muli %tile, %tile_size : index
  %n = arith.addi %before, %in_tile : index
  %index = arith.divui %n, %stride : index
  %safe = arith.minui %index, {last} : index
  %page = tensor.extract {blocks.name}[%row, %safe] : {blocks.type}
  %first = arith.muli %page, %page_rows : i64
  %in_page = arith.remui %n, %stride : index
  %in_page.i64 = arith.index_cast %in_page : index to i64
  %slot = arith.addi %first, %in_page.i64 : i64
{sees("%visible", "%n", "%position", window)}
  %kept = arith.select %visible, %slot, %hidden : i64
  linalg.yield %kept : i64"""
    shape = (token_rows.shape[0], e.ceil_divide(e.times(width, stride), TILE), TILE)
    return e.elementwise("tcn", ("tcn", shape, "i64"), [(token_rows, "t"), (positions, "t")], body)


def packed_attention(
    e: Emitter,
    q: Tensor,
    keys: CachePlane,
    values: CachePlane,
    slots: Tensor,
    cap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    value_dim: int | None = None,
) -> Tensor:
    """Compute attention of q [tokens, heads, head_dim] f32 over `slots` (`token_slots`); same shape.

    With `cap`, scores are cap * tanh(score / cap). `sinks` [heads] f32: extra scores in the heads' softmaxes.
    `scale`: the factor of scores, by default 1 / sqrt(head_dim); `value_dim`: the first elements of V's heads
    that count, which are then the size of the result's heads.
    """
    scores = _scores(e, q, keys, slots, cap, _head_dim(q) ** -0.5 if scale is None else scale)
    peaks = _reduce(e, _LARGER, LOWEST, scores)
    powers = e.elementwise("thcn", ("thcn", scores.shape, "f32"), [(scores, "thcn"), (peaks, "thc")], _POWER)
    totals = _reduce(e, _ADD, "0.0", powers)
    return _combine(e, peaks, totals, _weigh(e, q, values, slots, powers, value_dim), sinks)


def _scores(
    e: Emitter, q: Tensor, keys: CachePlane, slots: Tensor, cap: float | None, scale: float
) -> Tensor:
    """Compute the scores, [tokens, heads, tiles, TILE] f32; LOWEST for HIDDEN slots."""
    shape = (*q.shape[:2], *slots.shape[1:])
    product = f"""\
  %h = linalg.index 1 : index
  %d = linalg.index 4 : index
{keys.read(_group(q, keys), _head_dim(q))}\
  %product = arith.mulf %a, %value : f32
  %sum = arith.addf %out, %product : f32
  linalg.yield %sum : f32"""
    zero = e.fill("0.0", shape, "f32")
    raw = e.elementwise("thcnd", ("thcn", shape, "f32"), [(q, "thd"), (slots, "tcn")], product, zero)
    mask = f"""\
  %lowest = arith.constant {LOWEST} : f32
  %scale = arith.constant {scale:.9e} : f32
{_VISIBLE}  %scaled = arith.mulf %a, %scale : f32
{"" if cap is None else capped("%capped", "%scaled", cap)}
  %score = arith.select %visible, {"%scaled" if cap is None else "%capped"}, %lowest : f32
  linalg.yield %score : f32"""
    return e.elementwise("thcn", ("thcn", shape, "f32"), [(raw, "thcn"), (slots, "tcn")], mask)


def _weigh(
    e: Emitter, q: Tensor, values: CachePlane, slots: Tensor, powers: Tensor, value_dim: int | None
) -> Tensor:
    """Sum V times `powers` over the slots of each tile, [tokens, heads, tiles, value_dim] f32."""
    body = f"""\
  %h = linalg.index 1 : index
  %d = linalg.index 3 : index
{values.read(_group(q, values), _head_dim(q))}\
  %sum = math.fma %a, %value, %out : f32
  linalg.yield %sum : f32"""
    shape = (*powers.shape[:3], value_dim or _head_dim(q))
    ins = [(powers, "thcn"), (slots, "tcn")]
    return e.elementwise("thcdn", ("thcd", shape, "f32"), ins, body, e.fill("0.0", shape, "f32"))


def _combine(e: Emitter, peaks: Tensor, totals: Tensor, sums: Tensor, sinks: Tensor | None) -> Tensor:
    """Combine the softmaxes of the tiles to attention's result, [tokens, heads, head_dim] f32.

    Of each tile: `peaks`: the largest score; `totals`: the sum of exp(score - peak); `sums`: V, summed with
    these exponentials as weights.
    """
    peak = _reduce(e, _LARGER, LOWEST, peaks)
    if sinks is not None:
        peak = e.elementwise("th", ("th", peak.shape, "f32"), [(peak, "th"), (sinks, "h")], _LARGEST)
    weights = e.elementwise("thc", ("thc", peaks.shape, "f32"), [(peaks, "thc"), (peak, "th")], _POWER)
    total = _reduce(e, _ADD_PRODUCT, "0.0", weights, totals)
    if sinks is not None:
        ins = [(sinks, "h"), (peak, "th"), (total, "th")]
        total = e.elementwise("th", ("th", peak.shape, "f32"), ins, _ADD_POWER)
    shape = (*sums.shape[:2], sums.shape[3])
    zero = e.fill("0.0", shape, "f32")
    out = e.elementwise("thdc", ("thd", shape, "f32"), [(weights, "thc"), (sums, "thcd")], _ADD_PRODUCT, zero)
    return e.elementwise("thd", ("thd", shape, "f32"), [(out, "thd"), (total, "th")], _SHARE)


def _reduce(e: Emitter, body: str, initial: str, *ins: Tensor) -> Tensor:
    """Reduce `ins` over their last dimension. Callers must pass tensors of equal shape."""
    shape = ins[0].shape
    loops = "thcn"[: len(shape)]
    start = e.fill(initial, shape[:-1], "f32")
    return e.elementwise(loops, (loops[:-1], shape[:-1], "f32"), [(x, loops) for x in ins], body, start)


def _group(q: Tensor, plane: CachePlane) -> int:
    """Return the number of query heads per K/V head."""
    heads = q.shape[1]
    assert isinstance(heads, int)
    return heads // plane.kv_heads


def _head_dim(q: Tensor) -> int:
    dim = q.shape[2]
    assert isinstance(dim, int)
    return dim
