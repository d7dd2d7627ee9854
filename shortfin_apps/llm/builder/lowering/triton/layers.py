"""The layers of a model, from token ids to logits, in Triton kernels: five launches per layer of a Llama.

The launches are: the qkv projection with rotation and cache write; attention; the output projection with the
residual; the gate and up projections with the activation; and the down projection with the residual. A norm
is fused into the matmul that reads its result, and prepared by the kernel before (see "deferred" in
kernels/triton/__init__.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise, takewhile

from shortfin_apps.llm.builder.graph.batch import Batch
from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Kernel, Tiles, Tuning
from shortfin_apps.llm.builder.kernels.interface import Interface, buffer
from shortfin_apps.llm.builder.kernels.triton import GROUP
from shortfin_apps.llm.builder.kernels.triton.norm import add_normed, embed, rms_norm
from shortfin_apps.llm.builder.lowering.linalg.query_scaling import scale_queries
from shortfin_apps.llm.builder.lowering.lowering import LoweringContext, Values
from shortfin_apps.llm.builder.lowering.triton.attention import TritonAttention
from shortfin_apps.llm.builder.lowering.triton.experts import ExpertTiles, TritonExperts
from shortfin_apps.llm.builder.lowering.triton.launch import Launcher
from shortfin_apps.llm.builder.lowering.triton.matmul import (
    MatmulKernels,
    block_constants,
    deferred,
    load_matrix,
    matrix,
)
from shortfin_apps.llm.builder.lowering.triton.one_launch import OneLaunch
from shortfin_apps.llm.builder.lowering.triton.operands import Activations, MatmulOperands
from shortfin_apps.llm.builder.lowering.triton.tiles import power_of_two, tiles_of
from shortfin_apps.llm.builder.lowering.triton.tokens import TritonTokens
from shortfin_apps.llm.model.attention import Attend, DropGates, NormHeads, NormWhole, ScaleQueries
from shortfin_apps.llm.model.feed_forward import SumExperts
from shortfin_apps.llm.model.operations import (
    Activation,
    AddBias,
    AddNormed,
    Embed,
    LastTokens,
    Linear,
    Narrow,
    Norm,
    Operation,
)

# The operations before Attend that a kernel computes together with its rotation and cache write.
_BEFORE_ATTEND: tuple[tuple[type[Operation], ...], ...] = (
    *((Linear,), (Linear, AddBias), (Linear, NormHeads), (Linear, AddBias, NormHeads)),
    *((NormWhole,), (NormHeads,), (DropGates, NormHeads)),
)
_MOST_BEFORE_ATTEND = 4  # with ScaleQueries


class TritonLayers:
    """FusedKernels, and kernels of Embed, Norm, AddNormed, Linear, GatedLinear, LastTokens and experts."""

    places_logits = True

    def __init__(self, context: LoweringContext) -> None:
        self._spec = context.spec
        self._act = context.options.activations
        self._matmuls = MatmulKernels(context.spec, context.options, tiles_of(context.target).matmul)
        self._weights = context.weights
        self._launcher = Launcher(context.target, context.rendered)
        self._tokens = TritonTokens(context, self._launcher)
        self._operands = MatmulOperands(context, self._launcher)
        self._attention = TritonAttention(context, self._launcher, self._operands)
        experts = context.spec.experts
        self._routed = (
            None if experts is None else TritonExperts(context, experts, self._launcher, self._operands)
        )
        # A deferred norm multiplies x by the norm's weight before dividing by rms, which may overflow in f16.
        self._defers_norms = self._act != "f16"
        self._one_launch = OneLaunch(context, self._launcher, defers_norms=self._defers_norms)

    def takes(self, operations: Sequence[Operation], values: Values) -> int:
        if length := _until_attention(operations):
            return length
        match operations:
            case [Embed(), *_] if length := self._one_launch.takes(operations, values):
                return length
            case [AddNormed(), Narrow(), *_]:
                return 2 if _is_chain(operations[:2]) else 0
            case [Embed() | Linear() | AddNormed(), Norm(), *_] if self._defers_norms:
                return 2 if _is_chain(operations[:2]) else 0
            case [SumExperts(), Norm(), *_] if self._defers_norms:
                return 2 if _is_chain(operations[:2]) else 0
            case [SumExperts(), LastTokens(), Norm(), *_] if self._defers_norms and values.batch.is_decode:
                return 3 if _is_chain(operations[:3]) else 0
            case [LastTokens(), Norm(), *_] if self._defers_norms and not values.batch.is_decode:
                return 2 if _is_chain(operations[:2]) else 0
            case [Linear() | AddNormed(), LastTokens(), Norm(), *_] if (
                self._defers_norms and values.batch.is_decode
            ):
                return 3 if _is_chain(operations[:3]) else 0
        return 0

    def lower(self, e: Emitter, run: Sequence[Operation], values: Values, results: Sequence[str]) -> None:
        match run:
            case [Embed(), *_, Linear() as head]:
                values[head.out] = self._one_launch.lower(e, run, values)
            case [Embed() as first, Norm() as norm]:
                x, deferred = self._embed(e, values[first.x], first.weight, norm.weight)
                values[first.out], values[norm.out] = x, deferred
            case [LastTokens() as last, Norm() as norm]:
                x, deferred = self._last_tokens(e, values[last.x], values.batch, norm.weight)
                values[last.out], values[norm.out] = x, deferred
            case [AddNormed() as first, *last, (Norm() | Narrow()) as following]:
                x, prepared = self._add_normed(
                    e, values[first.x], first.weight, values[first.residual], following
                )
                for each in (first, *last, following):
                    values[each.out] = prepared if each is following else x
            case [Linear() as first, *last, Norm() as norm]:
                residual = values[first.residual] if first.residual else None
                x, deferred = self._linear(e, values.operand(first.x), first.weight, residual, norm.weight)
                for each in (first, *last, norm):
                    values[each.out] = deferred if each is norm else x
            case [(DropGates() | NormWhole() | NormHeads()) as first, *_, Attend() as attention]:
                weight = next(each.weight for each in run if isinstance(each, (NormWhole, NormHeads)))
                q = self._attention.store(e, values[first.x], weight, attention, values.batch)
                values[attention.out] = self._attend(e, q, run, attention, values.batch)
            case [SumExperts() as first, *last, Norm() as norm]:
                routing, residual = values.operand(first.routing), values[first.residual]
                down = first.weight, first.bias
                x, deferred = self._sum_experts(e, values[first.x], down, routing, residual, norm.weight)
                for each in (first, *last, norm):
                    values[each.out] = deferred if each is norm else x
            case [Linear() as projection, *between, Attend() as attention]:
                bias = next((each.weight for each in between if isinstance(each, AddBias)), None)
                head_norm = next((each.weight for each in between if isinstance(each, NormHeads)), None)
                given = _activations(values.operand(projection.x))
                weights = projection.weight, bias, head_norm
                q = self._attention.project(e, given, *weights, attention, values.batch)
                values[attention.out] = self._attend(e, q, run, attention, values.batch)

    def _attend(
        self, e: Emitter, q: Tensor, run: Sequence[Operation], attention: Attend, batch: Batch
    ) -> Tensor:
        """Attend with the rotated q, scaled if ScaleQueries is part of the run: both commute.

        Return q itself if the operation only stores.
        """
        if attention.only_stores:
            return q
        for operation in run:
            if isinstance(operation, ScaleQueries):
                q = scale_queries(e, operation, q, batch)
        return self._attention.attend(e, q, attention, batch)

    def prepare(self, e: Emitter, batch: Batch) -> None:
        """Emit the computation of the batch's per-token data."""
        self._tokens.prepare(e, batch)

    def last_tokens(self, e: Emitter, x: Tensor, batch: Batch) -> Tensor:
        return x if batch.is_decode else self._last_tokens(e, x, batch, None)[0]

    def embed(self, e: Emitter, tokens: Tensor, weight: str) -> Tensor:
        return self._embed(e, tokens, weight, None)[0]

    def rms_norm(self, e: Emitter, x: Tensor, weight: str) -> Activations:
        features = self._spec.hidden_size
        block = power_of_two(features)
        kernel = Kernel(
            name="rms_norm",
            function=rms_norm,
            interface=Interface(
                constants=(),
                reads={"x": buffer("f32", "tokens", features), "weight": buffer("f32", features)},
                writes={"y": buffer(self._act, "tokens", features)},
            ),
            constexprs={"FEATURES": features, "BLOCK": block, "EPS": self._spec.rms_norm_eps},
            grid=[Tiles("tokens")],
            tuning=_row_tuning(block),
        )
        operands = {"tokens": x.shape[0], "x": x, "weight": self._weights.load_one(e, weight)}
        return Activations(self._launcher.launch(e, kernel, operands)["y"])

    def add_normed(self, e: Emitter, x: Tensor, weight: str, residual: Tensor) -> Tensor:
        return self._add_normed(e, x, weight, residual, None)[0]

    def linear(
        self, e: Emitter, x: Tensor | Activations, weight: str, residual: Tensor | None = None
    ) -> Tensor:
        return self._linear(e, x, weight, residual, None)[0]

    def linear_into(self, e: Emitter, x: Tensor | Activations, weight: str, memory: Tensor) -> Tensor:
        """Write the product to `memory` [rows, 1, out] f32; return it as [rows, out]."""
        rows, _, out = memory.shape
        return e.reshape(self._linear(e, x, weight, None, None, {"y": memory})[0], (rows, out))

    def gated_linear(
        self, e: Emitter, x: Tensor | Activations, weight: str, activation: Activation
    ) -> Tensor:
        given = _activations(x)
        shape, tokens = self._weights.shape(weight), given.x.shape[0]
        make = partial(self._matmuls.gated_linear, activation, shape, tokens)
        kernel, operands = self._operands.of(e, given, weight, make)
        return self._launcher.launch(e, kernel, operands)["y"]

    def _add_normed(
        self, e: Emitter, x: Tensor, weight: str, residual: Tensor, following: Operation | None
    ) -> tuple[Tensor, Activations | None]:
        """Return the sum, and the input of the matmuls after the Norm or Narrow `following`.

        The input is None if `following` is None.
        """
        features = self._spec.hidden_size
        block = power_of_two(features)
        vector, rows = buffer("f32", features), buffer("f32", "tokens", features)
        kernel = Kernel(
            name="add_normed",
            function=add_normed,
            interface=Interface(
                constants=(),
                reads={"x": rows, "weight": vector, "residual": rows, "norm": vector},
                writes={
                    "y": rows,
                    **deferred(self._act, features),
                    "narrow": buffer(self._act, "tokens", features),
                },
            ),
            constexprs={"FEATURES": features, "BLOCK": block, "GROUP": GROUP, "EPS": self._spec.rms_norm_eps},
            grid=[Tiles("tokens")],
            tuning=_row_tuning(block),
        )
        operands = {
            "tokens": x.shape[0],
            "x": x,
            "weight": self._weights.load_one(e, weight),
            "residual": residual,
            **self._norm(e, following.weight if isinstance(following, Norm) else None),
            **({} if isinstance(following, Narrow) else {"narrow": None}),
        }
        made = self._launcher.launch(e, kernel, operands)
        return made["y"], Activations(made["narrow"]) if "narrow" in made else _prepared(made)

    def route(self, e: Emitter, logits: Tensor, batch: Batch, scores: Tensor | None = None) -> ExpertTiles:
        return self._experts.route(e, logits, batch, scores)

    def gated_experts(
        self, e: Emitter, x: Tensor | Activations, weight: str, bias: str | None, routing: ExpertTiles
    ) -> Tensor:
        return self._experts.gated_experts(e, _activations(x), weight, bias, routing)

    def sum_experts(
        self, e: Emitter, x: Tensor, weight: str, bias: str | None, routing: ExpertTiles, residual: Tensor
    ) -> Tensor:
        return self._sum_experts(e, x, (weight, bias), routing, residual, None)[0]

    def _sum_experts(
        self,
        e: Emitter,
        x: Tensor,
        weights: tuple[str, str | None],
        routing: ExpertTiles,
        residual: Tensor,
        norm: str | None,
    ) -> tuple[Tensor, Activations | None]:
        """Return the experts' sum plus the residual, and the input of the matmuls after `norm`.

        `weights`: names of the down matrices and of their biases; `norm`: name of the weight of the norm that
        follows, or None. The input is None if `norm` is None.
        """
        made = self._experts.sum_experts(e, x, *weights, routing, residual, self._norm(e, norm))
        return made["y"], _prepared(made)

    @property
    def _experts(self) -> TritonExperts:
        assert self._routed is not None
        return self._routed

    def _linear(
        self,
        e: Emitter,
        x: Tensor | Activations,
        weight: str,
        residual: Tensor | None,
        norm: str | None,
        memory: Mapping[str, Tensor] | None = None,
    ) -> tuple[Tensor, Activations | None]:
        """Return the product plus the residual, and the input of the matmuls after `norm` (None without).

        The product is written to `memory["y"]`, if given.
        """
        given = _activations(x)
        make = partial(self._matmuls.linear, self._weights.shape(weight), given.x.shape[0])
        kernel, operands = self._operands.of(e, given, weight, make)
        operands |= {"residual": residual, **self._norm(e, norm), **(memory or {})}
        made = self._launcher.launch(e, kernel, operands)
        return made["y"], _prepared(made)

    def _embed(
        self, e: Emitter, tokens: Tensor, weight: str, norm: str | None
    ) -> tuple[Tensor, Activations | None]:
        features = self._spec.hidden_size
        block = power_of_two(features)
        layout = self._weights.layout(weight)
        table = matrix(layout, self._weights.shape(weight))
        kernel = Kernel(
            name="embed",
            function=embed,
            interface=Interface(
                constants=(),
                reads={
                    "ids": buffer("i64", "tokens"),
                    **table,
                    "norm": buffer("f32", features),
                },
                writes={"x": buffer("f32", "tokens", features), **deferred(self._act, features)},
            ),
            constexprs={
                "VOCAB": self._spec.vocab_size,
                "SCALE": self._spec.embedding_scale,
                "FEATURES": features,
                "BLOCK": block,
                "GROUP": GROUP,
                "BLOCKS": block_constants(layout),
                **dict.fromkeys({"scales", "minima"} - table.keys()),
            },
            grid=[Tiles("tokens")],
            tuning=_row_tuning(block),
        )
        operands = {
            "tokens": tokens.shape[0],
            "ids": tokens,
            **load_matrix(e, self._weights, weight),
            **self._norm(e, norm),
        }
        made = self._launcher.launch(e, kernel, operands)
        return made["x"], _prepared(made)

    def _last_tokens(
        self, e: Emitter, x: Tensor, batch: Batch, norm: str | None
    ) -> tuple[Tensor, Activations | None]:
        prepared = deferred(self._act, self._spec.hidden_size, "rows")
        made = self._tokens.last_tokens(e, x, batch, self._norm(e, norm), prepared)
        return made["y"], _prepared(made)

    def _norm(self, e: Emitter, weight: str | None) -> dict[str, Tensor | None]:
        """Return the operands that make a kernel prepare the norm that follows, whose weight is `weight`.

        If it is None, the operands make the kernel omit these outputs.
        """
        if weight is None:
            return {"norm": None, "scaled": None, "squares": None}
        return {"norm": self._weights.load_one(e, weight)}


def _until_attention(operations: Sequence[Operation]) -> int:
    """Return the length of the leading run that ends in Attend and is lowered together; 0 for none."""
    first = operations[: _MOST_BEFORE_ATTEND + 1]
    before = list(takewhile(lambda each: not isinstance(each, Attend), first))
    kinds = tuple(type(each) for each in before if not isinstance(each, ScaleQueries))
    return len(before) + 1 if len(before) < len(first) and kinds in _BEFORE_ATTEND else 0


def _is_chain(run: Sequence[Operation]) -> bool:
    """Whether each operation reads the result of the previous one."""
    return all(second.x == first.out for first, second in pairwise(run))


def _activations(x: Tensor | Activations) -> Activations:
    return x if isinstance(x, Activations) else Activations(x)


def _prepared(made: dict[str, Tensor]) -> Activations | None:
    return Activations(made["scaled"], made["squares"]) if "scaled" in made else None


def _row_tuning(block: int) -> Tuning:
    """Return the tuning for one token of `block` elements per workgroup: 512 per wave, at most 8 waves."""
    return Tuning(num_waves=min(8, max(1, block // 512)))
