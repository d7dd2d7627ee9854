"""SmolLM3: Llama without RoPE in some layers (arXiv:2501.18795), by default in every fourth."""

from __future__ import annotations

from dataclasses import replace

from shortfin_apps.llm.model.families import llama
from shortfin_apps.llm.model.families.family import Config, Family, Gguf
from shortfin_apps.llm.model.spec import Layer


def layer(config: Config, number: int) -> Layer:
    attention = llama.attention(config, number)
    rotates = (number + 1) % (config.no_rope_layer_interval or 4) != 0
    if config.no_rope_layers:
        rotates = config.no_rope_layers[number]  # despite the name, 1 means that the layer has RoPE
    return attention if rotates else replace(attention, rope=None), llama.mlp(config)


SMOLLM3 = Family(
    title="SmolLM3",
    model_type="smollm3",
    architecture="smollm3",
    layer=layer,
    fields={"no_rope_layers", "no_rope_layer_interval", "use_sliding_window"},
    defaults={"use_sliding_window": False, "rope_theta": 2e6, "tie_word_embeddings": True},
    gguf=Gguf(pairs=True),
)
