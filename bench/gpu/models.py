"""The models that are measured: their shapes, their compiled entries, and what is asked of them.

SmolLM2-135M and Llama 3.1 8B have random weights, as only their shapes matter to time. `random:tiny` has its
own weights in f32, with which a GPU must choose the same tokens as a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shortfin_apps.llm.builder.model.rope import Llama3Scaling
from shortfin_apps.llm.builder.model.spec import BuildOptions, ModelSpec, WeightType
from shortfin_apps.llm.builder.sources.random_tiny import SPEC as TINY_SPEC


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model, and the sizes at which it is measured.

    `context` is that of decodes, in tokens. A prefill is (rows, tokens of each), an extend (tokens of a
    prompt, decodes beside it). Times of a model that `is_timed` are of interest; of another, its tokens.
    """

    spec: ModelSpec
    options: BuildOptions
    context: int
    prefills: tuple[tuple[int, int], ...]
    extends: tuple[tuple[int, int], ...]
    is_timed: bool = True

    @property
    def name(self) -> str:
        return self.spec.name

    def for_device(self, device: str, weights: WeightType | None = None) -> Model:
        """The same, compiled for a target in the spelling of `shortfin-llm build --device`.

        A model that `is_timed` gets these weights, if any are named.
        """
        chosen = weights if weights and self.is_timed else self.options.weights
        return replace(self, options=replace(self.options, device=device, weights=chosen))


_EXTENDS = BuildOptions.for_device("cuda").extend_sizes

_TINY = Model(
    spec=TINY_SPEC,
    options=BuildOptions(
        weights="f32",
        kv="f32",
        prefill_batch_sizes=(1, 4),
        decode_batch_sizes=(1, 8),
        decode_loop_sizes=(1, 8),
        top_k=64,
    ),
    context=256,
    prefills=((1, 64), (4, 16)),
    extends=((64, 0), (32, 8), (0, 8)),
    is_timed=False,
)
_SMOLLM2 = Model(
    spec=ModelSpec(
        name="smollm2-135m",
        architecture="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=1e5,
        tie_word_embeddings=True,
    ),
    options=BuildOptions(
        prefill_batch_sizes=(1, 4),
        decode_batch_sizes=(1, 8, 32, 128),
        decode_loop_sizes=(1, 8, 32, 128),
        extend_sizes=_EXTENDS,
    ),
    context=256,
    prefills=((1, 512), (4, 128), (1, 2048)),
    extends=((256, 0), (256, 64), (0, 64)),
)
_LLAMA = Model(
    spec=ModelSpec(
        name="llama-3.1-8b",
        architecture="llama",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=5e5,
        rope_scaling=Llama3Scaling(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
        ),
    ),
    options=BuildOptions(
        prefill_batch_sizes=(1, 4),
        decode_batch_sizes=(1, 8, 64, 256),
        decode_loop_sizes=(1, 8, 64, 256),
        extend_sizes=_EXTENDS,
    ),
    context=1024,
    prefills=((1, 320), (1, 512), (1, 2048)),
    extends=((256, 0), (256, 64), (0, 64)),
)

MODELS: Mapping[str, Model] = {model.name: model for model in (_TINY, _SMOLLM2, _LLAMA)}
