"""The arithmetic of Qwen's draft layer as vLLM has it (qwen3_next_mtp.py), on tensors of a Hugging Face file.

transformers skips these tensors, so tests have no golden logits of theirs. This is written from the names and
shapes in the file alone, one token at a time, and shares nothing with the package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]


def draft_logits(
    config: Mapping[str, Any], tensors: Mapping[str, npt.NDArray[Any]], tokens: Sequence[int], hidden: F64
) -> tuple[F64, F64]:
    """Logits [tokens, vocab] and hidden states [tokens, hidden] of a layer with a dense feed-forward.

    `hidden` [tokens, hidden]: of the token before each one.
    """

    def of(name: str) -> F64:
        return np.asarray(tensors[name], np.float64)

    def norm(x: F64, name: str) -> F64:
        normal: F64 = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + config["rms_norm_eps"])
        return normal * (1 + of(name))

    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim, rope = config["head_dim"], config["rope_parameters"]
    turned = int(dim * rope.get("partial_rotary_factor", 0.25))
    frequencies = rope["rope_theta"] ** (-np.arange(0, turned, 2) / turned)

    def rotated(x: F64, position: int) -> F64:
        cos, sin = np.cos(position * frequencies), np.sin(position * frequencies)
        low, high = x[:, : turned // 2], x[:, turned // 2 : turned]
        return np.concatenate([low * cos - high * sin, high * cos + low * sin, x[:, turned:]], axis=1)

    layer = "mtp.layers.0."
    embedding = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    keys, values, logits, results = [], [], [], []
    for position, (token, before) in enumerate(zip(tokens, hidden, strict=True)):
        parts = (
            norm(of(embedding)[token], "mtp.pre_fc_norm_embedding.weight"),
            norm(before, "mtp.pre_fc_norm_hidden.weight"),
        )
        x = of("mtp.fc.weight") @ np.concatenate(parts)
        h = norm(x, f"{layer}input_layernorm.weight")
        q, gates = np.split((of(f"{layer}self_attn.q_proj.weight") @ h).reshape(heads, 2 * dim), 2, axis=1)
        k = (of(f"{layer}self_attn.k_proj.weight") @ h).reshape(kv_heads, dim)
        q = rotated(norm(q, f"{layer}self_attn.q_norm.weight"), position)
        keys.append(rotated(norm(k, f"{layer}self_attn.k_norm.weight"), position))
        values.append((of(f"{layer}self_attn.v_proj.weight") @ h).reshape(kv_heads, dim))
        attended = []
        for head in range(heads):
            group = head // (heads // kv_heads)
            scores = np.array([key[group] @ q[head] for key in keys]) * dim**-0.5
            weights = np.exp(scores - scores.max())
            mixed = sum(w * value[group] for w, value in zip(weights, values, strict=True)) / weights.sum()
            attended.append(mixed / (1 + np.exp(-gates[head])))
        x = x + of(f"{layer}self_attn.o_proj.weight") @ np.concatenate(attended)
        h = norm(x, f"{layer}post_attention_layernorm.weight")
        gate, up = of(f"{layer}mlp.gate_proj.weight") @ h, of(f"{layer}mlp.up_proj.weight") @ h
        x = x + of(f"{layer}mlp.down_proj.weight") @ (gate / (1 + np.exp(-gate)) * up)
        results.append(norm(x, "mtp.norm.weight"))
        logits.append(of("lm_head.weight" if "lm_head.weight" in tensors else embedding) @ results[-1])
    return np.array(logits), np.array(results)
