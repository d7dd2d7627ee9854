"""The supported families of models; a module has one family or several closely related ones."""

from __future__ import annotations

from typing import Final

from shortfin_apps.llm.model.families.deepseek import DEEPSEEK2, DEEPSEEK3, GLM4_MOE_LITE, KIMI_K2
from shortfin_apps.llm.model.families.family import Family
from shortfin_apps.llm.model.families.gemma import GEMMA2, GEMMA3
from shortfin_apps.llm.model.families.gemma4 import GEMMA4, GEMMA4_UNIFIED
from shortfin_apps.llm.model.families.glm4_moe import GLM4_MOE
from shortfin_apps.llm.model.families.gpt_oss import GPT_OSS
from shortfin_apps.llm.model.families.granite import GRANITE, GRANITE4
from shortfin_apps.llm.model.families.llama import LLAMA, MISTRAL, MIXTRAL
from shortfin_apps.llm.model.families.ministral3 import MINISTRAL3
from shortfin_apps.llm.model.families.olmo2 import OLMO2
from shortfin_apps.llm.model.families.phi3 import PHI3
from shortfin_apps.llm.model.families.qwen3 import QWEN2, QWEN3, QWEN3_MOE
from shortfin_apps.llm.model.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from shortfin_apps.llm.model.families.smollm3 import SMOLLM3

FAMILIES: Final[tuple[Family, ...]] = (
    *(LLAMA, MISTRAL, MINISTRAL3, MIXTRAL, SMOLLM3, OLMO2, PHI3),
    *(QWEN2, QWEN3, QWEN3_MOE, QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE),
    *(GEMMA2, GEMMA3, GEMMA4, GEMMA4_UNIFIED, GRANITE, GRANITE4, GPT_OSS),
    *(DEEPSEEK2, DEEPSEEK3, KIMI_K2, GLM4_MOE_LITE, GLM4_MOE),
)
# The fields of Config that only some families have.
OF_SOME_FAMILIES: Final[frozenset[str]] = frozenset().union(*(family.fields for family in FAMILIES))
OF_MODEL_TYPE: Final = {family.model_type: family for family in FAMILIES}
OF_ARCHITECTURE: Final = {family.architecture: family for family in FAMILIES if family.in_gguf}
