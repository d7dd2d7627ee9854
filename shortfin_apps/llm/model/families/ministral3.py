"""Ministral 3: Mistral with YaRN, and with queries that are scaled by position as in Llama 4.

The scaling counts in periods of YaRN's original context. GGUF files of Mistral Small 3 have the same
architecture, with neither YaRN nor the scaling.
"""

from __future__ import annotations

from dataclasses import replace

from shortfin_apps.llm.model.families import llama
from shortfin_apps.llm.model.families.family import Config, Family, Gguf
from shortfin_apps.llm.model.spec import Layer


def layer(config: Config, number: int) -> Layer:
    attention = llama.attention(config, number)
    return replace(attention, query_scaling=config.query_scaling), llama.mlp(config)


MINISTRAL3 = Family(
    title="Ministral 3",
    model_type="ministral3",
    part_of="mistral3",
    architecture="mistral3",
    layer=layer,
    fields={"llama_4_scaling_beta", "mscale_all_dim"},
    defaults={
        "head_dim": 128,
        "rope_theta": 1e6,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    gguf=Gguf(pairs=True),
)
