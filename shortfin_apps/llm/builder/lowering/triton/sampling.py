"""Sampling in Triton: from the top-k candidates, or from all logits of a sequence (a whole row)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Constexpr, Kernel, Tiles, Tuning
from shortfin_apps.llm.builder.kernels.interface import Buffer, Interface, buffer
from shortfin_apps.llm.builder.kernels.triton.adjusting import allow_tokens, draw_adjusted, edit_tokens
from shortfin_apps.llm.builder.kernels.triton.row_sampling import draw_rows, weigh_parts
from shortfin_apps.llm.builder.kernels.triton.sampling import sample
from shortfin_apps.llm.builder.lowering.lowering import AdjustedRows, LeftRows, LoopState, LoweringContext
from shortfin_apps.llm.builder.lowering.triton.launch import Launcher, Operands
from shortfin_apps.llm.builder.lowering.triton.tiles import power_of_two
from shortfin_apps.llm.contract.abi import EditField, PenaltyField, SamplingField

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

    def sample(
        self, e: Emitter, values: Tensor, indices: Tensor, logits: Tensor, state: LoopState
    ) -> tuple[Tensor, LoopState]:
        drawn_from = {
            "rows": values.shape[0],
            "values": values,
            "logits": logits,
            "sampling": state.sampling,
        }
        operands = {
            **drawn_from,
            "masses": self._weigh(e, {**drawn_from, "row_indices": None}),
            "indices": indices,
            "tokens": state.tokens,
            "positions": state.positions,
        }
        made = self._launcher.launch(e, self._kernels.sample(), operands)
        return made["token_ids"], LoopState(made["tokens"], made["positions"], state.sampling)

    def draw_rows(self, e: Emitter, rows: LeftRows) -> Tensor:
        drawn_from = {
            "rows": rows.row_indices.shape[0],
            "values": rows.values,
            "logits": rows.logits,
            "row_indices": rows.row_indices,
            "sampling": rows.sampling,
        }
        operands = {**drawn_from, "masses": self._weigh(e, drawn_from), "positions": rows.positions}
        return self._launcher.launch(e, self._kernels.draw_rows(), operands)["token_ids"]

    def adjust(self, e: Emitter, rows: AdjustedRows) -> Tensor:
        allowed = {
            "rows": rows.row_indices.shape[0],
            "logits": rows.logits,
            "row_indices": rows.row_indices,
            "allowed": rows.allowed,
            "allowed_indices": rows.allowed_indices,
        }
        edited = {
            "rows": rows.row_indices.shape[0],
            "num_edits": rows.edits.shape[1],
            "edits": rows.edits,
            "penalties": rows.penalties,
            "adjusted": self._launcher.launch(e, self._kernels.allow_tokens(), allowed)["adjusted"],
        }
        return self._launcher.launch(e, self._kernels.edit_tokens(), edited)["adjusted"]

    def draw_adjusted(
        self, e: Emitter, values: Tensor, indices: Tensor, logits: Tensor, rows: AdjustedRows
    ) -> Tensor:
        drawn_from = {
            "rows": values.shape[0],
            "values": values,
            "logits": logits,
            "sampling": rows.sampling,
        }
        operands = {
            **drawn_from,
            "masses": self._weigh(e, {**drawn_from, "row_indices": None}),
            "indices": indices,
            "positions": rows.positions,
        }
        return self._launcher.launch(e, self._kernels.draw_adjusted(), operands)["token_ids"]

    def _weigh(self, e: Emitter, operands: Operands) -> Tensor:
        return self._launcher.launch(e, self._kernels.weigh_parts(), operands)["masses"]


class SamplingKernels:
    """Creates the kernels that sample a token from each row of `size` logits; `k`: top-k candidates per row.

    The functions in kernels/triton/ describe the operands.
    """

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
            "positions": _OF_ROWS,
            "allowed": buffer("i32", "rows", -(-size // 32)),
            "allowed_indices": _OF_ROWS,
            "edits": buffer("i32", len(EditField), "num_edits"),
            "penalties": buffer("f32", len(PenaltyField), "rows"),
        }
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

    def sample(self) -> Kernel:
        writes = dict.fromkeys(("tokens", "positions", "token_ids"), _OF_ROWS)
        return self._of_rows(sample, ("values", "indices", "logits", "masses", "sampling"), writes)

    def draw_rows(self) -> Kernel:
        reads = ("values", "logits", "row_indices", "masses", "sampling", "positions")
        return self._of_rows(draw_rows, reads, {"token_ids": _OF_ROWS})

    def draw_adjusted(self) -> Kernel:
        reads = ("values", "indices", "logits", "masses", "sampling", "positions")
        return self._of_rows(draw_adjusted, reads, {"token_ids": _OF_ROWS})

    def allow_tokens(self) -> Kernel:
        reads = ("logits", "row_indices", "allowed", "allowed_indices")
        return Kernel(
            name="allow_tokens",
            function=allow_tokens,
            interface=Interface(
                (), {name: self._reads[name] for name in reads}, {"adjusted": self._reads["logits"]}
            ),
            constexprs={"SIZE": self._size, "PART": PART, "WORDS": -(-self._size // 32)},
            grid=[Tiles("rows"), self._parts],
            tuning=Tuning(num_waves=4),
        )

    def edit_tokens(self) -> Kernel:
        reads = ("edits", "penalties")
        return Kernel(
            name="edit_tokens",
            function=edit_tokens,
            interface=Interface(
                ("rows", "num_edits"),
                {name: self._reads[name] for name in reads},
                {"adjusted": self._reads["logits"]},
            ),
            constexprs={"SIZE": self._size, "BLOCK": EDITS},
            grid=[Tiles("num_edits", EDITS)],
            tuning=Tuning(num_waves=4, fuses_products=False),
        )

    def _of_rows(self, function: Any, reads: Sequence[str], writes: dict[str, Buffer]) -> Kernel:
        """Return a kernel with one workgroup per row."""
        rounded = {"PARTS_BLOCK": power_of_two(self._parts), "BLOCK": power_of_two(self._k)}
        return Kernel(
            name=function.__name__,
            function=function,
            interface=self._interface(reads, writes),
            constexprs={**self._sizes, **rounded},
            grid=[Tiles("rows")],
            tuning=Tuning(num_waves=WAVES),
        )

    def _interface(self, reads: Sequence[str], writes: dict[str, Buffer]) -> Interface:
        return Interface(("rows",), {name: self._reads[name] for name in reads}, writes)
