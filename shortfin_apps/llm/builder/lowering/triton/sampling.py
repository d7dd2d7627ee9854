"""Sampling by a Triton kernel."""

from __future__ import annotations

from shortfin_apps.llm.abi import SamplingField
from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Kernel, Tiles, Tuning
from shortfin_apps.llm.builder.kernels.interface import Interface, buffer
from shortfin_apps.llm.builder.kernels.triton.sampling import sample
from shortfin_apps.llm.builder.lowering.lowering import LoopState, LoweringContext
from shortfin_apps.llm.builder.lowering.triton.launch import Launcher
from shortfin_apps.llm.builder.lowering.triton.tiles import power_of_two


class TritonSampling:
    """The kernel of Sample."""

    def __init__(self, context: LoweringContext) -> None:
        self._k = context.options.top_k
        self._launcher = Launcher(context.target, context.rendered)

    def sample(
        self, e: Emitter, values: Tensor, indices: Tensor, state: LoopState
    ) -> tuple[Tensor, LoopState]:
        operands = {
            "rows": values.shape[0],
            "values": values,
            "indices": indices,
            "sampling": state.sampling,
            "tokens": state.tokens,
            "positions": state.positions,
        }
        made = self._launcher.launch(e, self._kernel(), operands)
        return made["token_ids"], LoopState(made["tokens"], made["positions"], state.sampling)

    def _kernel(self) -> Kernel:
        state = buffer("i64", "rows")
        return Kernel(
            name="sample",
            function=sample,
            interface=Interface(
                constants=("rows",),
                reads={
                    "values": buffer("f32", "rows", self._k),
                    "indices": buffer("i64", "rows", self._k),
                    "sampling": buffer("i64", len(SamplingField), "rows"),
                },
                writes={"tokens": state, "positions": state, "token_ids": state},
            ),
            constexprs={"K": self._k, "BLOCK": power_of_two(self._k)},
            grid=[Tiles("rows")],
            tuning=Tuning(num_waves=1),
        )
