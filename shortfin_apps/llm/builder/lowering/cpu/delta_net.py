"""Gated delta nets as a hand-written vector kernel for any CPU; only this kernel reads its state pages."""

from __future__ import annotations

from dataclasses import replace

from shortfin_apps.llm.builder.graph.batch import Batch
from shortfin_apps.llm.builder.graph.emitter import Dim, Emitter, Tensor
from shortfin_apps.llm.builder.kernels.cpu.delta_net import DeltaNetGeometry
from shortfin_apps.llm.builder.lowering.dispatch import dispatch
from shortfin_apps.llm.builder.lowering.lowering import Kernels, LoweringContext
from shortfin_apps.llm.model.delta_net import DeltaRule


class VectorDeltaNet(Kernels):
    """DeltaRule kernels for any CPU."""

    def __init__(self, context: LoweringContext) -> None:
        super().__init__(context)
        assert self._spec.delta_net
        self._geometry = DeltaNetGeometry(
            net=self._spec.delta_net,
            layers=len(self._spec.pools["state"]),
            stride=self._options.block_seq_stride,
            eps=self._spec.rms_norm_eps,
            dtype=self._options.activations,
        )

    def delta_rule(self, e: Emitter, operation: DeltaRule, x: Tensor, rates: Tensor, batch: Batch) -> Tensor:
        geometry, name = self._geometry, "delta_net"
        operands: dict[str, Dim | Tensor] = {
            "tokens": batch.tokens,
            "rows": batch.rows,
            "width": batch.width,
            "pages": batch.pages,
            "layer": batch.place_of(operation.layer),
            "mixed": x,
            "rates": rates,
            "conv": self._weights.load_one(e, operation.conv),
            "steps": self._weights.load_one(e, operation.steps),
            "norm": self._weights.load_one(e, operation.norm),
            "offsets": batch.offsets,
            "starts": batch.starts,
            "seq_lens": batch.seq_lens,
            "blocks": batch.blocks,
            "cache": batch.cache,
        }
        if batch.followers is not None:
            geometry, name = replace(geometry, has_followers=True), "delta_net_with_followers"
            operands["followers"] = batch.followers
        kernel = self._render("cpu/delta_net", name, g=geometry)
        written = dispatch(e, kernel, geometry.interface, [batch.rows], operands)
        batch.cache = written["cache"]
        return written["out"]
