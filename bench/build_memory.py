"""Prints the peak memory of building a random model of the shape of Llama 3.1 8B, from a GGUF file of 4 bits.

    python bench/build_memory.py FOLDER [--layers 32] [options of shortfin-llm build]

The file has the types that llama.cpp's Q4_K_M gives tensors, and 4.9 GB; it is written to FOLDER, unless it
is there, and the artefact beside it. Of the processes of a build, the largest counts, with the pages of the
files that it has mapped.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter

from bench.gpu.models import MODELS
from shortfin_apps.llm.model.family import tensor_shapes
from shortfin_apps.llm.model.spec import ModelSpec

# The file does not contain the rotary scaling factors.
SPEC = replace(MODELS["llama-3.1-8b"].spec, name="8b", max_position_embeddings=8192, rope_scaling=None)
FINER = ("attn_v", "ffn_down")  # Q6_K in half of the layers
TERM_BYTES = {GGMLQuantizationType.Q4_K: (0, 2), GGMLQuantizationType.Q6_K: (208,)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=SPEC.num_hidden_layers)
    arguments, options = parser.parse_known_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    path = arguments.folder / f"random-{arguments.layers}.gguf"
    if not path.exists():
        write_model(path, replace(SPEC, num_hidden_layers=arguments.layers))
    started = time.monotonic()
    out = arguments.folder / path.stem
    command = ["build", str(path), "-o", str(out), "--no-cache", *options]
    subprocess.run([sys.executable, "-m", "shortfin_apps.llm", *command], check=True)
    peak_kib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    size_gb = sum(each.stat().st_size for each in out.iterdir()) / 1e9
    took = time.monotonic() - started
    print(f"{peak_kib / (1 << 20):.1f} GiB at most, {took:.0f} s, an artefact of {size_gb:.1f} GB")


def write_model(path: Path, spec: ModelSpec) -> None:
    """Write a GGUF file of random weights, with one tensor at a time in memory."""
    writer = GGUFWriter(path, spec.architecture)
    _add_metadata(writer, spec)
    shapes = tensor_shapes(spec)
    for name, shape in shapes.items():
        kind = type_of(name, spec)
        _, size = GGML_QUANT_SIZES[kind]
        if kind is GGMLQuantizationType.F32:
            writer.add_tensor_info(name, shape, np.dtype(np.float32), 4 * shape[0])
        else:
            bytes_shape = (shape[0], shape[1] // GGML_QUANT_SIZES[kind][0] * size)
            writer.add_tensor_info(name, bytes_shape, np.dtype(np.uint8), int(np.prod(bytes_shape)), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for data in _data(shapes, spec):
        writer.write_tensor_data(data)
    writer.close()


def type_of(name: str, spec: ModelSpec) -> GGMLQuantizationType:
    """Choose the type roughly like llama.cpp does for Q4_K_M."""
    if name.endswith("norm.weight"):
        return GGMLQuantizationType.F32
    if name == spec.head_weight:
        return GGMLQuantizationType.Q6_K
    block, kind = name.split(".")[1:3] if name.startswith("blk.") else ("0", name)
    is_finer = kind in FINER and int(block) % 2 == 0
    return GGMLQuantizationType.Q6_K if is_finer else GGMLQuantizationType.Q4_K


def _data(shapes: dict[str, tuple[int, ...]], spec: ModelSpec) -> Iterator[npt.NDArray[np.generic]]:
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        kind = type_of(name, spec)
        if kind is GGMLQuantizationType.F32:
            yield np.ones(shape, np.float32)
            continue
        weights, size = GGML_QUANT_SIZES[kind]
        blocks = np.frombuffer(bytearray(rng.bytes(int(np.prod(shape)) // weights * size)), np.uint8)
        blocks = blocks.reshape(-1, size)
        for at in TERM_BYTES[kind]:
            blocks[:, at : at + 2] = np.array([1e-4], np.float16).view(np.uint8)
        yield blocks.reshape(shape[0], -1)


def _add_metadata(writer: GGUFWriter, spec: ModelSpec) -> None:
    writer.add_block_count(spec.num_hidden_layers)
    writer.add_context_length(spec.max_position_embeddings)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_attention_heads)
    writer.add_head_count_kv(spec.num_key_value_heads)
    writer.add_layer_norm_rms_eps(spec.rms_norm_eps)
    writer.add_rope_freq_base(spec.rope_theta)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list([f"w{number}" for number in range(spec.vocab_size)])
    writer.add_token_types([1] * spec.vocab_size)
    writer.add_token_merges([])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(1)


if __name__ == "__main__":
    main()
