"""The ABI between a VMFB and its caller: entry names, and their arguments and results in order.

It is upstream shortfin's ABI for paged language models (`module_abi_version` 1; amdsharktank's
export_paged_llm_v1), extended by packed `extend`, `decode_loop`, `sample`, `adjusted_sample` and `logprobs`
entries. N and R count rows, one per task (sequence of the batch); S and T count tokens; B is the number of
pages in a row of the block table; L and C are the numbers of slots of `last_tokens` and `counts`; `slabs` is
the KV cache, one slab per pipeline stage:

    prefill_bs{N}       tokens [N,S], start_positions [N], seq_lens [N], seq_block_ids [N,B], slabs
    prefill_bs{N}_s{S}  as prefill_bs{N}, with a static S
    decode_bs{N}        tokens [N,1], seq_lens [N], start_positions [N], seq_block_ids [N,B], slabs
    extend              tokens [T], offsets [R], start_positions [R], seq_lens [R], seq_block_ids [R,B],
                        last_tokens [L], slabs
    extend_t{T}         as extend, with a static T
    decode_loop_bs{N}   tokens [N], slots [N], positions [N], seq_block_ids [N,B], sampling [6,N],
                        last_tokens [L], slabs
    sample_bs{N}        values [R,1,K], indices [R,1,K], logits [R,1,V], row_indices [N], slots [N],
                        positions [N], sampling [6,N], last_tokens [L]
    adjusted_sample_bs{N}   logits [R,1,V], row_indices [N], slots [N], positions [N], sampling [6,N],
                            penalties [3,N], edits [4,E], allowed [M,ceil(V/32)], allowed_indices [N],
                            resets [N], last_tokens [L], counts [C,V]
    logprobs_bs{N}      values [R,1,K], indices [R,1,K], logits [R,1,V], row_indices [N], slots [N],
                        last_tokens [L]

If config.json has two `pools`, each pool has its own slab and pages. `seq_block_ids` is then the block table
of pool "whole", followed by `window_block_ids`, of the same shape, for the other pool. Columns of
`window_block_ids` for pages before the windows of all of a row's tokens may name any page: its contents are
not used. If the only pool is "window", this holds for `seq_block_ids`.

If there is a pool "state", a packed `extend` takes `followers [R]` before `last_tokens`: how many rows after
a row continue its sequence, or -1 for a row that continues the one before. A row and its followers have one
token each, at consecutive positions. A follower starts from the state after the row before it. Each row
writes its state to the page that its own row of the block table names, so that the caller can keep the state
after any of them. The reflection data of such an entry has TAKES_FOLLOWERS.

Prefill and decode differ in the order of their second and third argument. All arguments are i64, except those
in ARGUMENT_TYPES and the slabs `[pages, elements]` of `kv_cache_dtype`, which entries update in place.
Without `has_prefill_position` in config.json, a prefill takes no start positions. Upstream's `extend` is
padded instead of packed: it takes the arguments of a prefill, for any N.

A model with a draft layer (model/draft_layer.py) has entries `draft`: decode loops of this layer. All entries
that take slabs then end with `hidden_from [N or R], hidden_to [N or R], hidden_states [HL,H]` before these,
but a `draft` and a `decode_loop` take no `hidden_to`:

    draft_bs{N}         tokens [N], slots [N], positions [N], checked [N], seq_block_ids [N,B],
                        sampling [6,N], last_tokens [L], hidden_from [N], hidden_states [HL,H], slabs

`hidden_states` (f32) is a table on the device. The entry reads the hidden state of the token before a row's
first one from row `hidden_from`, and stores that of the row's last token in row `hidden_to`, in place. Row
NO_HIDDEN has none: zeros are read, and what is stored is not used. With `hidden_from` -1, a row of a packed
`extend` continues the row before it. A `draft` and a `decode_loop` know of `hidden_from` only whether it is
NO_HIDDEN: they use row `hidden_row` of a slot and position, as callers do. The reflection data of all these
entries has TAKES_HIDDEN.

A `draft` differs from a `decode_loop` in where it finds a row's token and stores the one that it draws.
`last_tokens` has, for each slot and position, a place of a token that was drafted (`drafted_place`) and of
one that the model has chosen (`chosen_place`). The token that is drawn for a position is stored in the
former; callers have `sample` entries store tokens in the latter. `checked[r]` tells the row's token:

    GIVEN      it is `tokens[r]`, at `positions[r]`
    DRAFTED    it was drafted for `positions[r]`, as by an invocation before with the same arguments
    n >= 0     the model has computed the token at `positions[r]` and n drafted ones after it. The row's token
               is the first that the model has chosen otherwise or, if there is none, the one after the last;
               before all else, `positions[r]` becomes its position

So rounds of drafts can be queued before the caller knows which of the last drafts were right.

`last_tokens` is a table on the device that has the last token of each running request, by slot. The caller
assigns the slots, of which the table may have more than `counts`: the places of drafted and chosen tokens.
Programs on one device may share the table: a draft model draws into the places of drafted tokens, from which
the main model's `extend` reads them. A negative token ID -1-s in `tokens` of a packed `extend` or a
`decode_loop` stands for `last_tokens[s]`, so that the caller can queue an invocation before it knows this
token. `decode_loop`, `sample` and `adjusted_sample` draw tokens. They update `last_tokens` in place: the
token of row r is stored in `last_tokens[slots[r]]`. Nothing is stored for a padding row, a negative slot, or
a row without a finite best logit. The slots of one invocation, other than these, are distinct.

`seq_lens` is the number of tokens of a row from position 0 on, including the tokens of this invocation. In a
packed `extend`, the tokens of all tasks are concatenated: the tokens of task r start at `tokens[offsets[r]]`,
and their number is `seq_lens[r] - start_positions[r]`. Offsets ascend from 0; tokens after the last task's
are padding. A task is a decode (one token at any position) or a prefill chunk (any number of tokens,
starting at the first slot of a page). A padding row has tokens 0, start position 0, sequence length 1 and the
scratch page.

`decode_loop` decodes and draws on the device. It advances `positions` in place, so that the caller can invoke
it again with the same arguments (tokens -1-s) before reading the result. `sampling` has a row for each
`SamplingField`. A padding row has token 0, position -1, zeros for sampling and the scratch page; its position
is not advanced. The first result is the new token IDs `[N]`: -1 for a row without a finite best logit,
undefined for a padding row. The results of a `decode` follow, so that another entry can draw again from the
same rows.

`sample` draws tokens from rows that another entry has left on the device: from the rows `row_indices` of that
entry's results, with or without a top-k (NO_TOP_K). `positions` are the positions of these rows' last tokens.
Padding rows have zeros for sampling, row 0 and position -1. The result is the new token IDs, as in a decode
loop. If a VMFB has `sample` entries, its decode loops accept NO_TOP_K, too.

`adjusted_sample` adjusts the logits, then draws like `sample`, but it advances `positions` in place, like a
decode loop. `counts` (i32) is a second table by slot: how often each token was generated, or NOT_SEEN for a
token that is neither in the prompt nor in the output. The entry updates it in place, in this order:

    for each row with a nonzero `resets`, all counts of its slot become NOT_SEEN
    each edit with another COUNT than KEPT sets the count of its token in its row's slot
    the logits are adjusted, with these counts
    the drawn token of each row that stores it is counted (the count becomes 1, or grows by 1)

The caller can thus queue a draw before it knows the tokens of earlier ones, and invoke the entry again with
the same arguments. A row with a negative slot has no counts in the table: they are NOT_SEEN where no edit
sets them. Counts have no effect on a row with penalties 1, 0 and 0. They are i32, as an output may have more
than 32,767 tokens. `edits` has E columns, indexed by `EditField`. Each edit is for one token of one row, and
each token of a row has at most one. A token's logit changes in these steps, each rounded to f32:

    add the bias of its edit, if there is one (minus infinity bans the token)
    unless the count is NOT_SEEN:
        divide a positive logit by the row's repetition penalty; multiply any other logit by it
        subtract the row's frequency penalty times the count
        subtract the row's presence penalty if the count is positive

`penalties` is indexed by `PenaltyField`. Edits of row -1 are padding. `allowed_indices` names a row of
`allowed` for each row, or -1 for none; tokens with a 0 bit there (lowest bit first) are banned. Padding rows
have penalties 0, `allowed_indices` -1 and slot -1.

`logprobs` returns what log-probabilities are computed from, so that the host does not read the logits. It
reads the rows `row_indices` that another entry has left on the device, before any adjustment, and the token
that was drawn for each row: row r's is `last_tokens[slots[r]]`. It returns `terms` [3,N], indexed by
`TermField`, and the rows' candidates, `top_values` and `top_indices` [N,K]. A row with a negative slot has no
token: its LOGIT and RANK are undefined. Padding rows have row 0 and slot -1.

An entry with CALLER_OWNED in its reflection data allocates nothing. After the slabs, it takes a buffer for
each declared result, and a workspace, i8 `[bytes]`, of at least WORKSPACE_BYTES bytes. The entry writes its
results to these buffers instead of returning them. The results of such an `extend_t{T}` have its maximum
number of rows; rows after the first R are undefined.

Prefill, decode and extend entries return logits `[rows, 1 or S, V]` if config.json has no `top_k`. Otherwise
they return values and indices (i64) `[rows, 1 or S, K]`, optionally followed by logits. Our own
entries return all three, for each row's last token.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import cache
from typing import TypeVar

_T = TypeVar("_T")

ASYNC_SUFFIX = "$async"  # of a function that takes a wait and a signal fence last (IREE's coarse fences)
# Reflection attribute of an entry: "true" if only dispatches write the cache. The cache may then be placed in
# memory that dispatches read faster (`Device.allocate`).
ONLY_DISPATCHES = "shortfin_llm.only_dispatches"
# Reflection attributes of an entry: CALLER_OWNED is "true" if the caller owns the buffers of results and
# workspace. WORKSPACE_BYTES is the workspace's size; IREE's compiler adds this attribute for
# `hal.tensor.transients` if the size is static.
CALLER_OWNED = "shortfin_llm.caller_owned"
WORKSPACE_BYTES = "iree.abi.transients.size.constant"
# Reflection attribute of an entry that is one launch of workgroups that wait for each other: the number of
# compute units on which all of them run at the same time, so that the GPU must have as many.
COMPUTE_UNITS = "shortfin_llm.compute_units"
# Reflection attribute of an `extend`: "true" if it takes `followers`.
TAKES_FOLLOWERS = "shortfin_llm.takes_followers"
# Reflection attribute of an entry: "true" if it takes `hidden_states`, for a model with a draft layer.
TAKES_HIDDEN = "shortfin_llm.takes_hidden"
WORKSPACE_QUERY_SUFFIX = "_transients_size"  # of a function that IREE's compiler adds for such an entry
NOT_FINITE = -1  # token ID that the device draws from a row without a finite best logit
NO_TOP_K = -1  # as SamplingField.TOP_K: the token is drawn from the full row
NOT_SEEN = -1  # as a count: the token is not in the prompt or the output
KEPT = -2  # as EditField.COUNT: the count is the one in the table
# In rows of a `draft`, the logit of tokens that the layer cannot draft. Never drawn, and finite, so that the
# rows are checked like others; f32 has exactly this number.
NO_LOGIT = -1e9
NO_HIDDEN = 0  # the row of `hidden_states` that has no token's hidden state
# Rows of `hidden_states` per slot, and places of drafted and of chosen tokens: a power of two, more than are
# proposed at once.
HIDDEN_PER_SLOT = 16
GIVEN, DRAFTED = -1, -2  # as `checked` of a `draft`
PARAMETER_SCOPE = "model"  # as in `#flow.parameter.named<"model"::"blk.0.attn_q.weight">`
BLOCK_TABLES = ("seq_block_ids", "window_block_ids")
MIN_BLOCKS = 2  # minimum of B, because upstream's exporter does not support narrower block tables

_NAME = re.compile(
    r"(prefill|decode_loop|decode|extend|draft|adjusted_sample|sample|logprobs)(?:_bs(\d+))?(?:_[st](\d+))?"
)


class EntryFamily(StrEnum):
    """The kind of work that an entry does."""

    PREFILL = "prefill"
    DECODE = "decode"
    EXTEND = "extend"  # prefill chunks and decodes in one invocation
    DRAFT = "draft"  # a decode loop of the draft layer
    DECODE_LOOP = "decode_loop"  # a decode that draws tokens and advances positions on the device
    SAMPLE = "sample"  # only draws tokens, from existing rows of logits
    ADJUSTED_SAMPLE = "adjusted_sample"  # adjusts existing rows of logits, then draws tokens from these
    LOGPROBS = "logprobs"  # reduces existing rows of logits to the terms of log-probabilities


class EntryClass(StrEnum):
    """Whether `build` or the batch determines the number of tokens that an entry computes."""

    STATIC = "static"  # fixed: the entry is a bucket, and a smaller batch is padded to its size
    ONE_LAUNCH = "one_launch"  # fixed, and all layers are one launch
    DYNAMIC = "dynamic"  # as many as the batch has; a `prefill_bs{N}` still has a fixed number of rows
    ROWS = "rows"  # computes no tokens: reads rows that another entry has left


class Layout(StrEnum):
    """Which arguments an entry takes, in which order; `_ARGUMENTS` lists them."""

    PREFILL = "prefill"
    DECODE = "decode"
    PACKED = "packed"
    DRAFT = "draft"
    LOOP = "loop"
    SAMPLE = "sample"
    ADJUSTED_SAMPLE = "adjusted_sample"
    LOGPROBS = "logprobs"


class SamplingField(IntEnum):
    """The rows of the `sampling` argument; `sampling_rule.py` defines their effect on a draw."""

    SCALE = 0  # the bits of the f32 `scale`
    TOP_K = 1  # from 1 to K, or NO_TOP_K
    SHARE = 2  # top-p, in units of 2**-SHARE_BITS
    LEAST_WEIGHT = 3  # min-p, in units of a weight
    SEED = 4
    PROMPT_LENGTH = 5  # tokens before the output; draws are numbered from the start of the output


class PenaltyField(IntEnum):
    """The rows of the `penalties` argument."""

    REPETITION = 0
    FREQUENCY = 1
    PRESENCE = 2


class EditField(IntEnum):
    """The rows of the `edits` argument."""

    ROW = 0  # index into `row_indices`, not into the rows of `logits`; -1 for padding
    TOKEN_ID = 1
    BIAS = 2  # the bits of an f32
    COUNT = 3  # how often the token was generated, or KEPT


class TermField(IntEnum):
    """The rows of the result `terms`, i64."""

    MASS = 0  # the sum of the weights of all tokens, with UNIT_SCALE (sampling_rule.py)
    LOGIT = 1  # the bits of the f32 logit of the row's token
    RANK = 2  # 1 + the number of tokens with a greater logit


_ARGUMENTS = {
    Layout.PREFILL: ("tokens", "start_positions", "seq_lens", "seq_block_ids"),
    Layout.DECODE: ("tokens", "seq_lens", "start_positions", "seq_block_ids"),
    Layout.PACKED: ("tokens", "offsets", "start_positions", "seq_lens", "seq_block_ids", "last_tokens"),
    Layout.DRAFT: ("tokens", "slots", "positions", "checked", "seq_block_ids", "sampling", "last_tokens"),
    Layout.LOOP: ("tokens", "slots", "positions", "seq_block_ids", "sampling", "last_tokens"),
    Layout.SAMPLE: (
        *("values", "indices", "logits", "row_indices"),
        *("slots", "positions", "sampling", "last_tokens"),
    ),
    Layout.ADJUSTED_SAMPLE: (
        *("logits", "row_indices", "slots", "positions", "sampling"),
        *("penalties", "edits", "allowed", "allowed_indices", "resets", "last_tokens", "counts"),
    ),
    Layout.LOGPROBS: ("values", "indices", "logits", "row_indices", "slots", "last_tokens"),
}
LOOP_LAYOUTS = (Layout.LOOP, Layout.DRAFT)  # of entries that compute one token per row, then draw the next
# Of entries that read rows which another entry has left on the device.
ROW_LAYOUTS = (Layout.SAMPLE, Layout.ADJUSTED_SAMPLE, Layout.LOGPROBS)
# MLIR element types of the arguments that are not i64.
ARGUMENT_TYPES = {
    **dict.fromkeys(("values", "logits", "penalties", "hidden_states"), "f32"),
    **dict.fromkeys(("edits", "allowed", "counts"), "i32"),
}
_RESULTS = ("values", "indices", "logits")
_HIDDEN = ("hidden_from", "hidden_to", "hidden_states")  # arguments of a model with a draft layer
TOKEN_IDS = "token_ids"  # the first result of entries that draw tokens
LOGPROB_RESULTS = ("terms", "top_values", "top_indices")


@dataclass(frozen=True, slots=True)
class Entry:
    """An exported function. `rows` is N, None for an `extend`. `length` is S or T, None if dynamic."""

    family: EntryFamily
    rows: int | None
    length: int | None

    @classmethod
    @cache
    def parse(cls, name: str) -> Entry | None:
        """Parse a name without module prefix and `$async`. Returns None if it is not the name of an entry."""
        if (match := _NAME.fullmatch(name)) is None:
            return None
        family = EntryFamily(match[1])
        rows, length = (int(number) if number else None for number in match.group(2, 3))
        is_decode = family in (EntryFamily.DECODE, EntryFamily.DECODE_LOOP, EntryFamily.DRAFT)
        entry = cls(family, rows, 1 if is_decode else length)
        return entry if entry.name == name else None

    @property
    def name(self) -> str:
        if self.family is EntryFamily.EXTEND:
            return "extend" if self.length is None else f"extend_t{self.length}"
        name = f"{self.family}_bs{self.rows}"
        is_static = self.family is EntryFamily.PREFILL and self.length is not None
        return f"{name}_s{self.length}" if is_static else name

    def entry_class(self, *, is_one_launch: bool = False) -> EntryClass:
        if is_one_launch:
            return EntryClass.ONE_LAUNCH
        if not self.takes_slabs:
            return EntryClass.ROWS
        return EntryClass.DYNAMIC if self.length is None else EntryClass.STATIC

    @property
    def bucket_tokens(self) -> int | None:
        """The number of tokens that a static entry computes, padding included; None for other classes."""
        return None if self.length is None else self.length * (self.rows or 1)

    @property
    def takes_slabs(self) -> bool:
        """Whether the slabs of the cache follow the other arguments."""
        return self.layout() not in ROW_LAYOUTS

    @property
    def returns_token_ids(self) -> bool:
        """Whether the entry draws tokens, so that its first result is token IDs."""
        layout = self.layout()
        return layout in LOOP_LAYOUTS or layout in (Layout.SAMPLE, Layout.ADJUSTED_SAMPLE)

    def layout(self, tokens_rank: int | None = None) -> Layout:
        """Return the layout. An `extend` is padded if `tokens_rank`, the rank of argument `tokens`, is 2."""
        if self.family is EntryFamily.EXTEND:
            return Layout.PREFILL if tokens_rank == 2 else Layout.PACKED
        if self.family is EntryFamily.DECODE_LOOP:
            return Layout.LOOP
        return Layout(self.family.value)

    def argument_shapes(
        self,
        tokens_rank: int | None = None,
        *,
        has_prefill_position: bool = True,
        has_windows: bool = False,
        takes_followers: bool = False,
        takes_hidden: bool = False,
    ) -> dict[str, tuple[int | None, ...]]:
        """Return the shapes of the arguments before the slabs, by name, in order. None is a dynamic size."""
        layout = self.layout(tokens_rank)
        shapes = {
            "tokens": _tokens_shape(layout, self.rows, self.length),
            **dict.fromkeys(BLOCK_TABLES, (self.rows, None)),
            "sampling": (len(SamplingField), self.rows),
            "penalties": (len(PenaltyField), self.rows),
            "edits": (len(EditField), None),
            "allowed": (None, None),
            **dict.fromkeys(_RESULTS, (None, 1, None)),
            "last_tokens": (None,),
            "counts": (None, None),
            "hidden_states": (None, None),
        }
        names = argument_names(
            layout,
            has_prefill_position=has_prefill_position,
            has_windows=has_windows,
            takes_followers=takes_followers,
            takes_hidden=takes_hidden,
        )
        return {name: shapes.get(name, (self.rows,)) for name in names}

    def named_results(self, results: Sequence[_T], top_k: int | None) -> dict[str, _T]:
        """Return this entry's results by name. `top_k` is config.json's; with None there are only logits."""
        if self.family is EntryFamily.LOGPROBS:
            return dict(zip(LOGPROB_RESULTS, results, strict=False))
        if not self.returns_token_ids:
            return named_results(results, top_k)
        return {**dict(zip((TOKEN_IDS,), results, strict=False)), **named_results(results[1:], top_k)}


def _tokens_shape(layout: Layout, rows: int | None, length: int | None) -> tuple[int | None, ...]:
    if layout in LOOP_LAYOUTS:
        return (rows,)
    return (length,) if layout is Layout.PACKED else (rows, length)


def argument_names(
    layout: Layout,
    *,
    has_prefill_position: bool = True,
    has_windows: bool = False,
    takes_followers: bool = False,
    takes_hidden: bool = False,
) -> tuple[str, ...]:
    """Return the names of the arguments before the slabs, in order.

    `has_prefill_position`: prefills take start positions. `has_windows`: window pages have their own slab and
    block table. `takes_followers`: packed `extend` entries take `followers`. `takes_hidden`: the model has a
    draft layer.
    """
    names = _ARGUMENTS[layout]
    if takes_hidden and layout not in ROW_LAYOUTS:
        names = (*names, *(name for name in _HIDDEN if layout not in LOOP_LAYOUTS or name != "hidden_to"))
    if takes_followers and layout is Layout.PACKED:
        after = names.index("last_tokens")
        names = (*names[:after], "followers", *names[after:])
    if layout is Layout.PREFILL and not has_prefill_position:
        names = tuple(name for name in names if name != "start_positions")
    if not has_windows or BLOCK_TABLES[0] not in names:
        return names
    after = names.index(BLOCK_TABLES[0]) + 1
    return (*names[:after], BLOCK_TABLES[1], *names[after:])


def named_results(results: Sequence[_T], top_k: int | None) -> dict[str, _T]:
    """Return the results, by name, of an entry that does not draw tokens; only logits if `top_k` is None."""
    return dict(zip(_RESULTS[2:] if top_k is None else _RESULTS, results, strict=False))


def hidden_row(slot: int, position: int) -> int:
    """Return the row of `hidden_states` for the token at `position` of the request in `slot`.

    A request with a negative slot has none.
    """
    return NO_HIDDEN if slot < 0 else 1 + slot * HIDDEN_PER_SLOT + position % HIDDEN_PER_SLOT


def drafted_place(num_slots: int, slot: int, position: int) -> int:
    """Return the index in `last_tokens` of the token drafted for a position of the request in `slot`.

    The first `num_slots` of the table have the last tokens of requests.
    """
    return num_slots + slot * HIDDEN_PER_SLOT + position % HIDDEN_PER_SLOT


def chosen_place(num_slots: int, slot: int, position: int) -> int:
    """Return the index of the token that the model has chosen, like `drafted_place`."""
    return drafted_place(num_slots, num_slots + slot, position)


def num_places(num_slots: int) -> int:
    """Return the size of `last_tokens` for `num_slots` requests."""
    return drafted_place(num_slots, 2 * num_slots, 0)
