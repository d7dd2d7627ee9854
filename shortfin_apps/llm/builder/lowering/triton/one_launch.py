"""Decodes of a few rows as one launch: all operations from Embed to the logits (`--one-launch`).

Models of equal layers qualify, each an attention and a gated feed-forward as in Llama, with weights in floats
(also of 8 bits) or in blocks; with norms of q and k, biases of q, k and v, windows, sinks or caps of scores.
`takes` decides by the operations, so a model family does not declare it. Other models and larger batches use
separate launches.

The kernel (kernels/triton/one_launch.py) consists of the separate kernels, so its constants are read from
them: `MatmulKernels` and `AttentionKernels` create these kernels, with tiles that suit one launch.
"""

from __future__ import annotations

from collections.abc import Sequence

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.lowering.lowering import LoweringContext, Values
from shortfin_apps.llm.builder.lowering.triton.launch import Launcher, Operands
from shortfin_apps.llm.builder.lowering.triton.matmul import load_matrix
from shortfin_apps.llm.builder.lowering.triton.one_launch_kernels import (
    COLUMNS,
    EMBEDDING,
    MATRICES,
    NUM_COLUMNS,
    Decode,
    Layer,
    OneLaunchKernels,
    address_kernel,
)
from shortfin_apps.llm.builder.weights.layout import Fp8Rows, RowMajor
from shortfin_apps.llm.model.attention import Attend, NormHeads
from shortfin_apps.llm.model.operations import (
    AddBias,
    Embed,
    GatedLinear,
    LastTokens,
    Linear,
    Norm,
    Operation,
)
from shortfin_apps.llm.model.spec import num_weights

# Measured on an H200 with up to 8 billion weights. With blocks or more rows, separate launches are faster for
# models that are not small: they run more workgroups at a time.
MOST_WEIGHTS = 10_000_000_000
MOST_WEIGHTS_OF_SMALL = 500_000_000
MOST_ROWS, MOST_ROWS_OF_SMALL = 8, 16
TABLE = "one_launch.weights"

# What may be between the projection to q, k and v and attention, and the field of its weight.
OPTIONAL: dict[type[Operation], str] = {AddBias: "bias", NormHeads: "head_norm"}
BETWEEN: list[list[type[Operation]]] = [[], [AddBias], [NormHeads], [AddBias, NormHeads]]


def most_rows(context: LoweringContext) -> int:
    """Return the maximum rows of a decode that should be one launch: as requested, or where that is faster.

    0: no decode should be.
    """
    options, weights = context.options, num_weights(context.spec)
    most = MOST_WEIGHTS_OF_SMALL if options.has_blocks else MOST_WEIGHTS
    is_faster = context.target.cpu.startswith("sm_90") and weights <= most
    if not (is_faster if options.one_launch is None else options.one_launch):
        return 0
    return MOST_ROWS_OF_SMALL if weights <= MOST_WEIGHTS_OF_SMALL else MOST_ROWS


class OneLaunch:
    """Lowers the operations of a decode to one launch."""

    def __init__(self, context: LoweringContext, launcher: Launcher, *, defers_norms: bool) -> None:
        self._most_rows = most_rows(context)
        self._spec = context.spec
        self._options = context.options
        self._weights = context.weights
        self._rendered = context.rendered
        self._launcher = launcher
        self._kernels = OneLaunchKernels(context, defers_norms=defers_norms)

    def takes(self, operations: Sequence[Operation], values: Values) -> int:
        """Return the number of operations to lower together; 0 if they do not qualify."""
        if not self._most_rows:
            return 0
        batch, end = values.batch, _end(operations)
        if not batch.is_decode or not isinstance(batch.rows, int) or batch.rows > self._most_rows:
            return 0
        if len(batch.slabs) > 1 or len(self._spec.rotations) > 1:
            return 0
        return end if self._decode(operations[:end]) is not None else 0

    def lower(self, e: Emitter, run: Sequence[Operation], values: Values) -> Tensor:
        """Emit the launch for the operations counted by `takes`; return the logits [rows, vocab] f32."""
        decode, batch, memory = self._decode(run), values.batch, values.memory_of_logits
        assert decode is not None
        assert isinstance(batch.rows, int)
        operands = {
            "ids": values["tokens"],
            **dict(zip(EMBEDDING, self._weights.load(e, decode.embedding), strict=False)),
            "weights": self._table(e, decode),
            "rotary": batch.rotary,
            "slots": batch.slots,
            "starts": batch.starts,
            "seq_lens": batch.seq_lens,
            "blocks": batch.blocks,
            "cache": batch.cache,
            "counters": batch.counters,
            "barrier": batch.barrier,
            "width": batch.width,
            **({} if memory is None else {"logits": memory}),
        }
        kernel, batch.compute_units = self._kernels.decode_layers(decode, batch.rows, batch.slab)
        made = self._launcher.launch(e, kernel, operands)
        batch.cache, batch.counters = made["cache"], made["counters"]
        logits = made["logits"]
        return logits if memory is None else e.reshape(logits, (batch.rows, self._spec.vocab_size))

    def _decode(self, operations: Sequence[Operation]) -> Decode | None:
        """Return the decode that the operations are; None if they do not qualify."""
        match operations:
            case [Embed() as embed, *rest, LastTokens(), Norm() as norm, Linear() as head]:
                layers = _layers(rest)
                if layers and self._are_equal(layers) and self._are_supported(embed.weight, head.weight):
                    return Decode(embed.weight, layers, norm.weight, head.weight)
        return None

    def _are_equal(self, layers: Sequence[Layer]) -> bool:
        """Whether one kernel can compute all layers: they differ only in the elements of their weights."""
        kinds = {(layer.block, layer.activation, *self._types(layer)) for layer in layers}
        weights = [weight for layer in layers for name, weight in layer.weights.items() if name in MATRICES]
        return len(kinds) == 1 and self._are_supported(*weights)

    def _types(self, layer: Layer) -> list[object]:
        weights = self._weights
        return [(field, weights.shape(name), weights.layout(name)) for field, name in layer.weights.items()]

    def _are_supported(self, *matrices: str) -> bool:
        """Whether all matrices are in blocks, in 8-bit floats, or in the floats of activations."""
        layouts, floats = map(self._weights.layout, matrices), RowMajor(self._options.activations)
        return all(each.blocks or isinstance(each, Fp8Rows) or each == floats for each in layouts)

    def _table(self, e: Emitter, decode: Decode) -> Tensor:
        """Return the addresses of the layers' weights, which are stored when the program is loaded."""
        shape = len(decode.rows_of_table), NUM_COLUMNS
        self._rendered.add(TABLE, decode, lambda: self._initialiser(decode, shape))
        return e.load(TABLE, shape, "i64")

    def _initialiser(self, decode: Decode, shape: tuple[int, int]) -> str:
        """Return the MLIR of the table: a global, and launches that fill it when the program is loaded."""
        e = Emitter()
        table = e.fill("0", shape, "i64")
        for row, weights in enumerate(decode.rows_of_table):
            for name, weight in weights.items():
                given = load_matrix(e, self._weights, weight)
                at = row * NUM_COLUMNS + COLUMNS[name]
                operands: Operands = {**given, "table": table, "at": at}
                table = self._launcher.launch(e, address_kernel(given, shape), operands)["table"]
        lines = "\n".join(e.lines)
        return f"""\
util.global private @"{TABLE}" : {table.type}
util.initializer {{
{lines}
util.global.store {table.name}, @"{TABLE}" : {table.type}
util.return
}}"""


def _end(operations: Sequence[Operation]) -> int:
    """Return the number of operations up to the head, whose result is "logits"."""
    ends = (n for n, each in enumerate(operations, 1) if isinstance(each, Linear) and each.out == "logits")
    return next(ends, 0)


def _layers(operations: Sequence[Operation]) -> tuple[Layer, ...]:
    """Return the layers that the operations are; empty if any does not qualify."""
    layers, rest = [], list(operations)
    while rest:
        end = next((n for n, each in enumerate(rest, 1) if isinstance(each, GatedLinear)), len(rest)) + 1
        layer, rest = _layer(rest[:end]), rest[end:]
        if layer is None:
            return ()
        layers.append(layer)
    return tuple(layers)


def _layer(operations: Sequence[Operation]) -> Layer | None:
    match operations:
        case [
            Norm() as first,
            Linear(residual=None) as qkv,
            *between,
            Attend() as attend,
            Linear(residual=str()) as output,
            Norm() as second,
            GatedLinear() as gate_up,
            Linear(residual=str()) as down,
        ] if [type(each) for each in between] in BETWEEN:
            added = {
                OPTIONAL[type(each)]: each.weight for each in between if isinstance(each, AddBias | NormHeads)
            }
            sinks = {} if attend.sinks is None else {"sinks": attend.sinks}
            weights = {
                "attention_norm": first.weight,
                "qkv": qkv.weight,
                **added,
                **sinks,
                "output": output.weight,
                "ffn_norm": second.weight,
                "gate_up": gate_up.weight,
                "down": down.weight,
            }
            return Layer(attend.block, gate_up.activation, weights)
    return None
