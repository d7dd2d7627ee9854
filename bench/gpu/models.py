"""The measured models: shapes, compiled entries and workloads.

SmolLM2-135M, Llama 3.1 8B, gpt-oss-20b and a hybrid of gated delta nets and attention, with the sizes of a
small Qwen3.5, have random weights, as only shapes matter to time. The tiny models have f32 weights, for which
a GPU must choose the same tokens as a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from bench.gpu.tiny_models import tiny_models
from shortfin_apps.llm.model.attention import Attention
from shortfin_apps.llm.model.delta_net import DeltaNet
from shortfin_apps.llm.model.draft_layer import DraftLayer
from shortfin_apps.llm.model.feed_forward import MLP, MoE
from shortfin_apps.llm.model.kv_layout import KVType
from shortfin_apps.llm.model.rope import Llama3Scaling, Rope, YarnScaling, yarn_attention_factor
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec, WeightType, weight_shapes
from shortfin_apps.llm.model.weight_blocks import MXFP4, BlockType


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model, and the sizes at which it is measured.

    `context` is the context of decodes, in tokens. A prefill is (rows, tokens per row), an extend (tokens of
    a prompt, decodes in the same batch). A model with `is_timed` is measured for times, any other for its
    tokens.
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

    def for_device(
        self,
        device: str,
        weights: WeightType | None = None,
        kv: KVType | None = None,
        *,
        one_launch: bool | None = None,
    ) -> Model:
        """Return the model compiled for a target, given as in `shortfin-llm build --device`.

        `weights` and `kv` apply only to a model with `is_timed`.
        """
        options = replace(self.options, device=device, one_launch=one_launch)
        if weights and self.is_timed:
            options = replace(options, weights=weights, block_types=())
        return replace(self, options=replace(options, kv=kv) if kv and self.is_timed else options)


_ROWS_ALONE = ((0, 1), (0, 2), (0, 9), (0, 64))  # the cost of a row, such as that of a proposed token
_EXTENDS = BuildOptions.for_device("cuda").extend_sizes


def _tiny(spec: ModelSpec, options: BuildOptions) -> Model:
    return Model(
        spec=spec,
        options=options,
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
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        layers=30
        * ((Attention(heads=9, kv_heads=3, head_dim=64, rope=Rope(theta=1e5)), MLP(features=1536)),),
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
    extends=((256, 0), (256, 64), *_ROWS_ALONE),
)
_LLAMA3_SCALING = Llama3Scaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)
_LLAMA = Model(
    spec=ModelSpec(
        name="llama-3.1-8b",
        architecture="llama",
        vocab_size=128256,
        hidden_size=4096,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        layers=32
        * (
            (
                Attention(heads=32, kv_heads=8, head_dim=128, rope=Rope(theta=5e5, scaling=_LLAMA3_SCALING)),
                MLP(features=14336),
            ),
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
    extends=((256, 0), (256, 64), *_ROWS_ALONE),
)


def _drafting(model: Model, *sizes: int) -> Model:
    """Add a layer that drafts, with the model's embedding and head, as most published ones."""
    return replace(
        model,
        spec=replace(model.spec, name=f"{model.name}-drafts", draft=DraftLayer(blocks=model.spec.layers[0])),
        options=replace(model.options, decode_batch_sizes=sizes, decode_loop_sizes=sizes),
        prefills=(),
        extends=tuple((0, rows) for rows in (1, 2, 4, 6, 8, 9, 16, 32, 64, 128, 256)),
    )


_GPT_OSS_ATTENTION = Attention(
    heads=64,
    kv_heads=8,
    head_dim=64,
    rope=Rope(
        theta=150000.0,
        scaling=YarnScaling(
            factor=32.0,
            original_max_position_embeddings=4096,
            attention_factor=yarn_attention_factor(32.0),
            truncate=False,
        ),
    ),
    sinks=True,
    bias=True,
    output_bias=True,
)
_GPT_OSS_EXPERTS = MoE(count=32, per_token=4, features=2880, activation="clamped", biases=True)
_GPT_OSS_SPEC = ModelSpec(
    name="gpt-oss-20b",
    architecture="gpt-oss",
    vocab_size=201088,
    hidden_size=2880,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    layers=12
    * (
        (replace(_GPT_OSS_ATTENTION, window=128), _GPT_OSS_EXPERTS),
        (_GPT_OSS_ATTENTION, _GPT_OSS_EXPERTS),
    ),
)


def _published_types(spec: ModelSpec) -> Iterator[tuple[str, BlockType | None]]:
    """Yield MXFP4 for experts and bf16 for other weights, where the build would choose 4-bit blocks."""
    for name, shape in weight_shapes(spec).items():
        if len(shape) > 1:
            yield name, MXFP4 if name.endswith("_exps.weight") else None


_GPT_OSS = Model(
    spec=_GPT_OSS_SPEC,
    options=BuildOptions(
        weights="q4",
        block_types=tuple(_published_types(_GPT_OSS_SPEC)),
        prefill_batch_sizes=(1, 4),
        decode_batch_sizes=(1, 8, 64),
        decode_loop_sizes=(1, 8, 64),
        extend_sizes=_EXTENDS,
    ),
    context=1024,
    prefills=((1, 512), (1, 2048)),
    extends=((256, 0), (256, 64), (0, 64)),
)
_HYBRID_MLP = MLP(features=3584)
_HYBRID_DELTA_NET = DeltaNet(key_heads=16, value_heads=16, key_dim=128, value_dim=128)
_HYBRID = Model(
    spec=ModelSpec(
        name="hybrid-0.8b",
        architecture="qwen35",
        vocab_size=248320,
        hidden_size=1024,
        max_position_embeddings=262144,
        rms_norm_eps=1e-6,
        layers=6
        * (
            *(3 * ((_HYBRID_DELTA_NET, _HYBRID_MLP),)),
            (
                Attention(
                    heads=8, kv_heads=2, head_dim=256, rope=Rope(theta=1e7, dim=64), qk_norm=True, gate=True
                ),
                _HYBRID_MLP,
            ),
        ),
        tie_word_embeddings=True,
    ),
    options=BuildOptions(
        prefill_batch_sizes=(1, 4),
        decode_batch_sizes=(1, 8, 32),
        decode_loop_sizes=(1, 8, 32),
        extend_sizes=_EXTENDS,
        block_seq_stride=64,  # a page of states takes 20 MB
    ),
    context=256,
    prefills=((1, 512), (4, 128), (1, 2048)),
    extends=((256, 0), (256, 32), (0, 32)),
)
_TINY = [_tiny(spec, options) for spec, options in tiny_models()]

_DRAFTING = (_drafting(_SMOLLM2, 1, 8, 32), _drafting(_LLAMA, 1, 8, 64))
_TIMED = (_SMOLLM2, _LLAMA, *_DRAFTING, _GPT_OSS, _HYBRID)
MODELS: Mapping[str, Model] = {model.name: model for model in (*_TINY, *_TIMED)}
