"""The per-token data of a batch, computed once for all layers; and the last token of each sequence."""

from __future__ import annotations

from collections.abc import Mapping

from shortfin_apps.llm.builder.graph.batch import Batch, Slab
from shortfin_apps.llm.builder.graph.emitter import Dim, Emitter, Tensor
from shortfin_apps.llm.builder.graph.rotary import STEP
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Kernel, Tiles, Tuning
from shortfin_apps.llm.builder.kernels.interface import Buffer, Interface, buffer
from shortfin_apps.llm.builder.kernels.triton import GROUP
from shortfin_apps.llm.builder.kernels.triton.tokens import last_tokens, prepare
from shortfin_apps.llm.builder.lowering.lowering import LoweringContext
from shortfin_apps.llm.builder.lowering.triton.launch import Launcher
from shortfin_apps.llm.builder.lowering.triton.one_launch import most_rows
from shortfin_apps.llm.builder.lowering.triton.tiles import latent_groups, power_of_two
from shortfin_apps.llm.model.attention import Attention
from shortfin_apps.llm.model.latent_attention import LatentAttention
from shortfin_apps.llm.model.rope import Rotation
from shortfin_apps.llm.model.spec import ModelSpec


class TritonTokens:
    """The preparation of a batch, and the kernel of LastTokens."""

    def __init__(self, context: LoweringContext, launcher: Launcher) -> None:
        self._spec = context.spec
        self._kv_heads = max(_kv_heads(context.spec))
        self._stride = context.options.block_seq_stride
        self._one_launch = most_rows(context) > 0
        self._rotaries = context.rotaries
        self._launcher = launcher

    def prepare(self, e: Emitter, batch: Batch) -> None:
        """Emit the computation of the batch's slots, cosines and sines, offsets, counters and barrier.

        A launch computes the slots of one slab (the pages of some layers), and the cosines and sines of one
        rotation; slabs of states have no slots. Offsets are not needed in a decode. Counters are only for
        decodes and packed sequences, whose attention of single tokens reads them; a barrier only for decodes
        that may be one launch.
        """
        made = [(*pair, self._prepare(e, batch, *pair)) for pair in self._launches(batch)]
        batch.rotaries = {way: results["rotary"] for way, _, results in reversed(made)}
        for _, slab, results in made:
            slab.slots = results["slots"]
        [(_, _, results), *_] = made
        batch.counters, batch.barrier = results.get("counters"), results.get("barrier")
        if not batch.is_decode:
            batch.offsets = batch.given_offsets or results["offsets"]

    def _launches(self, batch: Batch) -> list[tuple[Rotation, Slab]]:
        """Return the launches: each rotation with a slab that uses it, then the other slabs with slots."""
        launches = [(rotation, self._slab_of(rotation, batch)) for rotation in self._rotaries]
        first = next(iter(self._rotaries))
        for slab in batch.slabs:
            if slab.pool != "state" and all(slab is not other for _, other in launches):
                launches.append((first, slab))
        return launches

    def _slab_of(self, rotation: Rotation, batch: Batch) -> Slab:
        """Return the first slab with a layer that uses the rotation; the first slab if no layer does."""
        layers = self._spec.layers
        rotated = {n for n, layer in enumerate(layers) if any(rotation == each.rotation for each in layer)}
        return next((slab for slab in batch.slabs if rotated.intersection(slab.layers)), batch.slabs[0])

    def _prepare(self, e: Emitter, batch: Batch, way: Rotation, slab: Slab) -> dict[str, Tensor]:
        coarse, fine = self._rotaries[way].load(e)
        operands: dict[str, Dim | Tensor | None] = {
            "tokens": batch.tokens,
            "chunk": 0 if batch.chunk is None else batch.chunk,
            "rows": batch.rows,
            "width": batch.width,
            "given_offsets": batch.given_offsets,
            "starts": batch.starts,
            "seq_lens": batch.seq_lens,
            "blocks": slab.blocks,
            "coarse": coarse,
            "fine": fine,
        }
        if batch.is_decode or batch.given_offsets is not None:
            operands["offsets"] = None
        if not batch.is_decode and batch.given_offsets is None:
            operands["counters"] = None
        if not (batch.is_decode and self._one_launch):
            operands["barrier"] = None
        return self._launcher.launch(e, self._prepare_kernel(way, slab, coarse, fine), operands)

    def last_tokens(
        self,
        e: Emitter,
        x: Tensor,
        batch: Batch,
        norm: Mapping[str, Tensor | None],
        deferred: Mapping[str, Buffer],
    ) -> dict[str, Tensor]:
        """Launch the kernel `last_tokens` and return its results by name.

        `norm`: operands for the norm that follows; `deferred`: outputs for the matmul after this norm.
        """
        features = self._spec.hidden_size
        block = power_of_two(features)
        kernel = Kernel(
            name="last_tokens",
            function=last_tokens,
            interface=Interface(
                constants=("tokens",),
                reads={
                    "x": buffer("f32", "tokens", features),
                    **{name: buffer("i64", "rows") for name in ("offsets", "starts", "seq_lens")},
                    "norm": buffer("f32", features),
                },
                writes={"y": buffer("f32", "rows", features), **deferred},
            ),
            constexprs={"FEATURES": features, "BLOCK": block, "GROUP": GROUP},
            grid=[Tiles("rows")],
            tuning=Tuning(num_waves=min(8, max(1, block // 512))),
        )
        operands = {
            "tokens": batch.tokens,
            "rows": batch.rows,
            "x": x,
            "offsets": batch.offsets,
            "starts": batch.starts,
            "seq_lens": batch.seq_lens,
            **norm,
        }
        return self._launcher.launch(e, kernel, operands)

    def _prepare_kernel(self, way: Rotation, slab: Slab, coarse: Tensor, fine: Tensor) -> Kernel:
        half = way.head_dim // 2
        steps, _, _ = coarse.shape
        assert isinstance(steps, int)
        return Kernel(
            name=f"prepare{slab.suffix}",
            function=prepare,
            interface=Interface(
                constants=("chunk", "rows", "width"),
                reads={
                    **{name: buffer("i64", "rows") for name in ("given_offsets", "starts", "seq_lens")},
                    "blocks": buffer("i64", "rows", "width"),
                    **{t: buffer("f32", *of.shape) for t, of in (("coarse", coarse), ("fine", fine))},
                },
                writes={
                    "offsets": buffer("i64", "rows"),
                    "slots": buffer("i64", "tokens"),
                    "rotary": buffer("f32", "tokens", 2, half),
                    "counters": buffer("i32", "rows", self._kv_heads),
                    "barrier": buffer("i32", 1),
                },
            ),
            constexprs={
                "HALF": half,
                "BLOCK_HALF": power_of_two(half),
                "STEP": STEP,
                "STEPS": steps,
                "STRIDE": self._stride,
                "PAGE_ROWS": slab.page_rows(self._stride),
                "KV_HEADS": self._kv_heads,
            },
            grid=[Tiles("tokens")],
            tuning=Tuning(num_waves=1),
        )


def _kv_heads(spec: ModelSpec) -> list[int]:
    """Return the K/V heads of each kind of attention: heads that share a tile, in latent attention."""
    latent = (latent_groups(block.heads) for block in spec.blocks_of(LatentAttention))
    return [*(block.kv_heads for block in spec.blocks_of(Attention)), *latent]
