"""The weights of the tiny models in family_logits.json, made from their names and shapes alone."""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt

SEED = 1607


def weight(name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Norms near 1, biases and embeddings of standard deviation 1/2 and 1, matrices that keep it.

    Sinks, and biases of what is gated with limits, are larger, so that some are past these.
    """
    rng = np.random.Generator(np.random.PCG64([SEED, zlib.crc32(name.encode())]))
    values = rng.standard_normal(shape)
    if "norm" in name:
        values = 1 + 0.3 * values
    elif name.endswith(("sinks", "gate_up_proj_bias")):
        values = 4 * values
    elif name.endswith("bias"):
        values = 0.5 * values
    elif "embed" not in name:
        values *= 1.5 * shape[-1] ** -0.5
    return values.astype(np.float32)
