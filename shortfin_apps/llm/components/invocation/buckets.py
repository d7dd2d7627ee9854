"""The compiled shapes of a VMFB, and the choice of the nearest shape for a batch.

A batch takes the smallest static entry (bucket) that holds it, padded to its size. A batch that none holds
takes a dynamic entry. `static_threshold.py` turns static entries off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shortfin_apps.llm.components.batching.batch import Batch, LlmTaskInput
from shortfin_apps.llm.components.runtime.device import EntrySignature
from shortfin_apps.llm.contract.abi import MIN_BLOCKS, ROW_LAYOUTS, Entry, EntryFamily, Layout
from shortfin_apps.llm.contract.errors import ArtifactError

# Computing so few rows takes about as long as reading the weights, also where some are padding.
FEW_ROWS = 8


@dataclass(frozen=True, slots=True)
class Shape:
    """The padded shape of one invocation, with the entry that it runs on.

    In the terms of abi.py: `rows` is N or R, `tokens` the total (N x S, or T), and `blocks` is B.
    """

    entry: str
    layout: Layout
    rows: int
    tokens: int
    blocks: int


class Buckets:
    """The entries of one VMFB by the shapes they take. Pages hold `stride` tokens.

    Without `has_prefill_position`, S and B of a prefill are not independent: S is B times the stride.
    """

    def __init__(
        self, entries: Mapping[str, EntrySignature], stride: int, *, has_prefill_position: bool
    ) -> None:
        self._stride = stride
        self._has_prefill_position = has_prefill_position
        self._decode: dict[int, str] = {}
        self._prefill: dict[int, str] = {}  # entries of dynamic S
        self._static_prefill: dict[tuple[int, int], str] = {}
        self._extend: dict[int, str] = {}
        self._most_rows: dict[int, int] = {}  # maximum rows of the entries in `_extend`
        self._loops: dict[int, str] = {}
        self._drafts: dict[int, str] = {}
        self._of_rows: dict[Layout, dict[int, str]] = {layout: {} for layout in ROW_LAYOUTS}
        self._dynamic_extend: str | None = None
        self._extend_layout = Layout.PACKED
        self.takes_followers = False  # whether `extend` entries take `followers`, for layers with a state
        for name, signature in entries.items():
            if entry := Entry.parse(name):
                self._add(entry, signature)
        has_prefill = bool(self._prefill or self._static_prefill)
        if not self.has_packed_extend and not (self._decode and has_prefill):
            raise ArtifactError("the VMFB has no prefill_bsN or no decode_bsN entry; rebuild it")

    @property
    def has_extend(self) -> bool:
        """Whether the VMFB has an `extend` entry that takes batches of any size."""
        return self._dynamic_extend is not None

    @property
    def has_packed_extend(self) -> bool:
        """Whether that entry takes tasks of one token at any position, even several of one request."""
        return self.has_extend and self._extend_layout is Layout.PACKED

    def holds_decodes(self, num_rows: int) -> bool:
        """Return whether some `decode` entry has at least this many rows."""
        return num_rows <= max(self._decode, default=0)

    @property
    def can_run_ahead(self) -> bool:
        """Whether decodes of tokens that the host does not know yet can be queued.

        This takes decode loops for the largest decodes, and no padded `extend`. Without any `decode` it takes
        `sample` entries, which draw the tokens of an `extend`.
        """
        is_packed = self.has_packed_extend or not self.has_extend
        if not self._decode:
            return is_packed and self.draws_rows
        return max(self._loops, default=0) >= max(self._decode) and is_packed

    @property
    def most_drafts(self) -> int:
        """Maximum rows of a `draft`; 0 if the model has no draft layer."""
        return max(self._drafts, default=0)

    @property
    def draws_rows(self) -> bool:
        """Whether the device can draw tokens from full rows, in decode loops and after other entries."""
        return bool(self._of_rows[Layout.SAMPLE])

    @property
    def draws_adjusted_rows(self) -> bool:
        """Whether the device can adjust full rows and draw tokens from them."""
        return bool(self._of_rows[Layout.ADJUSTED_SAMPLE])

    @property
    def computes_logprobs(self) -> bool:
        """Whether the device can reduce full rows to the terms of log-probabilities."""
        return bool(self._of_rows[Layout.LOGPROBS])

    @property
    def takes_any_chunk(self) -> bool:
        """Whether prefill entries of every batch size take any sequence length, so chunks need no padding."""
        return all(rows in self._prefill for rows, _ in self._static_prefill)

    def nearest(self, batch: Batch, *, draws: bool = False) -> Shape:
        """Return the nearest compiled shape that holds the batch; with `draws`, decodes run on a decode loop.

        A batch of decodes or of prefills runs on a packed `extend` if no such entry holds it.

        If all tasks of an `extend` batch are decodes, a `decode` runs them instead of a packed `extend`,
        unless the `decode` computes more rows, and more than FEW_ROWS: it has fewer dispatches and gives the
        same bits, except on NVIDIA GPUs. A decode loop also saves the draw, so it may compute a third more
        rows.
        """
        tasks = batch.tasks
        if batch.family is EntryFamily.PREFILL and (prefill := self._prefill_shape(tasks)) is not None:
            return prefill
        is_decode = batch.family is EntryFamily.DECODE
        decode = self._decode_bucket(tasks, draws=draws) if is_decode or _are_decodes(tasks) else None
        if is_decode and decode is not None:
            return decode
        extend = self.extend(tasks)
        if decode is None or extend.layout is not Layout.PACKED:
            return extend
        if draws:
            return decode if 3 * decode.rows <= 4 * extend.tokens else extend
        return decode if decode.rows <= max(extend.tokens, FEW_ROWS) else extend

    def extend(self, tasks: Sequence[LlmTaskInput]) -> Shape:
        """Return the nearest `extend` shape that holds the tasks."""
        assert self._dynamic_extend is not None, "the mode was checked against the VMFB"
        if self._extend_layout is Layout.PREFILL:
            length = self._padded_length(tasks)
            blocks = self._prefill_blocks(tasks, length)
            return Shape(self._dynamic_extend, Layout.PREFILL, len(tasks), len(tasks) * length, blocks)
        return self._packed(len(tasks), sum([len(task.token_ids) for task in tasks]), widest(tasks))

    def draft(self, num_rows: int, blocks: int = MIN_BLOCKS) -> Shape:
        """Return the nearest `draft` of as many rows, at most `most_drafts`."""
        rows = min(n for n in self._drafts if n >= num_rows)
        return Shape(self._drafts[rows], Layout.DRAFT, rows, rows, blocks)

    def row_shape(self, layout: Layout, num_rows: int) -> Shape:
        """Return the nearest entry of one of ROW_LAYOUTS with at least `num_rows` rows, else the largest.

        Callers must check that there is any.
        """
        entries = self._of_rows[layout]
        rows = min((n for n in entries if n >= num_rows), default=max(entries))
        return Shape(entries[rows], layout, rows, tokens=0, blocks=0)  # no tokens are computed, no pages read

    def most_rows(self, entry: str) -> int | None:
        """Return the maximum rows of an `extend_tT` entry; None for other entries."""
        return next((self._most_rows[length] for length, name in self._extend.items() if name == entry), None)

    def decode_of(self, num_rows: int) -> Shape:
        """Return the nearest shape of as many decodes, or the largest `decode`, with the fewest blocks."""
        rows = min((n for n in self._decode if n >= num_rows), default=None)
        if rows is None and self.has_packed_extend:
            return self._packed(num_rows, num_rows, MIN_BLOCKS)
        rows = rows or max(self._decode)
        return Shape(self._decode[rows], Layout.DECODE, rows, rows, MIN_BLOCKS)

    def prefill_of(self, pages: int) -> Shape | None:
        """Return a `prefill` of one row of `pages` pages; None if no such entry has a dynamic length."""
        if 1 not in self._prefill:
            return None
        blocks = max(MIN_BLOCKS, pages)
        tokens = pages * self._stride if self._has_prefill_position else blocks * self._stride
        return Shape(self._prefill[1], Layout.PREFILL, 1, tokens, blocks)

    def mixed_of(self, num_decodes: int, pages: int) -> Shape | None:
        """Return a packed `extend` of decodes and one chunk of `pages` pages; None if the VMFB has none."""
        if not self.has_packed_extend:
            return None
        return self._packed(num_decodes + 1, num_decodes + pages * self._stride, max(MIN_BLOCKS, pages))

    def smallest_shapes(self) -> list[Shape]:
        """Return the smallest shape of every entry."""
        stride = self._stride
        shapes = [Shape(name, Layout.DECODE, n, n, MIN_BLOCKS) for n, name in self._decode.items()]
        shapes += [Shape(name, Layout.LOOP, n, n, MIN_BLOCKS) for n, name in self._loops.items()]
        shapes += [self.draft(n) for n in self._drafts]
        shapes += [self.row_shape(layout, n) for layout in ROW_LAYOUTS for n in self._of_rows[layout]]
        shapes += [
            Shape(name, Layout.PREFILL, n, n * MIN_BLOCKS * stride, MIN_BLOCKS)
            for n, name in self._prefill.items()
        ]
        shapes += [
            Shape(name, Layout.PREFILL, n, n * length, max(MIN_BLOCKS, length // stride))
            for (n, length), name in self._static_prefill.items()
        ]
        shapes += [Shape(name, self._extend_layout, 1, t, MIN_BLOCKS) for t, name in self._extend.items()]
        if self._dynamic_extend is not None:
            shapes.append(Shape(self._dynamic_extend, self._extend_layout, 1, stride, MIN_BLOCKS))
        return shapes

    def _add(self, entry: Entry, signature: EntrySignature) -> None:
        match entry:
            case Entry(EntryFamily.DECODE, int(rows)):
                self._decode[rows] = entry.name
            case Entry(EntryFamily.PREFILL, int(rows), None):
                self._prefill[rows] = entry.name
            case Entry(EntryFamily.PREFILL, int(rows), int(length)):
                self._static_prefill[rows, length] = entry.name
            case Entry(EntryFamily.DRAFT, int(rows)):
                self._drafts[rows] = entry.name
            case Entry(EntryFamily.DECODE_LOOP, int(rows)):
                self._loops[rows] = entry.name
            case Entry(_, int(rows)) if not entry.takes_slabs:
                self._of_rows[entry.layout()][rows] = entry.name
            case Entry(EntryFamily.EXTEND, _, int(length)):
                self._extend[length] = entry.name
                self._most_rows[length] = _declared_rows(signature) or length
            case _:
                self._dynamic_extend = entry.name
                self._extend_layout = entry.layout(signature.tokens_rank)
                self.takes_followers = signature.takes_followers

    def _packed(self, rows: int, tokens: int, blocks: int) -> Shape:
        """Return the nearest packed `extend` with at least as many rows and tokens."""
        assert self._dynamic_extend is not None, "callers check it"
        holding = (t for t, most_rows in self._most_rows.items() if t >= tokens and most_rows >= rows)
        bucket = min(holding, default=None)
        entry = self._dynamic_extend if bucket is None else self._extend[bucket]
        return Shape(entry, Layout.PACKED, rows, bucket or tokens, blocks)

    def _decode_bucket(self, tasks: Sequence[LlmTaskInput], *, draws: bool) -> Shape | None:
        """Return the nearest `decode` that holds the tasks, or None; with `draws` a decode loop."""
        entries, layout = (self._loops, Layout.LOOP) if draws else (self._decode, Layout.DECODE)
        rows = min((n for n in entries if n >= len(tasks)), default=None)
        return None if rows is None else Shape(entries[rows], layout, rows, rows, widest(tasks))

    def _prefill_shape(self, tasks: Sequence[LlmTaskInput]) -> Shape | None:
        """Return the nearest `prefill` that holds the tasks; None if none does."""
        if (found := self._prefill_entry(len(tasks), self._padded_length(tasks))) is None:
            return None
        entry, rows, length = found
        return Shape(entry, Layout.PREFILL, rows, rows * length, self._prefill_blocks(tasks, length))

    def _padded_length(self, tasks: Sequence[LlmTaskInput]) -> int:
        pages = max(-(-len(task.token_ids) // self._stride) for task in tasks)
        return (pages if self._has_prefill_position else max(pages, MIN_BLOCKS)) * self._stride

    def _prefill_blocks(self, tasks: Sequence[LlmTaskInput], length: int) -> int:
        """Return the blocks before the latest start position, plus the blocks of `length` tokens after it."""
        first = max(task.start_position for task in tasks) // self._stride
        return max(MIN_BLOCKS, first + length // self._stride)

    def _prefill_entry(self, num_rows: int, length: int) -> tuple[str, int, int] | None:
        all_rows = self._prefill.keys() | {rows for rows, _ in self._static_prefill}
        rows = min((n for n in all_rows if n >= num_rows), default=None)
        if rows is None:
            return None
        if (exact := self._static_prefill.get((rows, length))) is not None:
            return exact, rows, length
        if rows in self._prefill:
            return self._prefill[rows], rows, length
        nearest = min((s for n, s in self._static_prefill if n == rows and s >= length), default=None)
        return None if nearest is None else (self._static_prefill[rows, nearest], rows, nearest)


def _are_decodes(tasks: Sequence[LlmTaskInput]) -> bool:
    """Return whether each task is one token of a different request, as a `decode` needs independent rows."""
    if any(len(task.token_ids) > 1 for task in reversed(tasks)):  # prompts come last
        return False
    return len({task.request for task in tasks}) == len(tasks)


def _declared_rows(signature: EntrySignature) -> int | None:
    """Return the number of rows of the declared results; None if undeclared or dynamic."""
    return signature.results[0].shape[0] if signature.results else None


def widest(tasks: Sequence[LlmTaskInput]) -> int:
    """Return the number of blocks that the block table of these tasks needs."""
    return max(MIN_BLOCKS, *[len(task.page_ids) for task in tasks])


def all_return_logits(entries: Mapping[str, EntrySignature], top_k: int | None) -> bool:
    """Return whether every entry returns logits; with top-k, entries must declare them in their results."""
    if top_k is None:
        return True
    parsed = ((Entry.parse(name), signature) for name, signature in entries.items())
    return all(
        "logits" in entry.named_results(signature.results or (), top_k)
        for entry, signature in parsed
        if entry is not None and entry.takes_slabs
    )
