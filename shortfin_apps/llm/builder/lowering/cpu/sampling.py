"""Draws of tokens, adjustments of logits and terms of log-probabilities, as hand-written CPU kernels."""

from __future__ import annotations

from dataclasses import replace

from shortfin_apps.llm.builder.graph.emitter import Dim, Emitter, Tensor
from shortfin_apps.llm.builder.kernels.cpu.draw import AdjustGeometry, DrawGeometry, LogprobGeometry
from shortfin_apps.llm.builder.lowering.dispatch import dispatch
from shortfin_apps.llm.builder.lowering.lowering import (
    AdjustedRows,
    ChosenRows,
    Drawn,
    DrawState,
    Kernels,
    LeftRows,
    LogprobTensors,
)


class VectorSampling(Kernels):
    """Sample kernels for any CPU, with or without top-k."""

    draws_rows = True

    def sample(self, e: Emitter, rows: LeftRows, state: DrawState, *, advances: bool) -> Drawn:
        [num_rows] = state.slots.shape
        geometry = DrawGeometry(
            self._spec.vocab_size,
            self._options.top_k,
            is_indexed=rows.row_indices is not None,
            advances=advances,
            counts=state.counts is not None,
        )
        name = "draw_and_advance" if advances else "draw_left" if geometry.is_indexed else "draw"
        name += "_and_count" if geometry.counts else ""
        kernel = self._render("cpu/draw", name, g=geometry)
        operands: dict[str, Dim | Tensor] = {
            "rows": num_rows,
            "left": rows.values.shape[0],
            "table": state.last_tokens.shape[0],
            "values": rows.values,
            "indices": rows.indices,
            "logits": rows.logits,
            "sampling": state.sampling,
            "slots": state.slots,
            "positions": state.positions,
            "last_tokens": state.last_tokens,
        }
        if rows.row_indices is not None:
            operands["row_indices"] = rows.row_indices
        if state.counts is not None:
            operands["counts"] = state.counts
        made = dispatch(e, kernel, geometry.interface, [num_rows], operands)
        token_ids = made.pop("token_ids")
        return token_ids, replace(state, **made)

    def adjust(self, e: Emitter, rows: AdjustedRows) -> tuple[Tensor, Tensor]:
        [num_rows] = rows.row_indices.shape
        geometry = AdjustGeometry(self._spec.vocab_size)
        operands: dict[str, Dim | Tensor] = {
            "rows": num_rows,
            "left": rows.logits.shape[0],
            "bitmasks": rows.allowed.shape[0],
            "num_edits": rows.edits.shape[1],
            "table": rows.counts.shape[0],
            "logits": rows.logits,
            "row_indices": rows.row_indices,
            "penalties": rows.penalties,
            "edits": rows.edits,
            "allowed": rows.allowed,
            "allowed_indices": rows.allowed_indices,
            "slots": rows.slots,
            "resets": rows.resets,
            "counts": rows.counts,
        }
        kernel = self._render("cpu/adjust", "adjust", g=geometry)
        made = dispatch(e, kernel, geometry.interface, [num_rows], operands)
        return made["adjusted"], made["counts"]

    def logprobs(self, e: Emitter, rows: ChosenRows) -> LogprobTensors:
        [num_rows] = rows.slots.shape
        geometry = LogprobGeometry(self._spec.vocab_size, self._options.top_k)
        operands: dict[str, Dim | Tensor] = {
            "rows": num_rows,
            "left": rows.logits.shape[0],
            "table": rows.last_tokens.shape[0],
            "values": rows.values,
            "indices": rows.indices,
            "logits": rows.logits,
            "row_indices": rows.row_indices,
            "slots": rows.slots,
            "last_tokens": rows.last_tokens,
        }
        kernel = self._render("cpu/logprobs", "logprobs", g=geometry)
        made = dispatch(e, kernel, geometry.interface, [num_rows], operands)
        return LogprobTensors(**made)
