"""Gated delta nets as a hand-written kernel for any CPU's vectors; only this kernel reads state pages."""

from __future__ import annotations

from shortfin_apps.llm.builder.graph.batch import Batch
from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.kernels import Render
from shortfin_apps.llm.builder.kernels.cpu.delta_net import DeltaNetGeometry
from shortfin_apps.llm.builder.lowering.dispatch import dispatch
from shortfin_apps.llm.builder.weights.parameters import WeightTypes
from shortfin_apps.llm.model.delta_net import DeltaNet, DeltaRule
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec


class VectorDeltaNet:
    """DeltaRule kernels for any CPU."""

    def __init__(
        self, spec: ModelSpec, net: DeltaNet, options: BuildOptions, weights: WeightTypes, render: Render
    ) -> None:
        self._weights = weights
        self._render = render
        self._geometry = DeltaNetGeometry(
            net=net,
            layers=len(spec.pools["state"]),
            stride=options.block_seq_stride,
            eps=spec.rms_norm_eps,
            dtype=options.activations,
        )

    def delta_rule(self, e: Emitter, operation: DeltaRule, x: Tensor, rates: Tensor, batch: Batch) -> Tensor:
        kernel = self._render("cpu/delta_net", "delta_net", g=self._geometry)
        operands = {
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
        written = dispatch(e, kernel, self._geometry.interface, [batch.rows], operands)
        batch.cache = written["cache"]
        return written["out"]
