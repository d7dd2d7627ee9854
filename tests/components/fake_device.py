"""A fake device whose model hashes what it reads, for tests of everything above the runtime interface.

The page table stores one number per token. A row's logits are a function of the numbers read back through
its block table, so a page that was lost, shared too early, overwritten or taken from another request
changes the tokens. `Faults` raises where a test asks for it. NaN spreads as in a real model: into the
pages of the affected row, and from there to every row that reads them; with `reads_masked` also to rows that
list them in their block tables without a token there, as a mask that multiplies by 0 does not stop NaN.

With a window, a second page table stores the same numbers. What the task's tokens see of them there must be
what the first one has, or the row's tokens are others. If all layers have the window, there is the second
alone, and logits are those after the last tokens that it sees.

With states, a page of the second page table has one number: a hash of all tokens up to the last computed one
of its block. If a row's state is not the hash of the tokens in the first page table, its tokens are others.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.components.runtime.device import (
    Array,
    DeviceBuffer,
    EntrySignature,
    TensorType,
)
from shortfin_apps.llm.components.sampling.draw import draw
from shortfin_apps.llm.components.sampling.weights import mass_within, scale_of, weights_of
from shortfin_apps.llm.contract.abi import (
    DRAFTED,
    GIVEN,
    HIDDEN_PER_SLOT,
    KEPT,
    NO_TOP_K,
    NOT_SEEN,
    EditField,
    Entry,
    EntryFamily,
    PenaltyField,
    SamplingField,
    TermField,
    argument_names,
    chosen_place,
    drafted_place,
)
from shortfin_apps.llm.contract.config import ModelConfig, PagedKVCacheConfig, Pool
from tests.components.fake_hidden import follow_hidden
from tests.components.sampling.rule import drawn_by_the_rule

VOCAB = 32
F32, I32, I64 = np.dtype(np.float32), np.dtype(np.int32), np.dtype(np.int64)


def fake_config(
    *,
    stride: int = 4,
    pages: int = 32,
    max_seq_len: int = 64,
    prefill: tuple[int, ...] = (1, 4),
    decode: tuple[int, ...] = (1, 2, 4, 8),
    top_k: int | None = 4,
    has_prefill_position: bool = True,
    window: int | None = None,
    all_windowed: bool = False,
    states: bool = False,
) -> ModelConfig:
    pools: dict[Pool, int] | None = None
    if states:
        pools, window = {"whole": 1, "state": 1}, 2
    elif window is not None:
        pools = {"window": 1} if all_windowed else {"whole": 1, "window": 1}
    return ModelConfig(
        max_seq_len=max_seq_len,
        transformer_block_count=len(pools or "1"),
        attn_head_dim=1,
        prefill_batch_sizes=prefill,
        decode_batch_sizes=decode,
        has_prefill_position=has_prefill_position,
        top_k=top_k,
        paged_kv_cache=PagedKVCacheConfig(
            attention_head_count_kv=1,
            block_seq_stride=stride,
            device_block_count=pages,
            kv_cache_dtype="float32",
            paged_kv_block_size_elements_per_device=(stride,) * len(pools or "1"),
            window_tokens=window,
            pools=pools,
        ),
    )


def fake_logits(context: Sequence[int] | Array, repeats: float = 0.0) -> npt.NDArray[np.float32]:
    """The model: `[VOCAB]` logits after `context`, read only.

    With the probability `repeats`, by a hash of the context too, the best token is what followed its last two
    tokens when they were last in it, if they were.
    """
    token_ids = np.asarray(context, np.int64)
    seed = zlib.crc32(token_ids.tobytes())
    again = _after_the_last_pair(token_ids.tolist()) if seed % 1000 < 1000 * repeats else None
    if again is None:
        return _logits_of(seed)
    logits = _logits_of(seed).copy()
    logits[again] += 9
    return logits


def _after_the_last_pair(token_ids: list[int]) -> int | None:
    """The token behind the latest earlier place of the last two."""
    for end in range(len(token_ids) - 1, 1, -1):
        if token_ids[end - 2 : end] == token_ids[-2:]:
            return token_ids[end]
    return None


@lru_cache(maxsize=1 << 16)
def _logits_of(seed: int) -> npt.NDArray[np.float32]:
    logits = np.random.default_rng(seed).standard_normal(VOCAB).astype(np.float32)
    logits.flags.writeable = False
    return logits


def greedy_continuation(
    prompt: Sequence[int], count: int, repeats: float = 0.0, *, seen: int | None = None
) -> list[int]:
    """With `seen`, of a model whose layers all see as many tokens."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(fake_logits(tokens[-(seen or 0) :], repeats).argmax()))
    return tokens[len(prompt) :]


@dataclass
class FakeBuffer:
    array: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.array.dtype


@dataclass(eq=False)
class FakePending:
    """An invocation, which runs when it is waited for, after all that were submitted before it.

    `run` writes the results into `buffers`, which are known before; `arguments` it may read and write.

    When it fails, those behind it in flight fail with it.
    """

    run: Callable[[], object]
    in_flight: deque[FakePending] = field(default_factory=deque)
    buffers: Sequence[DeviceBuffer] = ()
    arguments: Sequence[DeviceBuffer] = ()
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.in_flight.append(self)

    def results(self) -> Sequence[DeviceBuffer]:
        if self.error is not None:
            raise self.error
        return self.buffers

    def wait(self) -> Sequence[DeviceBuffer]:
        while self in self.in_flight:
            self.in_flight[0].finish()
        return self.results()

    def finish(self) -> None:
        self.in_flight.popleft()
        try:
            self.run()
        except BaseException as error:
            for each in (self, *self.in_flight):
                each.error = error
            self.in_flight.clear()


@dataclass
class Faults:
    """Hooks that make the device fail.

    `call(name)` runs first in every upload, submit, wait, download and clear, and `before(entry)` in every
    invocation; both may raise. `spoil(row)` makes a row's results NaN.
    """

    call: Callable[[str], None] = lambda name: None
    before: Callable[[str], None] = lambda entry: None
    spoil: Callable[[int], bool] = lambda row: False


def array_of(buffer: DeviceBuffer) -> Array:
    assert isinstance(buffer, FakeBuffer)
    return buffer.array


@dataclass
class FakeProgram:
    config: ModelConfig
    faults: Faults = field(default_factory=Faults)
    static_lengths: tuple[int, ...] = ()
    logits_result: bool = True
    extend_rank: int = 0  # 1: packed extend entries, 2: a padded one, 0: none
    extend_lengths: tuple[int, ...] = ()
    loop_sizes: tuple[int, ...] = ()
    sample_sizes: tuple[int, ...] = ()
    adjusted_sample_sizes: tuple[int, ...] = ()
    logprob_sizes: tuple[int, ...] = ()
    reads_masked: bool = False
    repeats: float = 0.0  # of `fake_logits`
    errs: float = 0.0  # the probability that its tokens are others, for a draft model
    drafts: bool = False  # whether it has a draft layer, which errs as often as `draft_errs`
    draft_errs: float = 0.0
    misuse = ""  # of a draft, found on the device
    drafted_at: dict[int, int] = field(default_factory=dict)  # positions of drafted tokens, by place
    calls: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    in_flight: deque[FakePending] = field(default_factory=deque)
    left: Sequence[FakeBuffer] = ()  # results of the last batch
    made: tuple[object, Mapping[str, EntrySignature]] = None, MappingProxyType({})  # of what, and the entries

    @property
    def entries(self) -> Mapping[str, EntrySignature]:
        """Made again only if what they are made of has changed: each call of an entry needs them."""
        made_of = (
            *(self.config, self.static_lengths, self.logits_result, self.extend_rank, self.extend_lengths),
            *(
                self.loop_sizes,
                self.sample_sizes,
                self.adjusted_sample_sizes,
                self.logprob_sizes,
                self.drafts,
            ),
        )
        if self.made[0] != made_of:
            self.made = made_of, self._new_entries()
        return self.made[1]

    def _new_entries(self) -> Mapping[str, EntrySignature]:
        entries = [Entry(EntryFamily.DECODE, n, 1) for n in self.config.decode_batch_sizes]
        for n in self.config.prefill_batch_sizes:
            entries += [Entry(EntryFamily.PREFILL, n, s) for s in (None, *self.static_lengths)]
        if self.extend_rank:
            entries += [Entry(EntryFamily.EXTEND, None, t) for t in (None, *self.extend_lengths)]
        first = (TensorType((None,) * (self.extend_rank or 2), I64),)
        follows = self.holds_states and self.extend_rank == 1
        entries += [Entry(EntryFamily.DECODE_LOOP, n, 1) for n in self.loop_sizes]
        entries += [Entry(EntryFamily.DRAFT, n, 1) for n in self.config.decode_batch_sizes if self.drafts]
        hidden = (TensorType((None, 1), F32),) if self.drafts else ()
        return {
            e.name: EntrySignature(
                *(e.name, (*first, *hidden), self._result_types_of(e)),
                takes_followers=follows and e.family is EntryFamily.EXTEND,
                takes_hidden=self.drafts,
            )
            for e in entries
        } | {
            e.name: EntrySignature(e.name, arguments, self._result_types_of(e))
            for e, arguments in [
                *((Entry(EntryFamily.SAMPLE, n, None), self._sample_types(n)) for n in self.sample_sizes),
                *(
                    (Entry(EntryFamily.ADJUSTED_SAMPLE, n, None), self._adjusted_sample_types(n))
                    for n in self.adjusted_sample_sizes
                ),
                *((Entry(EntryFamily.LOGPROBS, n, None), self._logprob_types(n)) for n in self.logprob_sizes),
            ]
        }

    @property
    def holds_states(self) -> bool:
        return "state" in self.config.pools

    def _sample_types(self, rows: int) -> tuple[TensorType, ...]:
        values, logits = (TensorType((None, 1, size), F32) for size in (self.config.top_k, VOCAB))
        indices, of_rows = TensorType(values.shape, I64), TensorType((rows,), I64)
        sampling, table = TensorType((len(SamplingField), rows), I64), TensorType((None,), I64)
        return (values, indices, logits, of_rows, of_rows, of_rows, sampling, table)

    def _adjusted_sample_types(self, rows: int) -> tuple[TensorType, ...]:
        _, _, logits, *others, table = self._sample_types(rows)
        words = -(-VOCAB // 32)
        return (
            *(logits, *others, TensorType((len(PenaltyField), rows), F32)),
            *(TensorType((len(EditField), None), I32), TensorType((None, words), I32)),
            *(TensorType((rows,), I64), TensorType((rows,), I64)),
            *(table, TensorType((None, VOCAB), I32)),
        )

    def _logprob_types(self, rows: int) -> tuple[TensorType, ...]:
        *left, row_indices, slots, _, _, table = self._sample_types(rows)
        return (*left, row_indices, slots, table)

    def _result_types(self) -> tuple[TensorType, ...]:
        one = TensorType((None, None, None), F32)
        if self.config.top_k is None:
            return (one,)
        return (one, TensorType((None, None, None), I64), one)[: 3 if self.logits_result else 2]

    def _result_types_of(self, entry: Entry) -> tuple[TensorType, ...]:
        if entry.family is EntryFamily.LOGPROBS:
            candidates = TensorType((entry.rows, self.config.top_k), F32)
            terms = TensorType((len(TermField), entry.rows), I64)
            return (terms, candidates, TensorType(candidates.shape, I64))
        drawn = (TensorType((entry.rows,), I64),) if entry.returns_token_ids else ()
        return drawn + (self._result_types() if entry.takes_slabs else ())

    def submit(self, entry: str, arguments: Sequence[DeviceBuffer]) -> FakePending:
        self.faults.call("submit")
        self.calls.append((entry, arguments[0].shape))
        rows = max(argument.shape[-1] for argument in arguments[1:3])
        parsed = Entry.parse(entry)
        assert parsed is not None
        buffers = [FakeBuffer(np.zeros((rows, 1, VOCAB))) for _ in self.entries[entry].results or ()]

        def run() -> None:
            results = self._run(entry, [array_of(each) for each in arguments])
            if parsed.takes_slabs:
                self._spoil_left(buffers[int(parsed.returns_token_ids) :])
            for buffer, result in zip(buffers, results, strict=True):
                buffer.array = result.array

        return FakePending(run, self.in_flight, buffers, arguments)

    def _spoil_left(self, buffers: Sequence[FakeBuffer]) -> None:
        """The results of the last batch are overwritten by those of the next one."""
        for buffer in self.left:
            buffer.array = np.full_like(buffer.array, -77)
        self.left = buffers

    def arguments_of(self, entry: str, arrays: Sequence[Array]) -> dict[str, Array]:
        """The arguments by name, the slabs among them as `cache` and perhaps `window_cache`."""
        parsed = Entry.parse(entry)
        assert parsed is not None
        layout = parsed.layout(arrays[0].ndim)
        has_windows = self.config.has_window_table
        names = argument_names(
            layout,
            has_prefill_position=self.config.has_prefill_position,
            has_windows=has_windows,
            takes_followers=self.entries[entry].takes_followers,
            takes_hidden=self.drafts,
        )
        slabs = ("cache", "window_cache") if has_windows else ("cache",)
        return dict(zip((*names, *slabs) if parsed.takes_slabs else names, arrays, strict=True))

    def _run(self, entry: str, arrays: list[Array]) -> Sequence[FakeBuffer]:
        self.faults.call("wait")
        self.faults.before(entry)
        arguments = self.arguments_of(entry, arrays)
        if "edits" in arguments:
            return self._run_adjusted_sample(**arguments)
        if entry.startswith("logprobs"):
            return self._run_logprobs(**arguments)
        if "row_indices" in arguments:
            return self._run_sample(**arguments)
        if "checked" in arguments:
            return self._run_draft(arguments)
        if "sampling" in arguments:
            return self._run_loop(**arguments)
        tokens, lens = arguments["tokens"], arguments["seq_lens"]
        if (table := arguments.get("last_tokens")) is not None:
            tokens = known(tokens, table)
        starts = arguments.get("start_positions", np.zeros(len(lens), np.int64))
        if "offsets" in arguments:
            longer = lens - starts > 1
            assert not (starts[longer] % self.config.stride).any(), "a chunk begins within a page"
            tokens = self._unpacked(tokens, arguments["offsets"], lens - starts)
        return self._results(self._compute(tokens, starts, lens, arguments)[:, None, :])

    def _run_draft(self, arguments: dict[str, Array]) -> Sequence[FakeBuffer]:
        """A decode loop of the draft layer, from tokens that it finds as `checked` says."""
        slots, positions, table = (arguments[name] for name in ("slots", "positions", "last_tokens"))
        num_slots = (len(arguments["hidden_states"]) - 1) // HIDDEN_PER_SLOT
        tokens, checked = arguments["tokens"].copy(), arguments["checked"]
        for row, (slot, number) in enumerate(zip(slots.tolist(), checked.tolist(), strict=True)):
            if number == DRAFTED:
                tokens[row] = table[drafted_place(num_slots, slot, positions[row])]
            elif number >= 0:
                after = range(positions[row] + 1, positions[row] + 1 + number)
                of_places = [self.drafted_at.get(drafted_place(num_slots, slot, at)) for at in after]
                if of_places != [*after]:  # an exception would be a failure of the draft
                    self.misuse = f"of places for {of_places}, tokens for {[*after]} are checked"
                is_right = [
                    table[drafted_place(num_slots, slot, at)] == table[chosen_place(num_slots, slot, at)]
                    for at in after
                ]
                positions[row] += 1 + [*is_right, False].index(False)
                tokens[row] = table[chosen_place(num_slots, slot, positions[row])]
        known_before = np.where(checked == GIVEN, arguments["hidden_from"], 1)
        starts = np.maximum(positions, 0)
        given = {**arguments, "hidden_from": known_before}
        logits = self._draft(tokens[:, None], starts, starts + 1, given)
        pairs = zip(slots.tolist(), positions.tolist(), strict=True)
        places = [drafted_place(num_slots, slot, at + 1) if slot >= 0 else -1 for slot, at in pairs]
        token_ids = self._drawn(logits, np.array(places), positions, arguments["sampling"], table)
        self.drafted_at |= dict(zip(places, (positions + 1).tolist(), strict=True))
        positions[positions >= 0] += 1
        return [token_ids, *self._results(logits[:, None, :])]

    def _draft(self, tokens: Array, starts: Array, lens: Array, arguments: Mapping[str, Array]) -> Array:
        """The logits of its draft layer, which are the model's if the hidden state before a row is known."""
        blocks, cache = arguments["seq_block_ids"], arguments["cache"]
        for row, of_row in enumerate(zip(tokens, starts, lens, strict=True)):
            self._store(*of_row, blocks[row], cache, is_spoiled=False)
        knows, rows = follow_hidden(arguments, starts, lens), []
        for row, (start, seq_len) in enumerate(zip(starts, lens, strict=True)):
            logits = self._row(start, seq_len, [(blocks[row], cache, None)])
            is_wrong = not knows[row] or zlib.crc32(logits.tobytes()) % 1000 < 1000 * self.draft_errs
            rows.append(np.full(VOCAB, np.nan) if self.faults.spoil(row) else -logits if is_wrong else logits)
        return np.stack(rows).astype(np.float32)

    def _compute(self, tokens: Array, starts: Array, lens: Array, arguments: Mapping[str, Array]) -> Array:
        """Stores the tokens of each row; logits `[rows, VOCAB]` after them."""
        logits = self._computed(tokens, starts, lens, arguments)
        if "hidden_states" in arguments:
            follow_hidden(arguments, starts, lens)
        return logits

    def _computed(self, tokens: Array, starts: Array, lens: Array, arguments: Mapping[str, Array]) -> Array:
        tables: list[tuple[Array, Array, int | None]] = [
            (arguments["seq_block_ids"], arguments["cache"], self._window_of_first)
        ]
        if self.holds_states:
            return self._compute_states(tokens, starts, lens, arguments)
        if (window := self.config.window_tokens) is not None and self.config.has_window_table:
            tables.append((arguments["window_block_ids"], arguments["window_cache"], window))
        for row, of_row in enumerate(zip(tokens, starts, lens, strict=True)):
            is_spoiled = self.faults.spoil(row)
            for blocks, cache, _ in tables:
                self._store(*of_row, blocks[row], cache, is_spoiled=is_spoiled)
        return np.stack(
            [
                self._row(start, seq_len, [(blocks[row], cache, window) for blocks, cache, window in tables])
                for row, (start, seq_len) in enumerate(zip(starts, lens, strict=True))
            ]
        )

    def _compute_states(
        self, tokens: Array, starts: Array, lens: Array, arguments: Mapping[str, Array]
    ) -> Array:
        """As `_compute`, with a state per page of the second table."""
        blocks, cache = arguments["seq_block_ids"], arguments["cache"]
        followers = arguments.get("followers", np.zeros(len(lens), np.int64))
        states: list[float] = []
        for row, of_row in enumerate(zip(tokens, starts, lens, strict=True)):
            is_spoiled = self.faults.spoil(row)
            self._store(*of_row, blocks[row], cache, is_spoiled=is_spoiled)
            if followers[row] < 0:
                assert starts[row] == lens[row - 1] == lens[row] - 1, "a row follows another sequence's"
                before = states[-1]
            else:
                before = self._state_before(row, starts[row], arguments)
            states.append(self._continued(row, *of_row, before, arguments, is_spoiled=is_spoiled))
        rows = []
        for row, (start, seq_len) in enumerate(zip(starts, lens, strict=True)):
            logits = self._row(start, seq_len, [(blocks[row], cache, None)])
            known = cache[blocks[row]].reshape(-1)[:seq_len]
            if np.isnan(states[row]):
                logits = np.full(VOCAB, np.nan, np.float32)
            elif not np.isnan(logits).any() and states[row] != state_after(known):
                logits = self._logits(np.array([*known, -states[row]]))
            rows.append(logits)
        return np.stack(rows)

    def _state_before(self, row: int, start: int, arguments: Mapping[str, Array]) -> float:
        if start == 0:
            return 0.0
        page = arguments["window_block_ids"][row, (start - 1) // self.config.stride]
        return float(arguments["window_cache"][page, 0])

    def _continued(
        self,
        row: int,
        tokens: Array,
        start: int,
        seq_len: int,
        state: float,
        arguments: Mapping[str, Array],
        *,
        is_spoiled: bool,
    ) -> float:
        """The state after the row's last token; writes it, and those at ends of blocks, to their pages."""
        blocks, cache, stride = arguments["window_block_ids"], arguments["window_cache"], self.config.stride
        for position in range(start, seq_len):
            state = np.nan if is_spoiled or np.isnan(state) else next_state(state, tokens[position - start])
            page = blocks[row, position // stride]
            if page and ((position + 1) % stride == 0 or position == seq_len - 1):
                cache[page] = state
        return state

    @property
    def _window_of_first(self) -> int | None:
        """The window of the first slab."""
        return None if self.config.has_window_table else self.config.window_tokens

    def _run_loop(
        self,
        tokens: Array,
        slots: Array,
        positions: Array,
        sampling: Array,
        last_tokens: Array,
        **paged: Array,
    ) -> Sequence[FakeBuffer]:
        """Decodes, draws by the rule for devices, and writes over the state."""
        starts = np.maximum(positions, 0)
        arguments = paged | {"slots": slots, "positions": positions}
        logits = self._compute(known(tokens, last_tokens)[:, None], starts, starts + 1, arguments)
        token_ids = self._drawn(logits, slots, positions, sampling, last_tokens)
        positions[positions >= 0] += 1
        return [token_ids, *self._results(logits[:, None, :])]

    def _drawn(
        self, rows: Sequence[Array] | Array, slots: Array, positions: Array, sampling: Array, table: Array
    ) -> FakeBuffer:
        """Draw a token from each row of logits, and store it in the row's slot of the table."""
        of_rows = zip(rows, sampling.T, positions, strict=True)
        drawn = np.array([sampled(*of_row, self.config.top_k or 0) for of_row in of_rows])
        stored = (positions >= 0) & (drawn >= 0) & (slots >= 0)
        assert len(set(slots[stored])) == stored.sum(), "two rows have one slot"
        table[slots[stored]] = drawn[stored]
        return FakeBuffer(drawn)

    def _run_sample(
        self,
        values: Array,
        indices: Array,
        logits: Array,
        row_indices: Array,
        slots: Array,
        positions: Array,
        sampling: Array,
        last_tokens: Array,
    ) -> Sequence[FakeBuffer]:
        return [self._drawn(logits[row_indices, 0], slots, positions, sampling, last_tokens)]

    def _run_adjusted_sample(
        self,
        logits: Array,
        row_indices: Array,
        slots: Array,
        positions: Array,
        sampling: Array,
        penalties: Array,
        edits: Array,
        allowed: Array,
        allowed_indices: Array,
        resets: Array,
        last_tokens: Array,
        counts: Array,
    ) -> Sequence[FakeBuffer]:
        """Adjusts rows, draws by the rule for devices, and writes over the state."""
        adjusted = []
        for row, index in enumerate(row_indices):
            bitmask = allowed[allowed_indices[row]] if allowed_indices[row] >= 0 else None
            of_row = edits[1:, edits[EditField.ROW] == row].T.tolist()
            has_table = slots[row] >= 0
            of_slot = counts[slots[row]] if has_table else np.full(VOCAB, NOT_SEEN)
            if has_table and resets[row]:
                of_slot[:] = NOT_SEEN
            adjusted.append(edited(logits[index, 0], of_row, of_slot, penalties[:, row], bitmask))
        token_ids = self._drawn(adjusted, slots, positions, sampling, last_tokens)
        for slot, position, token_id in zip(slots, positions, token_ids.array, strict=True):
            if slot >= 0 and position >= 0 and token_id >= 0:
                counts[slot, token_id] = max(counts[slot, token_id], 0) + 1
        positions[positions >= 0] += 1
        return [token_ids]

    @staticmethod
    def _run_logprobs(
        values: Array, indices: Array, logits: Array, row_indices: Array, slots: Array, last_tokens: Array
    ) -> Sequence[FakeBuffer]:
        """A row that is not finite or has no token gets terms that nobody may read."""
        terms = np.full((len(TermField), len(row_indices)), -7)
        for row, (index, slot) in enumerate(zip(row_indices, slots, strict=True)):
            of_row, token_id = logits[index, 0], last_tokens[slot] if slot >= 0 else -1
            if np.isfinite(of_row.max()):
                terms[TermField.MASS, row] = weights_of(of_row, float(of_row.max()), scale_of(1.0)).sum()
            if 0 <= token_id < VOCAB:
                terms[TermField.LOGIT, row] = of_row[token_id].view(np.int32)
                terms[TermField.RANK, row] = 1 + (of_row > of_row[token_id]).sum()
        return [FakeBuffer(each) for each in (terms, values[row_indices, 0], indices[row_indices, 0])]

    @staticmethod
    def _unpacked(tokens: Array, offsets: Array, counts: Array) -> Array:
        """Packed tokens as a prefill's `[R, S]`; those past the last task must be zeros."""
        assert not tokens[counts.sum() :].any()
        padded = np.zeros((len(counts), counts.max()), np.int64)
        for row, (offset, count) in enumerate(zip(offsets, counts, strict=True)):
            padded[row, :count] = tokens[offset : offset + count]
        return padded

    def _store(
        self, tokens: Array, start: int, seq_len: int, blocks: Array, cache: Array, *, is_spoiled: bool
    ) -> None:
        """Stores tokens in their pages; positions past the block table go to the scratch page."""
        assert (seq_len - 1) // self.config.stride < len(blocks), "the block table is too narrow"
        positions = np.arange(start, start + len(tokens))
        index, offset = np.divmod(positions, self.config.stride)
        pages = np.where(index < len(blocks), blocks[np.minimum(index, len(blocks) - 1)], 0)
        values = np.where(positions < seq_len, tokens, -1).astype(cache.dtype)
        cache[pages, offset] = np.nan if is_spoiled else values

    def _row(self, start: int, seq_len: int, tables: Sequence[tuple[Array, Array, int | None]]) -> Array:
        """Logits `[VOCAB]` after the tokens read back from all tables, NaN if any of those is.

        A table has the row's page ids, its slab and its window.
        """
        num_pages = -(-int(seq_len) // self.config.stride)
        contexts: list[Array] = []
        for blocks, cache, window in tables:
            first = 0 if window is None else max(0, int(start) - window + 1)
            contexts.append(cache[blocks[:num_pages]].reshape(-1)[first:seq_len])
            masked = blocks if window is None else blocks[first // self.config.stride :]
            if np.isnan(cache[masked] if self.reads_masked else contexts[-1]).any():
                return np.full(VOCAB, np.nan, np.float32)
        context, *windows = contexts
        if (window := self._window_of_first) is not None:
            context = context[-window:]
        is_same = all(np.array_equal(context[-len(seen) :], seen) for seen in windows)
        return self._logits(context if is_same else np.concatenate(contexts))

    def _logits(self, context: Array) -> npt.NDArray[np.float32]:
        logits = fake_logits(context, self.repeats)
        is_wrong = zlib.crc32(logits.tobytes()) % 1000 < 1000 * self.errs
        return -logits if is_wrong else logits

    def _results(self, logits: Array) -> Sequence[FakeBuffer]:
        k = self.config.top_k
        if k is None:
            return [FakeBuffer(logits)]
        order = np.argsort(-logits, axis=-1, kind="stable")[..., :k]
        values = np.take_along_axis(logits, order, axis=-1)
        results = [FakeBuffer(values), FakeBuffer(order), FakeBuffer(logits)]
        return results[: 3 if self.logits_result else 2]


def next_state(state: float, token_id: float) -> float:
    """A number that f32 represents exactly."""
    return float(zlib.crc32(np.array([state, token_id], np.float64).tobytes()) % (1 << 24))


def state_after(token_ids: Sequence[float] | Array) -> float:
    state = 0.0
    for token_id in token_ids:
        state = next_state(state, token_id)
    return state


def known(tokens: Array, table: Array) -> Array:
    """The tokens, with the table's in place of -1 minus a slot."""
    return np.where(tokens < 0, table[np.maximum(-1 - tokens, 0)], tokens)


def sampled(logits: Array, fields: Array, position: int, k: int) -> int:
    """The token that a device samples: `fields` are by `SamplingField`; -1 for NaN."""
    scale_bits, top_k, share, least, seed, prompt_length = fields.tolist()
    if position < 0 or not np.isfinite(logits.max()):
        return -1
    index = (int(position) + 1 - prompt_length) % 2**64  # within a prompt, a draw is of no use
    scale = np.int32(scale_bits).view(np.float32)
    if top_k == NO_TOP_K:
        weights = weights_of(logits, float(logits.max()), scale)
        return drawn_by_the_rule(weights.tolist(), share, least, seed, index)
    order = np.argsort(-logits, kind="stable")[: min(k, top_k)]
    weights = weights_of(logits[order], float(logits.max()), scale)
    before = np.cumsum(weights) - weights
    passes = (before < mass_within(share, int(weights.sum()))) & (weights >= least)
    passes[0] = True
    return int(order[draw(np.where(passes, weights, 0), seed, index)])


def edited(
    logits: Array, edits: Sequence[Sequence[int]], counts: Array, penalties: Array, bitmask: Array | None
) -> Array:
    """The logits of one row that a device adjusts, token by token; `edits` are without ROW.

    The edits change the counts of the row's tokens, in place.
    """
    result = logits.copy()
    repetition, frequency, presence = penalties
    assert len({token_id for token_id, _, _ in edits}) == len(edits), "a token has two edits"
    for token_id, bias_bits, count in edits:
        result[token_id] += np.int32(bias_bits).view(np.float32)
        if count != KEPT:
            counts[token_id] = count
    for token_id, count in enumerate(counts.tolist()):
        if count != NOT_SEEN:
            value = result[token_id]
            value = value / repetition if value > 0 else value * repetition
            value = value - frequency * np.float32(count)
            result[token_id] = value - presence if count > 0 else value
        if bitmask is not None and not int(bitmask[token_id // 32]) >> token_id % 32 & 1:
            result[token_id] = -np.inf
    return result


class FakeDevice:
    name = "fake"

    def __init__(self, program: FakeProgram) -> None:
        self.program = program
        self.spare: int | None = None
        self.uploads = 0

    def load_program(self, vmfb: Path, parameters: Sequence[Path], module_name: str) -> FakeProgram:
        return self.program

    def allocate(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        *,
        stage: int = 0,
        only_dispatches: bool = False,
        on_host: bool = False,
    ) -> FakeBuffer:
        """Memory of no defined contents; only pages are zeroed."""
        return FakeBuffer(np.zeros(shape, dtype) if dtype != I32 else np.full(shape, 77, dtype))

    def spare_bytes(self, stage: int = 0) -> int | None:
        return self.spare

    def upload(self, array: Array) -> FakeBuffer:
        self.program.faults.call("upload")
        self.uploads += 1
        return FakeBuffer(array.copy())

    def download(self, buffer: DeviceBuffer) -> Array:
        self.program.faults.call("download")
        return array_of(buffer).copy()

    def clear(self, buffer: DeviceBuffer, rows: Sequence[int]) -> None:
        self.program.faults.call("clear")
        in_use = [argument for each in self.program.in_flight for argument in each.arguments]
        assert not any(each is buffer for each in in_use), (
            "pages are cleared while an invocation may write them"
        )
        array_of(buffer)[list(rows)] = 0

    def close(self) -> None:
        return None


def page_table_of(
    device: FakeDevice, config: ModelConfig, num_pages: int, num_window_pages: int
) -> list[FakeBuffer]:
    """Slabs with pages that hold a token in each element."""
    return [
        device.allocate(
            (num_pages if slab.pool == "whole" else num_window_pages, config.stride),
            config.paged_kv_cache.dtype,
        )
        for slab in config.slabs
    ]
