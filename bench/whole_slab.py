"""The slab to compile a kernel for if no program provides one."""

from __future__ import annotations

from shortfin_apps.llm.builder.graph.batch import Slab
from shortfin_apps.llm.builder.graph.emitter import Tensor
from shortfin_apps.llm.model.config import pool_elements
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec


def whole_slab(spec: ModelSpec, options: BuildOptions) -> Slab:
    """Return one slab for all layers."""
    return Slab(
        pool="whole",
        layers=range(len(spec.layers)),
        blocks=Tensor("%blocks", ("%rows", "%width"), "i64"),
        cache=Tensor("%cache", ("%pages", sum(pool_elements(spec, options).values())), options.cache_dtype),
    )
