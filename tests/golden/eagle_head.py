"""The arithmetic of an EAGLE-3 head as vLLM has it (llama_eagle3.py), on tensors of a published file.

transformers has no such head, so tests have no golden logits of one. This is written from the names and
shapes in the file alone, one token at a time, and shares nothing with the package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]


def head_logits(
    config: Mapping[str, Any],
    tensors: Mapping[str, npt.NDArray[Any]],
    embedding: npt.NDArray[Any],
    tokens: Sequence[int],
    hidden: F64,
) -> tuple[F64, F64]:
    """Logits [tokens, vocab] of the model's tokens, and results before the last norm [tokens, hidden].

    `hidden` [tokens, hidden]: of the token before each one. Tokens that the head lacks have -inf.
    """

    def of(name: str) -> F64:
        return np.asarray(tensors[name], np.float64)

    def norm(x: F64, name: str) -> F64:
        normed: F64 = of(name) * x / np.sqrt(np.mean(x * x) + config["rms_norm_eps"])
        return normed

    heads, kv_heads, dim = (
        config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    frequencies = config["rope_theta"] ** (-np.arange(0, dim, 2) / dim)

    def rotated(x: F64, position: int) -> F64:
        low, high = x[:, : dim // 2], x[:, dim // 2 :]
        cos, sin = np.cos(position * frequencies), np.sin(position * frequencies)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=1)

    keys, values, logits, results = [], [], [], []
    for position, (token, before) in enumerate(zip(tokens, hidden, strict=True)):
        embedded = np.asarray(embedding[token], np.float64)
        normed = norm(before, "midlayer.hidden_norm.weight")
        x = normed if config.get("norm_before_residual") else before
        h = np.concatenate([norm(embedded, "midlayer.input_layernorm.weight"), normed])
        q = rotated((of("midlayer.self_attn.q_proj.weight") @ h).reshape(heads, dim), position)
        k = (of("midlayer.self_attn.k_proj.weight") @ h).reshape(kv_heads, dim)
        keys.append(rotated(k, position))
        values.append((of("midlayer.self_attn.v_proj.weight") @ h).reshape(kv_heads, dim))
        attended = []
        for head in range(heads):
            group = head // (heads // kv_heads)
            scores = np.array([key[group] @ q[head] for key in keys]) / np.sqrt(dim)
            weights = np.exp(scores - scores.max())
            attended.append(sum(w * v[group] for w, v in zip(weights, values, strict=True)) / weights.sum())
        x = x + of("midlayer.self_attn.o_proj.weight") @ np.concatenate(attended)
        h = norm(x, "midlayer.post_attention_layernorm.weight")
        gate, up = of("midlayer.mlp.gate_proj.weight") @ h, of("midlayer.mlp.up_proj.weight") @ h
        x = x + of("midlayer.mlp.down_proj.weight") @ (gate / (1 + np.exp(-gate)) * up)
        results.append(x)
        own = of("lm_head.weight") @ norm(x, "norm.weight")
        row = np.full(len(embedding), -np.inf)
        row[np.arange(len(own)) + tensors.get("d2t", 0)] = own
        logits.append(row)
    return np.array(logits), np.array(results)


def head_inputs(tensors: Mapping[str, npt.NDArray[Any]], streams: Sequence[npt.NDArray[Any]]) -> F64:
    """The hidden states that a head reads of `streams`, each [tokens, hidden], in the file's order."""
    joined = np.concatenate([np.asarray(each, np.float64) for each in streams], axis=1)
    hidden: F64 = joined @ np.asarray(tensors["fc.weight"], np.float64).T
    return hidden
