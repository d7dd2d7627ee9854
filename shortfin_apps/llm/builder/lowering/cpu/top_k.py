"""The top-k of logits as a hand-written CPU kernel."""

from __future__ import annotations

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.kernels.cpu.top_k import TopKGeometry
from shortfin_apps.llm.builder.lowering.dispatch import dispatch
from shortfin_apps.llm.builder.lowering.lowering import Kernels


class VectorTopK(Kernels):
    """TopK kernels for any CPU."""

    def top_k(self, e: Emitter, logits: Tensor) -> tuple[Tensor, Tensor]:
        rows, vocab = logits.shape
        assert isinstance(vocab, int)
        geometry = TopKGeometry(vocab, self._options.top_k)
        kernel = self._render("cpu/top_k", f"top_k_{geometry.k}_of_{vocab}", g=geometry)
        operands = {"rows": rows, "logits": logits}
        written = dispatch(e, kernel, geometry.interface, [rows], operands)
        return written["values"], written["indices"]
