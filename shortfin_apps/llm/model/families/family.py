"""`Family`: what a module of this folder defines for each family of models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from shortfin_apps.llm.model.families.config import Config
from shortfin_apps.llm.model.granite import Multipliers
from shortfin_apps.llm.model.spec import Layer, ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Gguf:
    """What differs in a family's GGUF files, which llama.cpp's converter writes.

    `names` renames kinds of tensors to our names, which are llama.cpp's for a Llama. `defaults` are for
    fields that files lack.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    pairs: bool = False  # rows of q and k that rotate together are neighbours
    yarn_truncates: bool = True  # rounds the bounds of the slowed frequencies to an index
    finetuned_rotates: bool = False  # `rope.scaling.finetuned` = false disables rotation


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Models with the same blocks.

    `names`, `ignored`, `norms_from_zero` and `stacks_experts` describe tensors of Hugging Face files, `gguf`
    describes GGUF files.
    """

    title: str  # the models, for users
    model_type: str  # in `config.json`
    architecture: str  # in GGUF files and in specs
    layer: Callable[[Config, int], Layer]  # the blocks of a layer, by its number
    fields: AbstractSet[str] = frozenset()  # of the configuration, in addition to Llama's
    harmless: AbstractSet[str] = frozenset()  # fields of `config.json` without effect, likewise
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of fields that `config.json` may lack
    names: Mapping[str, str] = field(default_factory=dict)  # of a layer's tensors, in addition to Llama's
    ignored: tuple[str, ...] = ()  # prefixes of names of tensors that are left out
    norms_from_zero: bool = False  # norms add 1 to their weights
    stacks_experts: bool = False  # one tensor has a projection of all experts of a layer
    scales_embedding: bool = False  # by the square root of `hidden_size`
    gguf: Gguf = Gguf()
    in_gguf: bool = True  # False: its GGUF files have the architecture of another family

    def spec(self, name: str, config: Config) -> ModelSpec:
        """Return the model. Raises ArithmeticError for numbers that give none."""
        spec = ModelSpec(
            name=name,
            architecture=self.architecture,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            layers=tuple(self.layer(config, number) for number in range(config.num_hidden_layers)),
            tie_word_embeddings=bool(config.tie_word_embeddings),
            logit_cap=config.final_logit_softcapping,
        )
        scalars = Multipliers(
            embedding=config.embedding_multiplier or 1.0,
            residual=config.residual_multiplier or 1.0,
            logits=config.logits_scaling or 1.0,
        )
        return scalars.applied(spec)
