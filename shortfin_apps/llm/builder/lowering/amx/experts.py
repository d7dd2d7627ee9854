"""Routed experts on AMX: the token rows of each expert are stored together and multiplied in tiles."""

from __future__ import annotations

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.kernels.amx.experts import ExpertMatmulGeometry, SortRowsGeometry
from shortfin_apps.llm.builder.kernels.amx.matmul import MatmulFloatTilesGeometry
from shortfin_apps.llm.builder.kernels.epilogue import Epilogue
from shortfin_apps.llm.builder.lowering.cpu.experts import ExpertOrder, VectorExperts
from shortfin_apps.llm.builder.lowering.dispatch import dispatch


class AmxExperts(VectorExperts):
    """Kernels of Route, GatedExperts and SumExperts for bf16 or f16 experts.

    Callers must check `experts_fill_tiles`.
    """

    sorts = True

    def _multiply(
        self,
        e: Emitter,
        x: Tensor,
        weight: str,
        bias: str | None,
        epilogue: Epilogue,
        sharing: int,
        routing: ExpertOrder,
    ) -> Tensor:
        """Emit the matmul of all experts; return its results, sorted by expert.

        For GatedExperts, x has a row per token, which is first copied for each of the token's experts, sorted
        by expert. For SumExperts, the rows of x are already sorted.
        """
        count, n, k_size = self._weights.shape(weight)
        matmul = MatmulFloatTilesGeometry(
            n=n,
            k_size=k_size,
            epilogue=epilogue,
            dtype=self._options.activations,
            is_tiled=False,
            makes_tiles=False,
            has_bias=bias is not None,
        )
        geometry = ExpertMatmulGeometry(matmul=matmul, count=count)
        kernel = self._render("amx/experts", f"experts_amx_{n}x{k_size}_{epilogue}", g=geometry)
        operands = {
            "rows": routing.rows,
            "x": self._sort(e, x, sharing, routing) if matmul.is_gated else x,
            "w": self._weights.load_one(e, weight),
            **({} if bias is None else {"bias": self._weights.load_one(e, bias)}),
            "ends": routing.ends,
        }
        return dispatch(e, kernel, geometry.interface, [routing.rows], operands)["out"]

    def _sort(self, e: Emitter, x: Tensor, sharing: int, routing: ExpertOrder) -> Tensor:
        """Copy each token's row of x once for each of its experts, sorted by expert: [rows, size]."""
        geometry = SortRowsGeometry(
            count=self._experts.count,
            sharing=sharing,
            size=self._spec.hidden_size,
            dtype=self._options.activations,
        )
        kernel = self._render("amx/sort_rows", "sort_rows", g=geometry)
        operands = {
            "rows": routing.rows,
            "x_rows": x.shape[0],
            "x": x,
            "order": routing.order,
            "ends": routing.ends,
        }
        return dispatch(e, kernel, geometry.interface, [routing.rows], operands)["sorted"]
