"""Trains an EAGLE-3 head for a model, and measures how often its drafts are right.

    python bench/eagle_head.py text WORK                       # the model generates text
    TORCH_PYTHON bench/eagle_head.py train WORK                # needs torch and safetensors; minutes on a CPU
    python bench/eagle_head.py measure WORK                    # W1-like: one client, with and without drafts

As bench/draft_layer.py, for a head in WORK/head with the names and fields of published ones. It has the shape
of the model's last layer, starts with that one's weights, and drafts the tokens that the text has.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from draft_layer import PROMPT, attended, compare, fit, model_text, run_command, shifted


def write_text(work: Path, source_name: str) -> None:
    """Write the tokens, what the head reads of each, and the model's results to `text.npz`."""
    from shortfin_apps.llm.model.reference.forward import begin, normed, run_layer, weights_of

    tokens, source, weights = model_text(work, source_name)
    spec = source.spec
    count, read, results = len(spec.layers), [], []
    for row in tokens:
        x, carried = begin(spec, weights, lambda table, row=row: weights[table][row])
        streams = []
        for layer in range(count):
            if layer in (2, count // 2, count - 3):
                streams.append(x)
            x, _ = run_layer(spec, layer, weights_of(weights, layer), x, carried)
        read.append(np.concatenate(streams, axis=1))
        results.append(normed(spec, x, weights["output_norm.weight"]))
    attention = spec.attention
    assert attention.rope is not None, "a Llama's"
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": spec.hidden_size,
        "head_dim": attention.head_dim,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "intermediate_size": weights[f"blk.{count - 1}.ffn_down.weight"].shape[1],
        "num_hidden_layers": 1,
        "max_position_embeddings": spec.max_position_embeddings,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": attention.rope.theta,
        "vocab_size": spec.vocab_size,
    }
    np.savez(
        work / "text.npz",
        config=json.dumps(config),
        tokens=tokens,
        read=np.stack(read).astype(np.float16),
        results=np.stack(results).astype(np.float16),
        embedding=weights["token_embd.weight"],
        head=weights[spec.head_weight],
        **weights_of(weights, count - 1),
    )


def train(work: Path) -> None:
    """Train the head on the model's probabilities, in two rounds of a draft; write its files."""
    import torch
    import torch.nn.functional as F
    from safetensors.torch import save_file

    data = np.load(work / "text.npz")
    config = json.loads(str(data["config"]))
    tokens, table = torch.from_numpy(data["tokens"]), torch.from_numpy(data["embedding"])
    read, results = (torch.from_numpy(data[name].astype(np.float32)) for name in ("read", "results"))
    size, dim = config["hidden_size"], config["head_dim"]
    token_ids = tokens.unique()
    model_head = torch.from_numpy(data["head"])[token_ids]
    projections = torch.from_numpy(data["attn_qkv.weight"])
    sizes = [count * dim for count in (config["num_attention_heads"], *2 * (config["num_key_value_heads"],))]
    tensors = {
        "fc.weight": torch.cat([torch.zeros(size, 2 * size), torch.eye(size)], dim=1),
        "midlayer.hidden_norm.weight": torch.from_numpy(data["attn_norm.weight"]),
        "midlayer.input_layernorm.weight": torch.ones(size),
        "midlayer.self_attn.o_proj.weight": torch.from_numpy(data["attn_output.weight"]),
        "midlayer.post_attention_layernorm.weight": torch.from_numpy(data["ffn_norm.weight"]),
        "midlayer.mlp.down_proj.weight": torch.from_numpy(data["ffn_down.weight"]),
        "norm.weight": torch.ones(size),
        "lm_head.weight": model_head,
    }
    for name, part in zip("qkv", projections.split(sizes), strict=True):
        tensors[f"midlayer.self_attn.{name}_proj.weight"] = torch.cat([torch.zeros_like(part), part], dim=1)
    for name, part in zip(("gate", "up"), torch.from_numpy(data["ffn_gate_up.weight"]).chunk(2), strict=True):
        tensors[f"midlayer.mlp.{name}_proj.weight"] = part
    tensors = {name: each.clone().contiguous().requires_grad_() for name, each in tensors.items()}

    def norm(x: Any, name: str) -> Any:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]) * tensors[name]

    def project(x: Any, name: str) -> Any:
        return x @ tensors[f"midlayer.{name}_proj.weight"].T

    def run(ids: Any, previous: Any) -> Any:
        embedded = norm(F.embedding(ids, table), "midlayer.input_layernorm.weight")
        joined = torch.cat([embedded, norm(previous, "midlayer.hidden_norm.weight")], dim=-1)
        q, k, v = (project(joined, f"self_attn.{n}").unflatten(-1, (-1, dim)).transpose(1, 2) for n in "qkv")
        x = previous + project(attended(q, k, v, config["rope_theta"]), "self_attn.o")
        h = norm(x, "midlayer.post_attention_layernorm.weight")
        return x + project(F.silu(project(h, "mlp.gate")) * project(h, "mlp.up"), "mlp.down")

    def losses(rows: Any) -> tuple[Any, float]:
        wanted = (results[rows] @ model_head.T).softmax(-1)
        first = run(tokens[rows], shifted(read[rows] @ tensors["fc.weight"].T))
        second = run(tokens[rows], shifted(first))
        logits = [norm(each, "norm.weight") @ tensors["lm_head.weight"].T for each in (first, second)]
        off = [F.cross_entropy(each.flatten(0, 1), wanted.flatten(0, 1)) for each in logits]
        right = logits[0].argmax(-1) == wanted.argmax(-1)
        return off[0] + 0.5 * off[1], right[:, PROMPT:].float().mean().item()

    fit(tensors, losses, len(tokens))
    (work / "head").mkdir(exist_ok=True)
    (work / "head" / "config.json").write_text(json.dumps(config | {"draft_vocab_size": len(token_ids)}))
    found = {name: each.detach() for name, each in tensors.items()}
    found["d2t"] = token_ids - torch.arange(len(token_ids))
    save_file(found, work / "head" / "model.safetensors")


def measure(work: Path, source_name: str) -> None:
    """Print the share of drafts that are right, and the speed with and without."""
    from shortfin_apps.llm.builder.builder import build
    from shortfin_apps.llm.model.spec import BuildOptions

    compare(build(source_name, work / "drafting", BuildOptions(), draft_head=str(work / "head")))


if __name__ == "__main__":
    run_command(__doc__, write_text, train, measure)
