"""Finds the tokens and positions of a `draft` entry's rows on the device (contract/abi.py), in linalg."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shortfin_apps.llm.builder.graph.emitter import Dim, Emitter, Tensor
from shortfin_apps.llm.contract.abi import DRAFTED, GIVEN, HIDDEN_PER_SLOT

_PLACES = HIDDEN_PER_SLOT
_KEPT = "1"  # as `hidden_from`: any row but NO_HIDDEN


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
    num_slots = e.value(f"arith.divsi {after_none}, {e.value(f'arith.constant {_PLACES} : i64')} : i64")

    def of_rows(ins: Sequence[Tensor], body: str) -> Tensor:
        text = f"{_CONSTANTS}\n{body}\n  linalg.yield %y : i64"
        return e.elementwise("n", ("n", slots.shape, "i64"), [(each, "n") for each in ins], text)

    positions = of_rows([inputs["positions"], slots, checked], _moved(known, num_slots))
    tokens = of_rows([inputs["tokens"], slots, checked, positions], _token(known, num_slots))
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
{_place("place", "%a", "%next", num_slots)}
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


def _moved(known: Tensor, num_slots: str) -> str:
    """Return MLIR that sets %y to the position of a row's token: %a, or another if tokens were checked.

    The first token that was chosen otherwise than drafted is one position after the equal ones before it.
    """
    lines = ["  %right0 = arith.constant true", "  %count0 = arith.constant 0 : i64"]
    for i in range(_PLACES - 1):
        lines.append(f"""\
  %offset{i} = arith.constant {i + 1} : i64
  %at{i} = arith.addi %a, %offset{i} : i64
{_token_of("drafted", i, known, num_slots)}
{_token_of("chosen", i, known, num_slots)}
  %same{i} = arith.cmpi eq, %token_drafted{i}, %token_chosen{i} : i64
  %is_checked{i} = arith.cmpi sge, %c, %offset{i} : i64
  %counts{i} = arith.andi %same{i}, %is_checked{i} : i1
  %right{i + 1} = arith.andi %right{i}, %counts{i} : i1
  %step{i} = arith.extui %right{i + 1} : i1 to i64
  %count{i + 1} = arith.addi %count{i}, %step{i} : i64""")
    lines.append(f"""\
  %after = arith.addi %a, %one : i64
  %new = arith.addi %after, %count{_PLACES - 1} : i64
  %moves = arith.cmpi sge, %c, %zero : i64
  %is_row = arith.cmpi sge, %a, %zero : i64
  %is_moved = arith.andi %moves, %is_row : i1
  %y = arith.select %is_moved, %new, %a : i64""")
    return "\n".join(lines)


def _token_of(kind: str, i: int, known: Tensor, num_slots: str) -> str:
    """Return MLIR that reads the token that was drafted or chosen for position %at{i} of slot %b."""
    return f"""\
{_place(f"place_{kind}{i}", "%b", f"%at{i}", num_slots, is_chosen=kind == "chosen")}
{_read(f"token_{kind}{i}", f"%place_{kind}{i}", known)}"""


def _token(known: Tensor, num_slots: str) -> str:
    """Return MLIR that sets %y to a row's token: %a, or the one drafted or chosen for its position."""
    return f"""\
{_place("place_drafted", "%b", "%d", num_slots)}
{_read("last_drafted", "%place_drafted", known)}
{_place("place_chosen", "%b", "%d", num_slots, is_chosen=True)}
{_read("last_chosen", "%place_chosen", known)}
  %is_drafted = arith.cmpi eq, %c, %drafted : i64
  %is_chosen = arith.cmpi sge, %c, %zero : i64
  %is_row = arith.cmpi sge, %d, %zero : i64
  %uses_chosen = arith.andi %is_chosen, %is_row : i1
  %first = arith.select %is_drafted, %last_drafted, %a : i64
  %y = arith.select %uses_chosen, %last_chosen, %first : i64"""


def _place(name: str, slot: str, position: str, num_slots: str, *, is_chosen: bool = False) -> str:
    """Return MLIR that sets %{name} to `drafted_place` or `chosen_place`, of slot 0 for a negative slot."""
    base = f"  %{name}.base = arith.addi {num_slots}, %zero : i64"
    if is_chosen:
        base = f"""\
  %{name}.places = arith.muli {num_slots}, %per_slot : i64
  %{name}.base = arith.addi {num_slots}, %{name}.places : i64"""
    return f"""\
{base}
  %{name}.slot = arith.maxsi {slot}, %zero : i64
  %{name}.first = arith.muli %{name}.slot, %per_slot : i64
  %{name}.ring = arith.andi {position}, %mask : i64
  %{name}.of_slots = arith.addi %{name}.base, %{name}.first : i64
  %{name} = arith.addi %{name}.of_slots, %{name}.ring : i64"""


def _read(name: str, place: str, known: Tensor) -> str:
    return f"""\
  %{name}.index = arith.index_cast {place} : i64 to index
  %{name} = tensor.extract {known.name}[%{name}.index] : {known.type}"""
