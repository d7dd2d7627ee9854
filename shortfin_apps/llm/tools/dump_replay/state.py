"""State of a replay: a dump's requests, the tokens that its pages hold, and the arguments of its draws."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.components.kvcache.lease import Lease
from shortfin_apps.llm.components.recorder.dump_file import DumpError
from shortfin_apps.llm.components.recorder.records import Array, Draw, KnownRequest, Logprobs, Pages, Task
from shortfin_apps.llm.components.request.messages import GenerateCall
from shortfin_apps.llm.components.request.request import Request, TokenCounts
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.components.runtime.device import DeviceBuffer
from shortfin_apps.llm.components.sampling.row_edits import RowEdits, words_of
from shortfin_apps.llm.contract.abi import KEPT, EditField, PenaltyField, SamplingField

_SAMPLE = {"row_indices": "<i8", "slots": "<i8", "positions": "<i8", "sampling": "<i8"}
_LOGPROBS = {"row_indices": "<i8", "slots": "<i8"}
_ADJUSTED = {
    **dict.fromkeys(("edits", "allowed"), "<i4"),
    **dict.fromkeys(("allowed_indices", "resets"), "<i8"),
    "penalties": "<f4",
}

Values = npt.NDArray[Any]


def check_tokens(task: Task, vocab_size: int | None) -> None:
    """Raise DumpError for tokens outside of the model's vocabulary."""
    least, most = min(task.token_ids), max(task.token_ids)
    if least < 0 or (vocab_size is not None and most >= vocab_size):
        wrong = least if least < 0 else most
        raise DumpError(f"token {wrong} is not in the model's vocabulary of {vocab_size}")


def is_unknown(task: Task) -> bool:
    """Whether the task's token was not known to the server's host when it queued the task."""
    return len(task.token_ids) == 1 and task.token_ids[0] < 0


def draw_arguments(record: Draw, results: Mapping[str, DeviceBuffer]) -> dict[str, Values]:
    """Return the recorded arguments of a draw from a batch's `results`, by name.

    Raises DumpError if an argument does not fit the results.
    """
    arrays = _arrays(record, _SAMPLE | _ADJUSTED if "edits" in record.arguments else _SAMPLE)
    rows, vocab_size = results["logits"].shape[0], results["logits"].shape[-1]
    num_draws = arrays["positions"].size
    is_valid = (
        arrays["positions"].shape == arrays["row_indices"].shape == arrays["slots"].shape == (num_draws,)
        and arrays["sampling"].shape == (len(SamplingField), num_draws)
        and _within(arrays["row_indices"], 0, rows)
    )
    if is_valid and "edits" in arrays:
        is_valid = _are_valid_edits(arrays, num_draws, vocab_size)
    if not is_valid or record.num_draws > num_draws:
        raise DumpError(f"record {record.number} draws from rows or tokens that are not there")
    return arrays


def lacks_counts(arrays: Mapping[str, Values], row: int) -> bool:
    """Return whether the edits of a draw lack counts of its row, because the server's table had them."""
    if "edits" not in arrays or arrays["slots"][row] < 0 or arrays["resets"][row]:
        return False
    return not np.array_equal(arrays["penalties"][:, row], RowEdits().penalties)


def with_counts(
    arrays: Mapping[str, Values], row: int, token_ids: Sequence[int], vocab_size: int
) -> dict[str, Values]:
    """Return the arguments of a draw with the counts of `token_ids`, all tokens of the row, in its edits."""
    seen = TokenCounts(int(arrays["sampling"][SamplingField.PROMPT_LENGTH, row]))
    seen.catch_up(token_ids)
    edits = arrays["edits"]
    is_its = edits[EditField.ROW] == row
    biases = dict(edits[[EditField.TOKEN_ID, EditField.BIAS]][:, is_its].T.tolist())
    counts = {each: n for each, n in zip(seen.token_ids, seen.counts, strict=True) if 0 <= each < vocab_size}
    own = np.array(
        [(row, each, biases.get(each, 0), counts.get(each, KEPT)) for each in {**counts, **biases}], np.int32
    )
    return {**arrays, "edits": np.concatenate([edits[:, ~is_its], own.T], axis=1)}


def without_slots(arrays: Mapping[str, Values]) -> dict[str, Values]:
    """Return the arguments with slots of -1, because a replay keeps no tables by slot."""
    return {**arrays, "slots": np.full_like(arrays["slots"], -1)}


def logprob_arguments(record: Logprobs, results: Mapping[str, DeviceBuffer]) -> dict[str, Values]:
    """Return the recorded arguments of a `logprobs` entry, like `draw_arguments`, but without slots.

    The replay thus computes no terms of the rows' tokens, only of the rows.
    """
    arrays = _arrays(record, _LOGPROBS)
    num_rows, rows = arrays["row_indices"].size, results["logits"].shape[0]
    is_valid = arrays["row_indices"].shape == arrays["slots"].shape == (num_rows,)
    if not is_valid or not _within(arrays["row_indices"], 0, rows) or record.num_rows > num_rows:
        raise DumpError(f"record {record.number} reads rows that are not there")
    return without_slots(arrays)


def _arrays(record: Draw | Logprobs, dtypes: Mapping[str, str]) -> dict[str, Values]:
    """Return the recorded arguments by name. Raises DumpError unless they have these names and dtypes."""
    if set(record.arguments) != set(dtypes):
        raise DumpError(f"record {record.number} has other arguments than its entry takes")
    return {name: _array(record, record.arguments[name], dtype) for name, dtype in dtypes.items()}


def _are_valid_edits(arrays: dict[str, Values], num_draws: int, vocab_size: int) -> bool:
    edits, allowed = arrays["edits"], arrays["allowed"]
    return (
        edits.ndim == 2
        and edits.shape[0] == len(EditField)
        and _within(edits[EditField.ROW], -1, num_draws)
        and _within(edits[EditField.TOKEN_ID][edits[EditField.ROW] >= 0], 0, vocab_size)
        and allowed.ndim == 2
        and allowed.shape[1] == words_of(vocab_size)
        and _within(arrays["allowed_indices"], -1, len(allowed))
        and arrays["penalties"].shape == (len(PenaltyField), num_draws)
        and arrays["allowed_indices"].shape == arrays["resets"].shape == (num_draws,)
    )


def _within(array: Values, least: int, end: int) -> bool:
    return not array.size or bool(array.min() >= least and array.max() < end)


def _array(record: Draw | Logprobs, array: Array, dtype: str) -> Values:
    try:
        if array.dtype != dtype:
            raise ValueError(f"it is of {array.dtype}")
        return np.frombuffer(array.data, dtype).reshape([int(size) for size in array.shape])
    except ValueError as error:
        raise DumpError(f"record {record.number} has a malformed argument ({error})") from None


UNKNOWN_TOKEN = -1  # not a token id of any request


class Held(Enum):
    """Whether a page holds the tokens that a request expects."""

    SAME = "same"
    OTHER = "other"
    UNKNOWN = "unknown"


@dataclass(slots=True)
class _Content:
    """The tokens of a page. `before`: digest of the sequence's earlier tokens; None if the page is inexact.

    A page is inexact if it was computed from pages with unknown contents.
    """

    before: bytes | None
    token_ids: list[int]


class KnownPages:
    """The tokens that the replay wrote to each page of `stride` tokens.

    `is_exact` is for pages of states. A state depends on all tokens of its page, so the page must hold
    exactly the expected tokens. A KV page may hold more tokens than expected.
    """

    def __init__(self, stride: int, *, is_exact: bool = False) -> None:
        self._stride = stride
        self._is_exact = is_exact
        self._pages: dict[int, _Content] = {}

    def held(self, page_ids: Sequence[int], token_ids: Sequence[int], first: int) -> list[tuple[int, Held]]:
        """Return each block (page of the sequence) from `first` on, with what its page holds."""
        stride = self._stride
        found = []
        for block, digest in enumerate(_digests(token_ids, stride)):
            expected = token_ids[block * stride : (block + 1) * stride]
            if block >= first:
                found.append((block, self._compare(page_ids[block], digest, expected)))
        return found

    def _compare(self, page_id: int, before: bytes, expected: Sequence[int]) -> Held:
        content = self._pages.get(page_id)
        if content is None or content.before is None:
            return Held.UNKNOWN
        held = content.token_ids if self._is_exact else content.token_ids[: len(expected)]
        return Held.SAME if content.before == before and held == list(expected) else Held.OTHER

    def wrote(self, page_ids: Sequence[int], token_ids: Sequence[int], start: int, *, is_known: bool) -> None:
        """Record that the tokens from `start` on were written.

        `is_known` is False if they were computed from pages with unknown contents.
        """
        stride = self._stride
        for block in range(start // stride, -(-len(token_ids) // stride)):
            begin = block * stride
            before = _digest(token_ids[:begin]) if is_known else None
            self._pages[page_ids[block]] = _Content(before, list(token_ids[begin : begin + stride]))

    def forget(self, page_ids: Iterable[int]) -> None:
        """Forget the contents of pages, which were zeroed."""
        for page_id in page_ids:
            self._pages.pop(page_id, None)


def _digest(token_ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(np.asarray(token_ids, np.int64).tobytes(), digest_size=16).digest()


def _digests(token_ids: Sequence[int], stride: int) -> Iterator[bytes]:
    """Yield, for each block of `stride` tokens, a digest of all tokens before it."""
    sum_ = hashlib.blake2b(digest_size=16)
    for begin in range(0, len(token_ids), stride):
        yield sum_.copy().digest()
        sum_.update(np.asarray(token_ids[begin : begin + stride], np.int64).tobytes())


class ReplayedRequests:
    """The dump's requests, by number.

    `unchecked` are the numbers of requests whose pages may have to be recomputed before the next task.
    """

    def __init__(self, known: Sequence[KnownRequest]) -> None:
        self._requests = {each.number: _request(each) for each in known}
        self.unchecked = set(self._requests)

    def __getitem__(self, number: int) -> Request:
        return self._requests[number]

    def change(self, pages: Sequence[Pages]) -> None:
        """Apply recorded changes of block tables. Raises DumpError if one would leave a gap."""
        for each in pages:
            request = self._requests[each.request]
            assert request.lease is not None, "it was given one"
            if not each.offset and not each.is_window:
                has_windows = request.lease.window_page_ids is not None
                request.lease = Lease([], [] if has_windows else None)
                self.unchecked.add(each.request)
            table = request.lease.window_page_ids if each.is_window else request.lease.page_ids
            if table is None or each.offset > len(table):
                raise DumpError(f"request {each.request} has a block table with a gap")
            if each.is_window and each.offset < len(table):  # a replaced table is another list (lease.py)
                table = request.lease.window_page_ids = list(table)
            table[each.offset :] = each.page_ids

    def tokens(self, number: int, end: int) -> list[int]:
        """Return a request's first `end` tokens. Raises DumpError if the dump has fewer."""
        token_ids = self._requests[number].token_ids
        if end > len(token_ids):
            raise DumpError(f"request {number} has no token at position {len(token_ids)}")
        return token_ids[:end]


def _request(known: KnownRequest) -> Request:
    call = GenerateCall(
        request_id=known.request_id,
        prompt_token_ids=tuple(known.token_ids),
        params=SamplingParams(max_tokens=1),
    )
    request = Request(call, arrival_s=known.arrival_s)
    windows = known.window_page_ids
    request.slot = -1
    request.lease = Lease(list(known.page_ids), None if windows is None else list(windows))
    return request
