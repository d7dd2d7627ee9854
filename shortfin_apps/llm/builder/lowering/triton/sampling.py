"""Sampling in Triton: from the top-k candidates, or from all logits of a sequence (a whole row)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Constexpr, Kernel, Tiles, Tuning
from shortfin_apps.llm.builder.kernels.interface import Buffer, Interface, buffer
from shortfin_apps.llm.builder.kernels.triton.adjusting import adjust_rows, edit_tokens
from shortfin_apps.llm.builder.kernels.triton.logprobs import sum_parts, write_terms
from shortfin_apps.llm.builder.kernels.triton.row_sampling import weigh_parts
from shortfin_apps.llm.builder.kernels.triton.sampling import draw
from shortfin_apps.llm.builder.lowering.lowering import (
    AdjustedRows,
    ChosenRows,
    Drawn,
    DrawState,
    LeftRows,
    LogprobTensors,
    LoweringContext,
)
from shortfin_apps.llm.builder.lowering.triton.launch import Launcher
from shortfin_apps.llm.builder.lowering.triton.tiles import power_of_two
from shortfin_apps.llm.contract.abi import EditField, PenaltyField, SamplingField, TermField

EDITS = 128  # edits per workgroup
PART = 1024  # logits of a row per workgroup; AMD GPUs do not have scalar registers to search more at once
WAVES = 4  # waves of a workgroup that samples a row's token

_OF_ROWS = buffer("i64", "rows")


class TritonSampling:
    """Sample kernels for GPUs."""

    draws_rows = True

    def __init__(self, context: LoweringContext) -> None:
        self._kernels = SamplingKernels(context.spec.vocab_size, context.options.top_k)
        self._launcher = Launcher(context.target, context.rendered)

    def sample(self, e: Emitter, rows: LeftRows, state: DrawState, *, advances: bool) -> Drawn:
        drawn_from = {
            "rows": state.slots.shape[0],
            "values": rows.values,
            "logits": rows.logits,
            "row_indices": rows.row_indices,
            "sampling": state.sampling,
        }
        operands = {
            **drawn_from,
            "masses": self._launcher.launch(e, self._kernels.weigh_parts(), drawn_from)["masses"],
            "indices": rows.indices,
            "slots": state.slots,
            "positions": state.positions,
            "last_tokens": state.last_tokens,
            "counts": state.counts,
        }
        made = self._launcher.launch(e, self._kernels.draw(advances=advances), operands)
        token_ids = made.pop("token_ids")
        return token_ids, replace(state, **made)

    def adjust(self, e: Emitter, rows: AdjustedRows) -> tuple[Tensor, Tensor]:
        operands = {
            "rows": rows.row_indices.shape[0],
            "logits": rows.logits,
            "row_indices": rows.row_indices,
            "allowed": rows.allowed,
            "allowed_indices": rows.allowed_indices,
            "penalties": rows.penalties,
            "slots": rows.slots,
            "resets": rows.resets,
            "counts": rows.counts,
        }
        made = self._launcher.launch(e, self._kernels.adjust_rows(), operands)
        edited = {**operands, "num_edits": rows.edits.shape[1], "edits": rows.edits, **made}
        made = self._launcher.launch(e, self._kernels.edit_tokens(), edited)
        return made["adjusted"], made["counts"]

    def logprobs(self, e: Emitter, rows: ChosenRows) -> LogprobTensors:
        chosen = {
            "rows": rows.slots.shape[0],
            "values": rows.values,
            "logits": rows.logits,
            "row_indices": rows.row_indices,
            "slots": rows.slots,
            "last_tokens": rows.last_tokens,
        }
        summed = {
            **chosen,
            "indices": rows.indices,
            "sums": self._launcher.launch(e, self._kernels.sum_parts(), chosen)["sums"],
        }
        return LogprobTensors(**self._launcher.launch(e, self._kernels.write_terms(), summed))


class SamplingKernels:
    """Creates the kernels that sample a token from each row of `size` logits; `k`: top-k candidates per row.

    The functions in kernels/triton/ describe the operands.
    """

    _ADJUSTED = ("logits", "row_indices", "allowed", "allowed_indices", "penalties", "slots")

    def __init__(self, size: int, k: int) -> None:
        self._size = size
        self._k = k
        self._parts = parts = -(-size // PART)
        self._reads = {
            "values": buffer("f32", "rows", k),
            "indices": buffer("i64", "rows", k),
            "logits": buffer("f32", "rows", size),
            "row_indices": _OF_ROWS,
            "masses": buffer("i64", "rows", 2, parts),
            "sampling": buffer("i64", len(SamplingField), "rows"),
            "slots": _OF_ROWS,
            "last_tokens": buffer("i64", "any"),
            "sums": buffer("i64", "rows", 2, parts),
            "positions": _OF_ROWS,
            "allowed": buffer("i32", "rows", -(-size // 32)),
            "allowed_indices": _OF_ROWS,
            "edits": buffer("i32", len(EditField), "num_edits"),
            "penalties": buffer("f32", len(PenaltyField), "rows"),
            "resets": _OF_ROWS,
            "counts": buffer("i32", "any", size),
        }
        self._adjusts = {"counts": self._reads["counts"], "adjusted": self._reads["logits"]}
        self._sizes: dict[str, Constexpr] = {"SIZE": size, "PART": PART, "PARTS": parts, "K": k}

    def weigh_parts(self) -> Kernel:
        return Kernel(
            name="weigh_parts",
            function=weigh_parts,
            interface=self._interface(
                ("values", "logits", "row_indices", "sampling"), {"masses": self._reads["masses"]}
            ),
            constexprs=self._sizes,
            grid=[Tiles("rows"), self._parts],
            tuning=Tuning(num_waves=4),
        )

    def draw(self, *, advances: bool) -> Kernel:
        """Return the kernel that draws tokens; in a decode loop, it advances the positions, too."""
        rounded = {"PARTS_BLOCK": power_of_two(self._parts), "BLOCK": power_of_two(self._k)}
        reads: Sequence[str] = ("values", "indices", "logits", "row_indices", "masses", "sampling", "slots")
        writes = {**{name: self._reads[name] for name in ("last_tokens", "counts")}, "token_ids": _OF_ROWS}
        if advances:
            writes = {"positions": _OF_ROWS, **writes}
        else:
            reads = (*reads, "positions")
        return Kernel(
            name="draw_and_advance" if advances else "draw",
            function=draw,
            interface=self._interface(reads, writes),
            constexprs={**self._sizes, **rounded, "ADVANCES": advances},
            grid=[Tiles("rows")],
            tuning=Tuning(num_waves=WAVES),
        )

    def adjust_rows(self) -> Kernel:
        return Kernel(
            name="adjust_rows",
            function=adjust_rows,
            interface=self._interface((*self._ADJUSTED, "resets"), self._adjusts),
            constexprs={"SIZE": self._size, "PART": PART, "WORDS": -(-self._size // 32)},
            grid=[Tiles("rows"), self._parts],
            tuning=Tuning(num_waves=4, fuses_products=False),
        )

    def edit_tokens(self) -> Kernel:
        reads = (*self._ADJUSTED, "edits")
        return Kernel(
            name="edit_tokens",
            function=edit_tokens,
            interface=Interface(
                ("rows", "num_edits"), {name: self._reads[name] for name in reads}, self._adjusts
            ),
            constexprs={"SIZE": self._size, "WORDS": -(-self._size // 32), "BLOCK": EDITS},
            grid=[Tiles("num_edits", EDITS)],
            tuning=Tuning(num_waves=4, fuses_products=False),
        )

    def sum_parts(self) -> Kernel:
        reads = ("values", "logits", "row_indices", "slots", "last_tokens")
        return Kernel(
            name="sum_parts",
            function=sum_parts,
            interface=Interface(
                (), {name: self._reads[name] for name in reads}, {"sums": self._reads["sums"]}
            ),
            constexprs=self._sizes,
            grid=[Tiles("rows"), self._parts],
            tuning=Tuning(num_waves=4),
        )

    def write_terms(self) -> Kernel:
        rounded = {"PARTS_BLOCK": power_of_two(self._parts), "BLOCK": power_of_two(self._k)}
        reads = ("values", "indices", "logits", "row_indices", "slots", "last_tokens", "sums")
        writes = {
            "terms": buffer("i64", len(TermField), "rows"),
            "top_values": self._reads["values"],
            "top_indices": self._reads["indices"],
        }
        sizes = {name: size for name, size in self._sizes.items() if name != "PART"}
        return Kernel(
            name="write_terms",
            function=write_terms,
            interface=self._interface(reads, writes),
            constexprs={**sizes, **rounded},
            grid=[Tiles("rows")],
            tuning=Tuning(num_waves=1),
        )

    def _interface(self, reads: Sequence[str], writes: dict[str, Buffer]) -> Interface:
        return Interface(("rows",), {name: self._reads[name] for name in reads}, writes)
