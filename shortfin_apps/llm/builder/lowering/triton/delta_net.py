"""Gated delta nets as a Triton kernel, one launch per layer."""

from __future__ import annotations

from shortfin_apps.llm.builder.graph.batch import Batch
from shortfin_apps.llm.builder.graph.emitter import Dim, Emitter, Tensor
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Kernel, Tiles, Tuning
from shortfin_apps.llm.builder.kernels.interface import Interface, buffer
from shortfin_apps.llm.builder.kernels.triton.delta_net import delta_rule
from shortfin_apps.llm.builder.lowering.lowering import LoweringContext
from shortfin_apps.llm.builder.lowering.triton.launch import Launcher
from shortfin_apps.llm.builder.lowering.triton.tiles import power_of_two
from shortfin_apps.llm.model.delta_net import DeltaNet, DeltaRule
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec

_WAVE_ELEMENTS = 2048  # elements of a state per wave: 64 registers in each of 32 lanes
_MOST_WAVES = 16


class TritonDeltaNet:
    """DeltaRule kernels for GPUs."""

    def __init__(self, context: LoweringContext) -> None:
        net = context.spec.delta_net
        assert net
        self._kernel = delta_rule_kernel(context.spec, net, context.options)
        self._weights = context.weights
        self._launcher = Launcher(context.target, context.rendered)

    def delta_rule(self, e: Emitter, operation: DeltaRule, x: Tensor, rates: Tensor, batch: Batch) -> Tensor:
        operands: dict[str, Dim | Tensor | None] = {
            "tokens": batch.tokens,
            "rows": batch.rows,
            "width": batch.width,
            "layer": batch.place_of(operation.layer),
            "mixed": x,
            "rates": rates,
            **{
                name: self._weights.load_one(e, getattr(operation, name))
                for name in ("conv", "steps", "norm")
            },
            "offsets": None if batch.is_decode else batch.offsets,
            "followers": batch.followers,
            "starts": batch.starts,
            "seq_lens": batch.seq_lens,
            "blocks": batch.blocks,
            "cache": batch.cache,
        }
        made = self._launcher.launch(e, self._kernel, operands)
        batch.cache = made["cache"]
        return made["out"]


def delta_rule_kernel(spec: ModelSpec, net: DeltaNet, options: BuildOptions) -> Kernel:
    """Return the kernel of the model's gated delta nets; a workgroup keeps a head's state in registers."""
    elements = (
        len(spec.pools["state"]) * net.state_elements
    )  # per page; always f32, whatever the cache's type
    return Kernel(
        name="delta_rule",
        function=delta_rule,
        interface=Interface(
            constants=("tokens", "rows", "width", "layer"),
            reads={
                "mixed": buffer("f32", "tokens", net.channels + net.value_features),
                "rates": buffer("f32", "tokens", 2 * net.value_heads),
                "conv": buffer("f32", net.taps, net.channels),
                "steps": buffer("f32", 2 * net.value_heads),
                "norm": buffer("f32", net.value_dim),
                **{name: buffer("i64", "rows") for name in ("offsets", "followers", "starts", "seq_lens")},
                "blocks": buffer("i64", "rows", "width"),
            },
            writes={
                "cache": buffer("f32", "pages", elements),
                "out": buffer(options.activations, "tokens", net.value_features),
            },
        ),
        constexprs={
            "KEY_HEADS": net.key_heads,
            "VALUE_HEADS": net.value_heads,
            "KEY_DIM": net.key_dim,
            "VALUE_DIM": net.value_dim,
            "BLOCK_KEY": power_of_two(net.key_dim),
            "BLOCK_VALUE": power_of_two(net.value_dim),
            "TAPS": net.taps,
            "TILED": net.tiled,
            "STRIDE": options.block_seq_stride,
            "STATE": net.state_elements,
            "PAGE": elements,
            "EPS": spec.rms_norm_eps,
        },
        grid=[net.value_heads, Tiles("rows")],
        tuning=Tuning(num_waves=min(_MOST_WAVES, max(1, net.block_elements // _WAVE_ELEMENTS))),
    )
