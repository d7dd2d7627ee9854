"""Random blocks of GGUF's types, with terms such as weights have."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from shortfin_apps.llm.model.spec import tensor_shapes
from tests.builder.model_files import SPEC, write_gguf
from tests.builder.specs import changed

# The f16 numbers of a block, by their bytes; others have one at the beginning.
_TERMS = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,)} | dict.fromkeys(
    ("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)
)
# With rows of whole K-quants.
WIDE = changed(SPEC, {"hidden_size": 256, "features": 512, "heads": 16})


def random_data(
    kind: GGMLQuantizationType, rows: int, columns: int, seed: int = 0, scale: float = 1.0
) -> npt.NDArray[np.uint8]:
    """[rows, bytes]; `scale` is a factor of the f16 numbers."""
    weights, size = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows * columns // weights, size), dtype=np.uint8)
    if kind is GGMLQuantizationType.MXFP4:
        blocks[:, 0] = rng.integers(110, 130, len(blocks))
        return blocks.reshape(rows, -1)
    for at in _TERMS.get(kind.name, (0,)):
        term = (scale * rng.uniform(1e-3, 2e-2, (len(blocks), 1))).astype(np.float16)
        if kind is GGMLQuantizationType.IQ1_M:  # in the high bits of its last four integers
            parts = term.view(np.uint16) >> np.arange(0, 16, 4, dtype=np.uint16) & 15
            blocks[:, 49::2] = blocks[:, 49::2] & 15 | parts.astype(np.uint8) << 4
        else:
            blocks[:, at : at + 2] = term.view(np.uint8)
    return blocks.reshape(rows, -1)


def write_random_gguf(
    path: Path, kind: GGMLQuantizationType, otherwise: Mapping[str, GGMLQuantizationType]
) -> Path:
    """A GGUF file of WIDE, whose matrices are of `kind`, but those named in `otherwise`."""
    shapes = tensor_shapes(WIDE)
    kinds = {name: otherwise.get(name, kind) for name, shape in shapes.items() if len(shape) > 1}
    tensors = {
        name: random_data(kinds[name], shape[0], shape[1]) if name in kinds else np.ones(shape, np.float32)
        for name, shape in shapes.items()
    }
    sizes = {"embedding_length": WIDE.hidden_size, "feed_forward_length": 512}
    heads = {"attention.head_count": WIDE.attention.heads}
    return write_gguf(path, keys={**sizes, **heads}, whole=tensors, otherwise=kinds)
