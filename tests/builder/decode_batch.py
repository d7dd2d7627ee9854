"""The batch of a decode whose arguments are named as its fields."""

from __future__ import annotations

from shortfin_apps.llm.builder.graph.batch import Batch, Slab
from shortfin_apps.llm.builder.graph.emitter import Dim, Tensor
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec
from tests.builder.specs import page_elements


def decode_batch(
    options: BuildOptions, spec: ModelSpec, *, rows: Dim, width: Dim = 1, pages: Dim = 1
) -> Batch:
    def of_rows(name: str) -> Tensor:
        return Tensor(f"%{name}", (rows,), "i64")

    batch = Batch(
        rows=rows,
        tokens=rows,
        chunk=1,
        whole_pages=False,
        starts=of_rows("starts"),
        seq_lens=of_rows("seq_lens"),
        slabs=[
            Slab(
                pool="whole",
                layers=range(len(spec.layers)),
                blocks=Tensor("%blocks", (rows, width), "i64"),
                cache=Tensor("%cache", (pages, page_elements(spec, options)), options.cache_dtype),
            )
        ],
    )
    batch.offsets = of_rows("offsets")
    batch.token_rows = of_rows("token_rows")
    batch.positions = of_rows("starts")
    batch.rotaries = {
        spec.attention.rotation: Tensor("%rotary", (rows, 2, spec.attention.head_dim // 2), "f32")
    }
    return batch
