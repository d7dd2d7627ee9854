"""Reads random Hugging Face directories of current families and compares them with transformers, in a table.

    pip install torch==2.15.0 transformers==5.23.0
    python tests/golden/compare_directories.py

By hand, in an environment that has both and this project. Each of DIRECTORIES is written as transformers
writes it, with the names and fields of a real model of that family but small odd sizes: in one file or in
shards, tied or not, in 32, 16, 8 or 4 bits. What a source reads is computed with the tests' numpy model; the
table has the largest difference of its logits to those of transformers in f32, relative to the largest logit,
or why the directory is refused.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch  # type: ignore[import-not-found]
import transformers  # type: ignore[import-not-found]
from safetensors.numpy import load_file, save_file

sys.path.append(str(Path(__file__).parents[2]))

from shortfin_apps.llm.builder.sources.hf_directory import HfDirectorySource
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.model.reference.forward import forward
from tests.builder.golden_families import stored_weights
from tests.builder.sources.test_hf_matrices import save
from tests.builder.sources.test_hf_quantised import AWQ_ORDER, packed
from tests.golden.family_weights import weight
from tests.golden.make_family_logits import MODELS, SIZES, WITH_TEXT_CONFIG, rope

Array = npt.NDArray[Any]
PROMPT = [(37 * i + i // 5) % 83 for i in range(1, 71)]
GROUP = 32
COMMON: dict[str, Any] = {**SIZES, "hidden_size": 96, "intermediate_size": 160, "head_dim": 24}
TIED = {"tie_word_embeddings": True}
WIDE = {"head_dim": 32}  # whole blocks of 32
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=64)
LLAMA3 = rope(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
LONG_FACTORS = {"short_factor": [1.0] * 12, "long_factor": [1.0 + 0.5 * i for i in range(12)]}
PHI = {"num_key_value_heads": 6, "head_dim": None}
PHI_LONG = {
    **PHI,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 96,
    "original_max_position_embeddings": 64,
}
GEMMA = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "query_pre_attn_scalar": 24,
    "sliding_window": 21,
    "eos_token_id": [2, 3],
    **TIED,
}
GEMMA4 = {"hidden_size": 64}  # whose root, the scale of embeddings, is the same in all types
LATENT_SIZES = {"head_dim": None}  # which follow from those of the latent
MOE = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 32}


def quantised(method: str) -> dict[str, Any]:
    """The `quantization_config` of one of FORMATS."""
    int4 = {"bits": 4, "group_size": GROUP}
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    known: dict[str, dict[str, Any]] = {
        "gptq": {"quant_method": "gptq", **int4, "desc_act": False, "sym": True},
        "awq": {"quant_method": "awq", **int4, "version": "gemm", "zero_point": True},
        "int4": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": ["lm_head"],
        },
        "fp8": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 32]},
    }
    return known[method]


@dataclass(frozen=True)
class Directory:
    """`kind` is transformers' class without `ForCausalLM`; `changes` differ from COMMON."""

    name: str
    kind: str
    changes: dict[str, Any] = field(default_factory=dict)
    stored: str = "bf16"  # or f32, f16, or one of FORMATS
    shards: bool = False

    @property
    def dtype(self) -> Any:
        return {"f16": torch.float16, "bf16": torch.bfloat16}.get(self.stored, torch.float32)


DIRECTORIES = [
    Directory("Llama 2", "Llama", {"num_key_value_heads": 6}, "f16", shards=True),
    Directory("TinyLlama", "Llama", {"rms_norm_eps": 1e-5}),
    Directory("Llama 3.1", "Llama", LLAMA3, shards=True),
    Directory("Llama 3.2", "Llama", {**TIED, **LLAMA3}),
    Directory("Llama, linear rope", "Llama", rope("linear", factor=2.5), "f32"),
    Directory("Llama, yarn, biases", "Llama", {"attention_bias": True, **YARN}, "f16"),
    Directory("Llama, GPTQ", "Llama", WIDE, "gptq"),
    Directory("Llama, AWQ", "Llama", {**LLAMA3, **WIDE}, "awq"),
    Directory("Llama, compressed-tensors W4A16", "Llama", {**LLAMA3, **WIDE}, "int4"),
    Directory("Llama, fp8", "Llama", {**LLAMA3, **WIDE}, "fp8"),
    Directory("SmolLM2", "Llama", {**TIED, "rope_theta": 1e5}),
    Directory("SmolLM3", "SmolLM3", {"num_hidden_layers": 5, **TIED, **rope("default")}),
    Directory("Mistral 0.1", "Mistral", {"sliding_window": 33}),
    Directory("Mistral 0.3", "Mistral", {"sliding_window": None, "rope_theta": 1e6}, shards=True),
    Directory("Mistral Nemo", "Mistral", {"sliding_window": None, "head_dim": 32, "rope_theta": 1e6}),
    Directory("Qwen2", "Qwen2", {**TIED, "rope_theta": 1e6}),
    Directory("Qwen2.5", "Qwen2", {"rope_theta": 1e6}, shards=True),
    Directory("Qwen2.5, yarn", "Qwen2", YARN, "f16"),
    Directory(
        "Qwen2, windows",
        "Qwen2",
        {"sliding_window": 24, "use_sliding_window": True, "max_window_layers": 1},
    ),
    Directory("Qwen2.5, AWQ", "Qwen2", {"rope_theta": 1e6, **WIDE}, "awq"),
    Directory("Qwen3", "Qwen3", {**TIED, "rope_theta": 1e6}),
    Directory("Qwen3, fp8", "Qwen3", {"rope_theta": 1e6, **WIDE}, "fp8"),
    Directory("Qwen3-MoE", "Qwen3Moe", {**MOE, "norm_topk_prob": True}, shards=True),
    Directory("Mixtral", "Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    Directory("Phi-3", "Phi3", {**PHI, "sliding_window": 47}),
    Directory("Phi-3, 128k", "Phi3", {**PHI_LONG, **rope("longrope", **LONG_FACTORS)}),
    Directory("Phi-4", "Phi3", {**PHI, "num_key_value_heads": 2, "sliding_window": None}, shards=True),
    Directory("Granite 3", "Granite", {**TIED, "embedding_multiplier": 12.0, "logits_scaling": 8.0}),
    Directory(
        "Granite 4 dense",
        "GraniteMoeHybrid",
        {
            **TIED,
            "layer_types": ["attention"] * 2,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 160,
            "position_embedding_type": "rope",
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.2,
            "logits_scaling": 8.0,
            "mamba_n_heads": 8,
        },
    ),
    Directory("OLMo2", "Olmo2", {"rope_theta": 5e5, "head_dim": None}),
    Directory("Gemma 2", "Gemma2", {**GEMMA, "attn_logit_softcapping": 8.0}),
    Directory("Gemma 3", "Gemma3", {**GEMMA, "num_hidden_layers": 7}, shards=True),
    Directory("Gemma 4 31B", "Gemma4", GEMMA4 | MODELS["gemma4"][1]),
    Directory("Gemma 4 E2B", "Gemma4", GEMMA4 | MODELS["gemma4-e"][1], shards=True),
    Directory("Gemma 4 26B-A4B", "Gemma4", GEMMA4 | MODELS["gemma4-moe"][1]),
    Directory("Gemma 4 unified", "Gemma4Unified", GEMMA4 | MODELS["gemma4-unified"][1]),
    Directory("Ministral 3", "Ministral3", MODELS["ministral3"][1], shards=True),
    Directory("Qwen3.5", "Qwen3_5", MODELS["qwen35"][1]),
    Directory("Qwen3.5-MoE", "Qwen3_5Moe", MODELS["qwen35-moe"][1], shards=True),
    Directory("Qwen3-Next", "Qwen3Next", MODELS["qwen3-next"][1]),
    Directory("gpt-oss", "GptOss", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 21}),
    Directory("DeepSeek-V2-Lite", "DeepseekV2", {**LATENT_SIZES, **MODELS["deepseek2"][1]}),
    Directory("DeepSeek-V2", "DeepseekV2", {**LATENT_SIZES, **MODELS["deepseek2-groups"][1]}, shards=True),
    Directory("DeepSeek-V3", "DeepseekV3", {**LATENT_SIZES, **MODELS["deepseek3"][1]}),
    Directory("GLM-4.7-Flash", "Glm4MoeLite", {**LATENT_SIZES, **MODELS["glm4-moe-lite"][1]}),
    Directory("GLM-4.5", "Glm4Moe", MODELS["glm4-moe"][1], shards=True),
]


def int4(values: Array, rng: np.random.Generator) -> tuple[Array, Array, Array, Array]:
    """Integers [out, in], scales and zeros [out, in / GROUP] near `values`; and what they stand for."""
    groups = values.reshape(len(values), -1, GROUP)
    scales = ((groups.max(axis=2) - groups.min(axis=2)) / 15).astype(np.float16)
    zeros = rng.integers(6, 10, scales.shape)
    wide = scales.astype(np.float32).repeat(GROUP, axis=1)
    centre = zeros.repeat(GROUP, axis=1)
    quants = np.clip(np.rint(values / wide) + centre, 0, 15).astype(np.int64)
    return quants, scales, zeros, (wide * (quants - centre)).astype(np.float32)


def gptq(values: Array, rng: np.random.Generator) -> tuple[dict[str, Array], Array]:
    quants, scales, zeros, meant = int4(values, rng)
    out, columns = values.shape
    words = packed(quants.T.reshape(columns // 8, 8, out).swapaxes(1, 2).reshape(-1, 8))
    stored = {
        "qweight": words.reshape(columns // 8, out),
        "qzeros": packed(zeros.T - 1),
        "scales": np.ascontiguousarray(scales.T),
        "g_idx": np.arange(columns, dtype=np.int32) // GROUP,
    }
    return stored, meant


def awq(values: Array, rng: np.random.Generator) -> tuple[dict[str, Array], Array]:
    quants, scales, zeros, meant = int4(values, rng)
    stored = {
        "qweight": packed(quants.T, AWQ_ORDER),
        "qzeros": packed(zeros.T, AWQ_ORDER),
        "scales": scales.T,
    }
    return stored, meant


def packed_int4(values: Array, rng: np.random.Generator) -> tuple[dict[str, Array], Array]:
    quants, scales, _, _ = int4(values, rng)
    meant = scales.astype(np.float32).repeat(GROUP, axis=1) * (quants - 8).astype(np.float32)
    return {
        "weight_packed": packed(quants),
        "weight_scale": scales,
        "weight_shape": np.array(values.shape, np.int32),
    }, meant.astype(np.float32)


def fp8(values: Array, rng: np.random.Generator) -> tuple[dict[str, Array], Array]:
    tiles = [-(-size // GROUP) for size in values.shape]
    scale = rng.uniform(0.01, 0.02, tiles).astype(np.float32)
    wide = scale.repeat(GROUP, axis=0).repeat(GROUP, axis=1)[: values.shape[0], : values.shape[1]]
    stored = (values / wide).astype(ml_dtypes.float8_e4m3fn)
    return {"weight": stored, "weight_scale_inv": scale}, stored.astype(np.float32) * wide


Quantise = Callable[[Array, np.random.Generator], tuple[dict[str, Array], Array]]
FORMATS: dict[str, Quantise] = {"gptq": gptq, "awq": awq, "int4": packed_int4, "fp8": fp8}


def write(directory: Directory, folder: Path) -> Array:
    """Writes it with random weights, and returns transformers' logits of the same values, in f32."""
    kind = directory.kind
    values = {**COMMON, **directory.changes}
    if values["head_dim"] is None:
        del values["head_dim"]
    text = "Text" if kind in WITH_TEXT_CONFIG else ""
    config = getattr(transformers, f"{kind}{text}Config")(**values)
    cls = getattr(transformers, f"{kind}ForCausalLM")
    model = cls(config).to(directory.dtype)
    model.save_pretrained(folder, max_shard_size="40KB" if directory.shards else "1GB")
    for file in folder.glob("*.safetensors"):
        save_file(
            {
                name: weight(name, old.shape).astype(old.dtype) if old.ndim else old
                for name, old in load_file(file).items()
            },
            file,
            {"format": "pt"},
        )
    if directory.stored in FORMATS:
        return quantise(directory, cls, folder)
    return logits_of(cls, folder)


def logits_of(cls: Any, folder: Path) -> Array:
    """[PROMPT, vocab] f32. The model reads its file as long as it lives."""
    model = cls.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        logits: Array = model(torch.tensor([PROMPT])).logits[0].numpy()
    return logits


def quantise(directory: Directory, cls: Any, folder: Path) -> Array:
    """Replaces the matrices of the layers; the logits are those of what they mean."""
    file, rng = folder / "model.safetensors", np.random.default_rng(0)
    plain = dict(load_file(file))
    stored = dict(plain)
    for name in [name for name in plain if name.endswith("proj.weight")]:
        parts, plain[name] = FORMATS[directory.stored](stored.pop(name), rng)
        stored |= {f"{name.removesuffix('.weight')}.{part}": each for part, each in parts.items()}
    save_file(plain, file, {"format": "pt"})
    logits = logits_of(cls, folder)
    save(stored, file)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": quantised(directory.stored)}
    path.write_text(json.dumps(config))
    return logits


def outcome(directory: Directory, folder: Path) -> str:
    expected = write(directory, folder)
    try:
        source = HfDirectorySource(folder, name=directory.name)
    except BuildError as error:
        return f"refused: {str(error).replace(f'{folder}', '.')}"
    found = forward(source.spec, stored_weights(source), np.array(PROMPT))
    return f"{np.abs(found - expected).max() / np.abs(expected).max():.1e}"


def main() -> None:
    torch.manual_seed(0)
    transformers.utils.logging.set_verbosity_error()
    print("| directory | stored | files | largest difference |\n|---|---|---|---|")
    for directory in DIRECTORIES:
        with TemporaryDirectory() as folder:
            path = Path(folder)
            try:
                told = outcome(directory, path)
            except Exception as error:
                told = f"FAILED: {error!r}"
            files = len(list(path.glob("*.safetensors")))
        print(f"| {directory.name} | {directory.stored} | {files} | {told} |", flush=True)


if __name__ == "__main__":
    main()
