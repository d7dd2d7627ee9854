"""The tiny models of tests/golden/family_logits.json as a Hugging Face directory and as a GGUF file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from shortfin_apps.llm.builder.sources.base import ModelSource
from shortfin_apps.llm.builder.weights.write import Weight, plan_weights
from tests.builder.model_files import interleaved, write_gguf
from tests.golden.family_weights import weight

GOLDEN = json.loads(Path(__file__).parents[1].joinpath("golden", "family_logits.json").read_text())
MODELS: tuple[str, ...] = tuple(GOLDEN["models"])
PROMPT = np.array(GOLDEN["prompt"])
POSITIONS: list[int] = GOLDEN["positions"]  # numbers of tokens

WITH_WINDOWS = ("gemma2", "gemma3", "gpt-oss", "phi3")
# Architectures whose q and k are permuted by the converter.
WITH_PAIRS = ("granite", "llama", "mistral3", "smollm3")

# Architectures of GGUF files that have another name.
ARCHITECTURES = {
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe": "glm4moe",
    "glm4_moe_lite": "deepseek2",
    "gemma4_unified": "gemma4",
    "gpt_oss": "gpt-oss",
    "ministral3": "mistral3",
    "mixtral": "llama",
    "qwen3_5": "qwen35",
    "qwen3_5_moe": "qwen35moe",
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
}
SCALARS = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
    "logit_scale": "logits_scaling",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}

# Tensors of draft layers, as llama.cpp's converter names them.
NEXTN = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head_norm",
}
FROM_ZERO = ("gemma2", "gemma3", "qwen35", "qwen3next")  # to whose weights of norms the converter adds 1
ROUTER = {"scale": "ffn_gate_inp.scale", "per_expert_scale": "ffn_down_exps.scale"}  # of Gemma 4
SHARED_GATE = "shared_expert_gate.weight"  # a vector in GGUF files

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class GoldenFamily:
    """One of MODELS: `config` is its config.json, `tensors` go by Hugging Face's names."""

    config: dict[str, Any]
    tensors: dict[str, F32]
    logits: F32  # [POSITIONS, vocab]

    @classmethod
    def of(cls, name: str) -> GoldenFamily:
        made = GOLDEN["models"][name]
        tensors = {n: weight(n, tuple(shape)) for n, shape in made["shapes"].items()}
        return cls(deepcopy(made["config"]), tensors, np.array(made["logits"], np.float32))

    def add_draft_layer(self, like: int = 1) -> None:
        """Add tensors of a draft layer, with the shapes of layer `like`, as Qwen or DeepSeek names them."""
        hidden, prefix = self.config["hidden_size"], f"model.layers.{like}."
        count, is_qwen = self.config["num_hidden_layers"], self.config["model_type"].startswith("qwen")
        own = "mtp." if is_qwen else f"model.layers.{count}."
        layer = "mtp.layers.0." if is_qwen else own
        shapes = {
            name.replace(prefix, layer): values.shape
            for name, values in self.tensors.items()
            if name.startswith(prefix)
        }
        norms, projection = [name for name in NEXTN if name != "fc"], "fc"
        if not is_qwen:
            norms, projection = ["enorm", "hnorm", "shared_head.norm"], "eh_proj"
            vocab = (self.config["vocab_size"], hidden)
            shapes |= {f"{own}{name}.weight": vocab for name in ("embed_tokens", "shared_head.head")}
        shapes |= {f"{own}{name}.weight": (hidden,) for name in norms}
        shapes[f"{own}{projection}.weight"] = (hidden, 2 * hidden)
        self.tensors.update((name, weight(name, shape)) for name, shape in shapes.items())

    def write_hf(self, directory: Path) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        directory.joinpath("config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, directory / "model.safetensors")
        return directory

    def write_gguf(
        self,
        path: Path,
        other_keys: Mapping[str, int | float | str] | None = None,
        quantised: gguf.GGMLQuantizationType | None = None,
    ) -> Path:
        """With the names and keys that llama.cpp's converter gives it, but for `other_keys`.

        Matrices may be `quantised`, but routers are not.
        """
        config, kind = self.config, self.config["model_type"].removesuffix("_text")
        architecture = ARCHITECTURES.get(kind, kind)
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        has_window = architecture in WITH_WINDOWS and config["sliding_window"]
        keys: dict[str, int | float | str | list[int]] = {
            "block_count": config["num_hidden_layers"],
            "context_length": config["max_position_embeddings"],
            "embedding_length": config["hidden_size"],
            "feed_forward_length": config["intermediate_size"],
            "attention.head_count": config["num_attention_heads"],
            "attention.head_count_kv": config["num_key_value_heads"],
            "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
            "attention.key_length": head_dim,
            "attention.value_length": head_dim,
            "rope.dimension_count": int(head_dim * _rotated_share(config)),
            "rope.freq_base": _rope(config)["rope_theta"],
            **_rope_keys(config),
            **_expert_keys(config),
            **_delta_net_keys(config),
            **_latent_keys(config),
            **_score_keys(config),
            **(_gemma4_keys(config) if architecture == "gemma4" else {}),
            **({"attention.sliding_window": config["sliding_window"]} if has_window else {}),
            **{key: config[field] for key, field in SCALARS.items() if config.get(field)},
            **(other_keys or {}),
        }
        whole = self._gguf_tensors(architecture)
        floats = (name for name in whole if "gate_inp" in name or name.endswith(".bias"))
        otherwise = dict.fromkeys(floats, gguf.GGMLQuantizationType.F32)
        return write_gguf(
            path, architecture=architecture, keys=keys, whole=whole, quantised=quantised, otherwise=otherwise
        )

    def _gguf_tensors(self, architecture: str) -> dict[str, F32]:
        kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
        count = self.config["num_hidden_layers"]
        names = gguf.get_tensor_name_map(kinds[architecture], count + 1)
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        tensors = {}
        if architecture == "gemma4":
            whole = {f"{n}.weight" if ".experts." in n else n: each for n, each in self.tensors.items()}
        else:
            whole = _with_stacked_experts(self.tensors)
        whole |= {name: gate[0] for name, gate in whole.items() if name.endswith(SHARED_GATE)}
        suffixed = {  # as the converter looks the names up
            "e_score_correction_bias": "e_score_correction.bias",
            "layer_scalar": "layer_scalar.weight",
        }
        for old, new in suffixed.items():
            whole = {name.replace(old, new): tensor for name, tensor in whole.items()}
        if architecture == "deepseek2":
            whole = dict(_with_expansions_apart(self.config, whole))
        elif architecture == "qwen3next":
            whole = dict(_with_inputs_apart(self.config, whole))
        elif "linear_num_value_heads" in self.config:
            whole = dict(_with_tiled_heads(self.config, whole))
        drafts = {f"mtp.{name}.weight": f"blk.{count}.nextn.{ours}.weight" for name, ours in NEXTN.items()}
        drafts["mtp.embed_tokens.weight"] = f"blk.{count}.nextn.embed_tokens.weight"
        for hf_name, tensor in whole.items():
            *layer, kind = hf_name.rpartition(".router.")
            if kind in ROUTER:
                number = layer[0].rpartition(".")[2]
                tensors[f"blk.{number}.{ROUTER[kind]}"] = tensor
                continue
            of_layer = hf_name.replace("mtp.layers.0.", f"model.layers.{count}.")
            name = drafts.get(hf_name) or names.get_name(of_layer, try_suffixes=(".weight", ".bias"))
            assert name is not None, hf_name
            if name.endswith("_sinks"):
                name = f"{name}.weight"
            rotated = heads.get(hf_name.split(".")[-2]) if architecture in WITH_PAIRS else None
            tensors[name] = interleaved(tensor, self.config[rotated]) if rotated else tensor
            from_zero = architecture.startswith(FROM_ZERO) and not name.endswith("ssm_norm.weight")
            if from_zero and name.endswith("norm.weight"):
                tensors[name] = tensor + 1
        rope = _rope(self.config)
        if architecture == "gemma4":
            size = next(iter(self.config["per_layer_config"].values()))["head_dim"]
            kept = int(size * rope["partial_rotary_factor"] / 2)
            tensors["rope_freqs.weight"] = np.array([1.0] * kept + [1e30] * (size // 2 - kept), np.float32)
        for length in ("short", "long") if rope["rope_type"] == "longrope" else ():
            tensors[f"rope_factors_{length}.weight"] = np.array(rope[f"{length}_factor"], np.float32)
        return tensors


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """That of layers without a window."""
    rope: dict[str, Any] = config["rope_parameters"]
    full: dict[str, Any] = rope.get("full_attention", rope)
    return full


def _expert_keys(config: dict[str, Any]) -> dict[str, int | float | str]:
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    count = next((config[name] for name in names if config.get(name)), None)
    if not count:
        return {}
    features, shared = (config.get(f"{kind}_intermediate_size") for kind in ("moe", "shared_expert"))
    return {
        "expert_count": count,
        "expert_used_count": config.get("top_k_experts") or config["num_experts_per_tok"],
        **({"expert_feed_forward_length": features} if features else {}),
        **({"expert_shared_feed_forward_length": shared} if shared else {}),
    }


def _rotated_share(config: dict[str, Any]) -> float:
    share: float = _rope(config).get("partial_rotary_factor") or config.get("partial_rotary_factor", 1.0)
    return share


def _delta_net_keys(config: dict[str, Any]) -> dict[str, int | float | str]:
    if "linear_num_value_heads" not in config:
        return {}
    heads = config["linear_num_value_heads"]
    return {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * config["linear_value_head_dim"],
        "full_attention_interval": config["layer_types"].index("full_attention") + 1,
    }


def _latent_keys(config: dict[str, Any]) -> dict[str, int | float | str]:
    if "kv_lora_rank" not in config:
        return {}
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    queries = {"attention.q_lora_rank": config["q_lora_rank"]} if config["q_lora_rank"] else {}
    return {
        **queries,
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rotated,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": rotated,
    }


def _gemma4_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Heads of layers without a window and with one, and arrays with an item for each layer."""
    windows = [each == "sliding_attention" for each in config["layer_types"]]
    full = next(iter(config["per_layer_config"].values()))
    count, shared = config["num_hidden_layers"], config["num_kv_shared_layers"]
    arrays: dict[str, Any] = {"attention.sliding_window_pattern": windows}
    if config["use_double_wide_mlp"]:
        width = config["intermediate_size"]
        arrays["feed_forward_length"] = [width * (1 + (n >= count - shared)) for n in range(count)]
    if heads := full.get("num_key_value_heads"):
        swa = config["num_key_value_heads"]
        arrays["attention.head_count_kv"] = [swa if window else heads for window in windows]
    return {
        **arrays,
        "attention.key_length": full["head_dim"],
        "attention.value_length": full["head_dim"],
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length_swa": config["head_dim"],
        "attention.sliding_window": config["sliding_window"],
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "rope.dimension_count": full["head_dim"],
        "rope.dimension_count_swa": config["head_dim"],
        "rope.freq_base_swa": config["rope_parameters"]["sliding_attention"]["rope_theta"],
    }


def _score_keys(config: dict[str, Any]) -> dict[str, int | float | str]:
    """How experts are scored, in DeepSeek's models and GLM's."""
    if "first_k_dense_replace" not in config:
        return {}
    dense = config.get("mlp_layer_types", []).count("dense")
    return {
        "leading_dense_block_count": dense or config["first_k_dense_replace"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": bool(config["norm_topk_prob"]),
        "expert_gating_func": 1 if config["model_type"] == "deepseek_v2" else 2,
        "expert_group_count": config["n_group"] or 1,
        "expert_group_used_count": config["topk_group"] or 1,
    }


def _with_expansions_apart(config: dict[str, Any], tensors: dict[str, F32]) -> Iterator[tuple[str, F32]]:
    """The matrices of keys, transposed, and of values of each head, as the converter has them."""
    heads, plain = config["num_attention_heads"], config["qk_nope_head_dim"]
    for name, tensor in tensors.items():
        if name.endswith(".kv_b_proj.weight"):
            to_keys, to_values = np.split(tensor.reshape(heads, -1, tensor.shape[1]), [plain], axis=1)
            yield name.replace("kv_b_proj", "k_b_proj"), np.ascontiguousarray(to_keys.swapaxes(1, 2))
            yield name.replace("kv_b_proj", "v_b_proj"), np.ascontiguousarray(to_values)
        else:
            yield name, tensor


def _with_tiled_heads(config: dict[str, Any], tensors: dict[str, F32]) -> Iterator[tuple[str, F32]]:
    """Value heads that share a key head so many apart as there are key heads, as the converter has them."""
    heads, key_heads = config["linear_num_value_heads"], config["linear_num_key_heads"]
    keys = 2 * key_heads * config["linear_key_head_dim"]
    order = np.arange(heads).reshape(key_heads, -1).T.reshape(-1)
    for name, tensor in tensors.items():
        *_, kind = name.removesuffix(".weight").partition(".linear_attn.")
        match kind:
            case "in_proj_qkv" | "conv1d":
                rows = tensor.reshape(len(tensor), -1)
                yield name, np.concatenate([rows[:keys], _by_head(rows[keys:], order)])
            case "A_log":
                yield name, -np.exp(tensor[order])
            case "dt_bias":
                yield name.replace("dt_bias", "dt_proj.bias"), tensor[order]
            case "in_proj_z" | "in_proj_a" | "in_proj_b":
                yield name, _by_head(tensor, order)
            case "out_proj":
                yield name, _by_head(tensor.T, order).T.copy()
            case _:
                yield name, tensor


def _with_inputs_apart(config: dict[str, Any], tensors: dict[str, F32]) -> Iterator[tuple[str, F32]]:
    """q, k and v of all heads apart from the gates, as the converter has them; b and a stay together."""
    heads, key_heads = config["linear_num_value_heads"], config["linear_num_key_heads"]
    key, values = config["linear_key_head_dim"], heads // key_heads * config["linear_value_head_dim"]
    for name, tensor in tensors.items():
        layer, _, kind = name.removesuffix(".weight").partition(".linear_attn.")
        match kind:
            case "in_proj_qkvz":
                of_heads = tensor.reshape(key_heads, -1, tensor.shape[1])
                parts = np.split(of_heads, np.cumsum([key, key, values]), axis=1)
                *qkv, gates = (part.reshape(-1, tensor.shape[1]) for part in parts)
                yield f"{layer}.linear_attn.in_proj_qkv.weight", np.concatenate(qkv)
                yield f"{layer}.linear_attn.in_proj_z.weight", gates
            case "conv1d":
                yield name, tensor.reshape(len(tensor), -1)
            case "A_log":
                yield name, -np.exp(tensor)
            case "dt_bias":
                yield name.replace("dt_bias", "dt_proj.bias"), tensor
            case _:
                yield name, tensor


def _by_head(rows: F32, order: npt.NDArray[np.int64]) -> F32:
    """`rows` of all heads, by heads in another order."""
    return rows.reshape(len(order), -1, *rows.shape[1:])[order].reshape(rows.shape)


def _with_stacked_experts(tensors: dict[str, F32]) -> dict[str, F32]:
    """The experts of a layer in one tensor, named as the converter looks its name up."""
    experts: dict[str, dict[int, F32]] = {}
    rest = {}
    for name, tensor in tensors.items():
        if ".experts." not in name:
            rest[name] = tensor
            continue
        layer, expert = name.split(".experts.")
        if not expert[0].isdigit():
            rest |= _apart(f"{layer}.experts.", expert, tensor)
            continue
        number, kind = expert.split(".", 1)
        experts.setdefault(f"{layer}.experts.{kind}", {})[int(number)] = tensor
    return rest | {name: np.stack([each[n] for n in sorted(each)]) for name, each in experts.items()}


def _apart(prefix: str, name: str, tensor: F32) -> dict[str, F32]:
    """Of stacked tensors of gpt-oss: matrices [experts, out, in] and biases, gate and up by themselves."""
    ending = "bias" if name.endswith("_bias") else "weight"
    outputs = tensor if ending == "bias" else tensor.swapaxes(1, 2)
    if name.startswith("down"):
        return {f"{prefix}down_proj.{ending}": outputs}
    return {f"{prefix}{kind}_proj.{ending}": outputs[:, i::2] for i, kind in enumerate(("gate", "up"))}


def _rope_keys(config: dict[str, Any]) -> dict[str, int | float | str]:
    rope = _rope(config)
    if rope["rope_type"] == "longrope":
        original, longer = rope["original_max_position_embeddings"], config["max_position_embeddings"]
        temperature = math.sqrt(1 + math.log(longer / original) / math.log(original))
        return {
            "rope.scaling.original_context_length": original,
            "rope.scaling.attn_factor": temperature,
        }
    if rope["rope_type"] not in ("linear", "yarn"):
        return {}
    keys = {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        keys["rope.scaling.yarn_beta_fast"] = rope.get("beta_fast", 32.0)
    if "kv_lora_rank" in config:
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    elif "llama_4_scaling_beta" in rope:
        keys["rope.scaling.yarn_log_multiplier"] = rope["mscale_all_dim"]
        keys["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
    return keys


def stored_weights(source: ModelSource) -> dict[str, F32]:
    """What a build stores of the source, in f32."""
    return {each.name: _value(each, source) for each in plan_weights(source.spec)}


def _value(weight: Weight, source: ModelSource) -> F32:
    matrices = [each.load(source).astype(np.float32) for each in weight.matrices()]
    return matrices[0] if weight.experts is None else np.stack(matrices)
