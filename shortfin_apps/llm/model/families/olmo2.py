"""OLMo 2 (arXiv:2501.00656): Llama with norms after blocks instead of before them, and norms of q and k."""

from __future__ import annotations

from dataclasses import replace

from shortfin_apps.llm.model.families import llama
from shortfin_apps.llm.model.families.family import Config, Family
from shortfin_apps.llm.model.spec import Layer


def layer(config: Config, number: int) -> Layer:
    attention = replace(
        llama.attention(config, number), whole_qk_norm=True, norm_before=False, norm_after=True
    )
    return attention, replace(llama.mlp(config), norm_before=False, norm_after=True)


OLMO2 = Family(
    title="OLMo2",
    model_type="olmo2",
    architecture="olmo2",
    layer=layer,
    names={"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"},
)
