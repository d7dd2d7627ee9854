"""The model: a Llama-family decoder over a paged cache, as MLIR text.

`LlamaGraph.module()` is the whole module; `_forward` is the model as a paper would draw it. What depends on
the target stands behind `Lowering`; what an entry looks like from outside is in graph_entry.py.
"""

from __future__ import annotations

from shortfin_apps.llm.abi import Entry
from shortfin_apps.llm.builder.graph.batch import Batch
from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.graph.rotary import Rotary
from shortfin_apps.llm.builder.graph.token_layout import last_tokens
from shortfin_apps.llm.builder.lowering.cpu.lowering import CpuLowering
from shortfin_apps.llm.builder.lowering.linalg.lowering import LinalgLowering
from shortfin_apps.llm.builder.lowering.lowering import Lowering
from shortfin_apps.llm.builder.model.spec import BuildOptions, LlamaSpec
from shortfin_apps.llm.builder.program.entry import entries_of, page_elements, write_entry
from shortfin_apps.llm.builder.target import Target
from shortfin_apps.llm.builder.weights.parameters import WeightTypes


class LlamaGraph:
    """Builds the module of one model for one target."""

    def __init__(self, spec: LlamaSpec, options: BuildOptions, target: Target) -> None:
        self._spec = spec
        self._options = options
        self._weights = WeightTypes(spec, options, target)
        self._rotary = Rotary(spec, context_length(spec, options))
        self._form = choose_lowering(spec, options, target, self._weights)

    def module(self) -> str:
        """The MLIR text of all entries, in a module named `module`."""
        functions = [self._function(entry) for entry in entries_of(self._options)]
        declarations = [
            *self._weights.declarations(),
            *self._rotary.declarations(),
            *self._form.declarations(),
        ]
        return "\n".join(["module @module {", *declarations, *functions, "}\n"])

    def _function(self, entry: Entry) -> str:
        elements = page_elements(self._spec, self._options)

        def body(e: Emitter, tokens: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
            batch.rotary = self._rotary.emit(e, batch.positions)
            logits = self._forward(e, tokens, batch)
            values, indices = self._form.top_k(e, logits)
            return values, indices, logits

        return write_entry(entry, self._spec, self._options, elements, body)

    def _forward(self, e: Emitter, tokens: Tensor, batch: Batch) -> Tensor:
        """Token ids [tokens] i64 -> logits [rows, vocab] f32 of each row's last valid token."""
        x = self._form.embedding(e, tokens)
        qkv: Tensor | None = self._form.project(e, x)
        for layer in range(self._spec.num_hidden_layers):
            assert qkv is not None  # only after the last layer
            x, qkv = self._form.layer(e, x, qkv, layer, batch)
        return self._form.logits(e, self._last_tokens(e, x, batch))

    def _last_tokens(self, e: Emitter, x: Tensor, batch: Batch) -> Tensor:
        """[tokens, hidden] -> [rows, hidden]: each row's last token that is not padding."""
        last = last_tokens(e, batch.offsets, batch.starts, batch.seq_lens, batch.tokens)
        body = f"""\
  %d = linalg.index 1 : index
  %token = arith.index_cast %a : i64 to index
  %value = tensor.extract {x.name}[%token, %d] : {x.type}
  linalg.yield %value : f32"""
        shape = (batch.rows, self._spec.hidden_size)
        return e.elementwise("rd", ("rd", shape, "f32"), [(last, "r")], body)


def context_length(spec: LlamaSpec, options: BuildOptions) -> int:
    """The most tokens a sequence may hold, in tokens."""
    return options.context_length or min(spec.max_position_embeddings, 8192)


def choose_lowering(spec: LlamaSpec, options: BuildOptions, target: Target, weights: WeightTypes) -> Lowering:
    """The one place where the target decides how the graph is written."""
    if target.is_cpu:
        return CpuLowering(spec, options, target, weights)
    return LinalgLowering(spec, options, weights)
