"""The MLIR module of a model: a decoder over a paged KV cache.

model/ defines the model's operations, lowering/ the kernels that a target computes them with, and entry.py
the external interface of the entries.
"""

from __future__ import annotations

from collections.abc import Mapping

from shortfin_apps.llm.builder.graph.batch import Batch
from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.kernels.ahead_of_time.compile_all import CompileKernels, compile_here
from shortfin_apps.llm.builder.lowering.choose import choose, has_static_workspace, make_lowering
from shortfin_apps.llm.builder.lowering.lowering import LoweringContext, RenderedKernels, Values
from shortfin_apps.llm.builder.program.entry import (
    SlabSizes,
    entries_of,
    write_decode_loop,
    write_entry,
    write_row_entry,
)
from shortfin_apps.llm.builder.target import Target
from shortfin_apps.llm.builder.weights.parameters import WeightTypes
from shortfin_apps.llm.contract.abi import COMPUTE_UNITS, LOOP_LAYOUTS, Entry, EntryFamily
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.model.config import context_length, pool_elements, pool_planes, within
from shortfin_apps.llm.model.operations import Linear, Operation, Sample, TopK
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec

RESULTS = ("values", "indices", "logits")


class ModelModule:
    """The module of one model for one target; `choices` has the chosen kernels and the reasons."""

    def __init__(
        self,
        spec: ModelSpec,
        options: BuildOptions,
        target: Target,
        compile_kernels: CompileKernels = compile_here,
    ) -> None:
        self._spec = spec = within(spec, context_length(spec, options))
        self._options = options
        self._weights = WeightTypes(spec, options, target)
        top_k = TopK("logits", "values", "indices")
        self._operations = [*spec.operations(), top_k]
        self._draft_operations = [*spec.draft_operations(), top_k]
        rendered = RenderedKernels(compile_kernels)
        self._context = context = LoweringContext(spec, options, target, self._weights, rendered)
        self.choices = choose(context)
        self._lowering = make_lowering(context, self.choices)
        self._static_workspace = has_static_workspace(self.choices)

    @property
    def entries(self) -> list[Entry]:
        has_draft = self._spec.draft is not None
        return entries_of(self._options, draws_rows=self._lowering.draws_rows, has_draft=has_draft)

    def text(self) -> str:
        """Return the MLIR of all entries, in a module named `module`.

        Raises BuildError if no entry is one launch although the options ask for it.
        """
        functions = [self._function(entry) for entry in self.entries]
        if self._options.one_launch and not any(COMPUTE_UNITS in each for each in functions):
            raise BuildError(
                "--one-launch: no decode is one launch, which needs a GPU, a batch size of at most 8, or 16 "
                "for a small model, and a model of equal layers with weights in floats or blocks "
                "(docs/kernels.md); leave it out"
            )
        declarations = [
            *self._weights.declarations(),
            *(line for rotary in self._context.rotaries.values() for line in rotary.declarations()),
            *self._lowering.declarations(),
        ]
        return "\n".join(["module @module {", *declarations, *functions, "}\n"])

    def _function(self, entry: Entry) -> str:
        of_rows = {
            EntryFamily.SAMPLE: self._lowering.draw,
            EntryFamily.ADJUSTED_SAMPLE: self._lowering.draw_adjusted,
            EntryFamily.LOGPROBS: self._lowering.logprobs,
        }
        if (emit := of_rows.get(entry.family)) is not None:
            sizes = self._options.top_k, self._spec.vocab_size
            return write_row_entry(entry, *sizes, emit, static_workspace=self._static_workspace)
        is_loop = entry.layout() in LOOP_LAYOUTS
        is_draft = entry.family is EntryFamily.DRAFT
        operations: list[Operation] = list(self._draft_operations if is_draft else self._operations)
        sampling = [Sample("values", "token_ids", "indices", "logits")] if is_loop else []

        def body(e: Emitter, inputs: Mapping[str, Tensor], batch: Batch) -> Values:
            self._lowering.prepare(e, batch)
            values = Values(inputs, batch)
            results = (*RESULTS, *(name for operation in sampling for name in operation.writes))
            kept = () if self._spec.draft is None else ("hidden_table",)
            self._lowering.lower(e, [*operations, *sampling], values, [*results, *kept])
            return values

        elements = pool_elements(self._spec, self._options)
        slabs = {
            pool: SlabSizes(layers, elements[pool], pool_planes(self._spec, pool, self._options))
            for pool, layers in self._spec.pools.items()
        }
        write = write_decode_loop if is_loop else write_entry
        makes_logits = next(each for each in reversed(operations) if "logits" in each.writes)
        places = self._lowering.places_logits and isinstance(makes_logits, Linear)
        return write(
            entry,
            self._options,
            slabs,
            body,
            static_workspace=self._static_workspace,
            logits_size=self._spec.vocab_size if places else None,
            hidden_size=None if self._spec.draft is None else self._spec.hidden_size,
        )
