"""Phi-3 (arXiv:2404.14219), Phi-3.5-mini, Phi-4-mini (arXiv:2503.01743): Llama with fused tensors.

Models with long contexts use LongRoPE. Phi-4-mini rotates only some elements of each head.
"""

from __future__ import annotations

from dataclasses import replace

from shortfin_apps.llm.model.families import llama
from shortfin_apps.llm.model.families.family import Config, Family, Gguf
from shortfin_apps.llm.model.spec import Layer


def layer(config: Config, number: int) -> Layer:
    attention = replace(llama.attention(config, number), fused_qkv=True)
    return attention, replace(llama.mlp(config), fused_gate_up=True)


PHI3 = Family(
    title="Phi-3, Phi-4-mini",
    model_type="phi3",
    architecture="phi3",
    layer=layer,
    fields={"partial_rotary_factor"},
    harmless={"auto_map"},  # names custom code that transformers now includes
    names={"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_gate_up"},
    gguf=Gguf(names={"ffn_up": "ffn_gate_up"}),
)
