"""Finds the tokens and positions of a `draft` entry's rows on the device (contract/abi.py), in linalg."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shortfin_apps.llm.builder.graph.emitter import Dim, Emitter, Tensor
from shortfin_apps.llm.contract.abi import DRAFTED, GIVEN, HIDDEN_PER_SLOT

_PLACES = HIDDEN_PER_SLOT
_KEPT = "1"  # as `hidden_from`: any row but NO_HIDDEN


class _Table(NamedTuple):
    """`last_tokens`, with the SSA names of its first `drafted_place` and `chosen_place`."""

    tokens: Tensor
    drafted: str
    chosen: str


class DraftRows(NamedTuple):
    """The rows of a `draft`, each tensor [rows] i64; a padding row has a negative position."""

    tokens: Tensor
    positions: Tensor
    hidden_from: Tensor  # NO_HIDDEN, or any other value
    places: Tensor  # indices of `last_tokens` where the drawn tokens are stored


def draft_rows(e: Emitter, inputs: Mapping[str, Tensor], known: Tensor, hidden_count: Dim) -> DraftRows:
    """Return the rows of a `draft` with the arguments `inputs`.

    `known` is `last_tokens`, as it was before the invocation; `hidden_count` the number of rows of
    `hidden_states`, from which the number of slots follows.
    """
    slots, checked = inputs["slots"], inputs["checked"]
    rows = e.value(f"arith.index_cast {e.index(hidden_count)} : index to i64")
    after_none = e.value(f"arith.subi {rows}, {e.value('arith.constant 1 : i64')} : i64")
    per_slot = e.value(f"arith.constant {_PLACES} : i64")
    num_slots = e.value(f"arith.divsi {after_none}, {per_slot} : i64")
    num_drafted = e.value(f"arith.muli {num_slots}, {per_slot} : i64")
    table = _Table(known, num_slots, e.value(f"arith.addi {num_slots}, {num_drafted} : i64"))

    def of_rows(ins: Sequence[Tensor], body: str) -> Tensor:
        text = f"{_CONSTANTS}\n{body}\n  linalg.yield %y : i64"
        return e.elementwise("n", ("n", slots.shape, "i64"), [(each, "n") for each in ins], text)

    positions = of_rows([inputs["positions"], slots, checked], _moved(table))
    tokens = of_rows([inputs["tokens"], slots, checked, positions], _token(table))
    hidden_from = of_rows(
        [inputs["hidden_from"], checked],
        f"""\
  %kept = arith.constant {_KEPT} : i64
  %is_given = arith.cmpi eq, %b, %given : i64
  %y = arith.select %is_given, %a, %kept : i64""",
    )
    places = of_rows(
        [slots, positions],
        f"""\
  %next = arith.addi %b, %one : i64
{_place("place", "%a", "%next", table.drafted)}
  %has_slot = arith.cmpi sge, %a, %zero : i64
  %y = arith.select %has_slot, %place, %given : i64""",
    )
    return DraftRows(tokens, positions, hidden_from, places)


_CONSTANTS = f"""\
  %zero = arith.constant 0 : i64
  %one = arith.constant 1 : i64
  %given = arith.constant {GIVEN} : i64
  %drafted = arith.constant {DRAFTED} : i64
  %per_slot = arith.constant {_PLACES} : i64
  %mask = arith.constant {_PLACES - 1} : i64"""


def _moved(table: _Table) -> str:
    """Return MLIR that sets %y to the position of a row's token: %a, or another if tokens were checked.

    The first token that was chosen otherwise than drafted is one position after the equal ones before it.
    """
    return f"""\
  %count = scf.for %i = %one to %per_slot step %one iter_args(%right = %zero) -> (i64) : i64 {{
  %at = arith.addi %a, %i : i64
{_tokens_at("%at", table)}
  %same = arith.cmpi eq, %token_drafted, %token_chosen : i64
  %is_checked = arith.cmpi sge, %c, %i : i64
  %more = arith.addi %right, %one : i64
  %all_before = arith.cmpi eq, %more, %i : i64
  %is_right = arith.andi %same, %is_checked : i1
  %counts = arith.andi %is_right, %all_before : i1
  %now = arith.select %counts, %more, %right : i64
  scf.yield %now : i64
  }}
  %after = arith.addi %a, %one : i64
  %new = arith.addi %after, %count : i64
  %moves = arith.cmpi sge, %c, %zero : i64
  %is_row = arith.cmpi sge, %a, %zero : i64
  %is_moved = arith.andi %moves, %is_row : i1
  %y = arith.select %is_moved, %new, %a : i64"""


def _token(table: _Table) -> str:
    """Return MLIR that sets %y to a row's token: %a, or the one drafted or chosen for its position."""
    return f"""\
{_tokens_at("%d", table)}
  %is_drafted = arith.cmpi eq, %c, %drafted : i64
  %is_chosen = arith.cmpi sge, %c, %zero : i64
  %is_row = arith.cmpi sge, %d, %zero : i64
  %uses_chosen = arith.andi %is_chosen, %is_row : i1
  %first = arith.select %is_drafted, %token_drafted, %a : i64
  %y = arith.select %uses_chosen, %token_chosen, %first : i64"""


def _tokens_at(position: str, table: _Table) -> str:
    """Return MLIR that sets %token_drafted and %token_chosen to the tokens of slot %b for a position."""
    return "\n".join(
        f"""\
{_place(f"place_{kind}", "%b", position, first)}
  %index_{kind} = arith.index_cast %place_{kind} : i64 to index
  %token_{kind} = tensor.extract {table.tokens.name}[%index_{kind}] : {table.tokens.type}"""
        for kind, first in (("drafted", table.drafted), ("chosen", table.chosen))
    )


def _place(name: str, slot: str, position: str, first: str) -> str:
    """Return MLIR that sets %{name} to the place of a position; `first` is the first place of its kind.

    A negative slot counts as slot 0.
    """
    return f"""\
  %{name}.slot = arith.maxsi {slot}, %zero : i64
  %{name}.of_slot = arith.muli %{name}.slot, %per_slot : i64
  %{name}.ring = arith.andi {position}, %mask : i64
  %{name}.ring_start = arith.addi {first}, %{name}.of_slot : i64
  %{name} = arith.addi %{name}.ring_start, %{name}.ring : i64"""
