"""The slab to compile a kernel for if no program provides one."""

from __future__ import annotations

from shortfin_apps.llm.builder.graph.batch import Slab
from shortfin_apps.llm.builder.graph.emitter import Tensor
from shortfin_apps.llm.model.config import page_elements
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec


def whole_slab(spec: ModelSpec, options: BuildOptions) -> Slab:
    """Return one slab for all layers."""
    return Slab(
        layers=range(spec.num_hidden_layers),
        blocks=Tensor("%blocks", ("%rows", "%width"), "i64"),
        cache=Tensor("%cache", ("%pages", page_elements(spec, options)), options.cache_dtype),
    )
