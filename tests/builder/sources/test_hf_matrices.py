"""Hugging Face directories with quantised matrices, read as sources."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file

from shortfin_apps.llm.builder.sources.hf_directory import HfDirectorySource
from shortfin_apps.llm.builder.target import resolve_target
from shortfin_apps.llm.builder.weights.layout import weight_layout
from shortfin_apps.llm.builder.weights.own_types import with_own_types
from shortfin_apps.llm.builder.weights.write import plan_weights
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.model.spec import BuildOptions
from shortfin_apps.llm.model.weight_blocks import BlockType
from tests.builder.model_files import write_hf
from tests.builder.sources.test_hf_quantised import AWQ_ORDER, packed

Array = npt.NDArray[Any]
AWQ: dict[str, object] = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 32,
    "version": "gemm",
    "zero_point": True,
}
FP8: dict[str, object] = {"quant_method": "fp8", "weight_block_size": [32, 32]}
PROJECTION = "model.layers.0.self_attn.v_proj"
OURS = "blk.0.attn_v.weight"
_SAFETENSORS = {"float8_e4m3fn": "F8_E4M3", "float32": "F32", "float16": "F16", "int32": "I32"}


def write_quantised(folder: Path, config: dict[str, object]) -> tuple[Path, dict[str, Array]]:
    """A directory with random matrices of the format in all layers; their values by Hugging Face's names."""
    directory = write_hf(folder, config={"quantization_config": config})
    tensors: dict[str, Array] = dict(load_file(directory / "model.safetensors"))
    rng, values = np.random.default_rng(0), {}
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        stem, shape = name.removesuffix(".weight"), tensors.pop(name).shape
        stored, values[name] = (_awq if config is AWQ else _fp8)(rng, shape)
        tensors |= {f"{stem}.{ending}": each for ending, each in stored.items()}
    save(tensors, directory / "model.safetensors")
    return directory, values


def save(tensors: dict[str, Array], path: Path) -> None:
    """As the library does, which has no 8-bit floats."""
    header, data = {}, b""
    for name, each in tensors.items():
        content = np.ascontiguousarray(each).tobytes()
        offsets = [len(data), len(data) + len(content)]
        kind = _SAFETENSORS[str(each.dtype)]
        header[name] = {"dtype": kind, "shape": each.shape, "data_offsets": offsets}
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def _awq(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[dict[str, Array], Array]:
    out, columns = shape
    quants = rng.integers(0, 16, shape)
    scales = rng.uniform(1e-3, 1e-2, (out, columns // 32)).astype(np.float16)
    zeros = rng.integers(0, 16, scales.shape)
    wide, of_column = scales.astype(np.float32).repeat(32, axis=1), zeros.repeat(32, axis=1)
    stored = {
        "qweight": packed(quants.T, AWQ_ORDER),
        "qzeros": packed(zeros.T, AWQ_ORDER),
        "scales": scales.T,
    }
    return stored, wide * (quants - of_column).astype(np.float32)


def _fp8(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[dict[str, Array], Array]:
    weight = rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)
    scale = rng.uniform(0.5, 1, [size // 32 for size in shape]).astype(np.float32)
    values = weight.astype(np.float32) * scale.repeat(32, axis=0).repeat(32, axis=1)
    return {"weight": weight, "weight_scale_inv": scale}, values


@pytest.mark.parametrize("config", [AWQ, FP8])
def test_values_are_those_of_the_format(tmp_path: Path, config: dict[str, object]) -> None:
    directory, values = write_quantised(tmp_path, config)
    source = HfDirectorySource(directory)
    np.testing.assert_allclose(source.tensor(OURS), values[f"{PROJECTION}.weight"], rtol=0, atol=1e-7)
    assert source.tensor("blk.0.attn_norm.weight").shape == (64,)


@pytest.mark.parametrize("device", ["cpu:znver4", "hip:gfx942"])
def test_integers_of_4_bits_are_kept(tmp_path: Path, device: str) -> None:
    """Beside embedding and head in floats."""
    source = HfDirectorySource(write_quantised(tmp_path, AWQ)[0])
    options = with_own_types(source, BuildOptions(device=device))
    target = resolve_target(device)
    kind = BlockType(4, has_minima=True, group=32)
    for weight in plan_weights(source.spec):
        blocks = weight_layout(weight.name, source.spec, options, target).blocks
        is_matrix = weight.name.startswith("blk.") and not weight.name.endswith("norm.weight")
        assert blocks == (kind if is_matrix else None)
        if blocks is not None:
            kept = weight.load_blocks(source, blocks).dequantise()
            np.testing.assert_array_equal(kept, weight.load(source))


def test_8_bit_floats_become_bf16(tmp_path: Path) -> None:
    source = HfDirectorySource(write_quantised(tmp_path, FP8)[0])
    options = with_own_types(source, BuildOptions(weights="q4"))
    assert (options.weights, options.block_types) == ("bf16", ())


def test_a_matrix_without_all_its_tensors_is_refused(tmp_path: Path) -> None:
    directory, _ = write_quantised(tmp_path, AWQ)
    path = directory / "model.safetensors"
    tensors = dict(load_file(path))
    del tensors[f"{PROJECTION}.scales"]
    save(tensors, path)
    with pytest.raises(BuildError, match=r"`blk\.0\.attn_v\.weight` lacks `scales`"):
        HfDirectorySource(directory)
