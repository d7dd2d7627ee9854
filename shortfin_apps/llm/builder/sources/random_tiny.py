"""Sources `random:NAME`: small models with seeded random weights and a byte tokenizer, for tests.

`tiny` is a two-layer Llama; `tiny-hybrid` has gated delta nets, gated attention, routed experts and a draft
layer; `tiny-latent` has latent attention, and routed experts in groups.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from shortfin_apps.llm.builder.sources.base import Array, ModelSource, TokenizerFiles
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.model.attention import Attention
from shortfin_apps.llm.model.delta_net import DeltaNet
from shortfin_apps.llm.model.draft_layer import DraftLayer
from shortfin_apps.llm.model.expert_scores import ExpertScores
from shortfin_apps.llm.model.feed_forward import MLP, MoE
from shortfin_apps.llm.model.latent_attention import LatentAttention
from shortfin_apps.llm.model.rope import Rope
from shortfin_apps.llm.model.spec import ModelSpec, tensor_shapes

SEED = 20240229
NUM_BYTES = 256
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
NUM_RESERVED = 12  # rounds the vocabulary up to a multiple of 16

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_ATTENTION = Attention(heads=4, kv_heads=2, head_dim=16, rope=Rope())
SPEC = ModelSpec(
    name="random-tiny",
    architecture="llama",
    vocab_size=NUM_BYTES + len(SPECIAL_TOKENS) + NUM_RESERVED,
    hidden_size=64,
    max_position_embeddings=1024,
    rms_norm_eps=1e-5,
    layers=2 * ((_ATTENTION, MLP(features=128)),),
)

_EXPERTS = MoE(count=6, per_token=2, features=48, shared=32)
_DELTA_NET = DeltaNet(key_heads=2, value_heads=4, key_dim=16, value_dim=16)
_GATED = (replace(_ATTENTION, rope=Rope(dim=8), qk_norm=True, gate=True), _EXPERTS)
HYBRID_SPEC = replace(
    SPEC,
    name="random-tiny-hybrid",
    architecture="qwen35moe",
    layers=(*(3 * ((_DELTA_NET, _EXPERTS),)), _GATED),
    draft=DraftLayer(blocks=_GATED),
)
_LATENT = LatentAttention(heads=4, rank=24, plain=16, rotated=8, value_dim=16, query_rank=32, rope=Rope())
_SCORES = ExpertScores(is_sigmoid=True, bias=True, groups=3, kept_groups=2, summed=2)
LATENT_SPEC = replace(
    SPEC,
    name="random-tiny-latent",
    architecture="deepseek2",
    layers=(
        (_LATENT, MLP(features=128)),
        (_LATENT, replace(_EXPERTS, scores=_SCORES, scale=1.5, gates_shared=False)),
    ),
)
RANDOM_SPECS: Mapping[str, ModelSpec] = {  # by NAME
    "tiny": SPEC,
    "tiny-hybrid": HYBRID_SPEC,
    "tiny-latent": LATENT_SPEC,
}

# Standard deviations of weights, multiplied by sqrt(in_features); 1 for kinds that are not listed. Queries
# and keys are large enough for attention to concentrate on few tokens, and a block's output is as large as
# the residual stream. So the next token depends on the full prompt, and the gap between the largest and the
# second-largest logit is large.
GAINS = {"attn_q": 1.6, "attn_k": 1.6, "attn_output": 2.0, "ffn_down": 3.0, "output": 4.0}
LIKELY = slice(32, 127)  # printable ASCII, so that tests show readable text
UNLIKELY_GAIN = 0.5


class RandomTinySource(ModelSource):
    """A model of the given spec with random weights, an untied head and a byte tokenizer."""

    def __init__(self, spec: ModelSpec = SPEC) -> None:
        assert spec.vocab_size == SPEC.vocab_size, "the tokenizer's"
        self.spec = spec
        content = repr((SEED, spec, GAINS, LIKELY, UNLIKELY_GAIN, SPECIAL_TOKENS, CHAT_TEMPLATE))
        self.sha256 = hashlib.sha256(content.encode()).hexdigest()

    def tensor(self, name: str) -> Array:
        shape = tensor_shapes(self.spec)[name]
        # Seeded by name, so that a tensor's values do not depend on the order of reading.
        random = np.random.Generator(np.random.PCG64([SEED, zlib.crc32(name.encode())]))
        values = random.standard_normal(shape, dtype=np.float32)
        kind = name.split(".")[-2].removesuffix("_exps")
        if kind.endswith("norm"):
            return 1.0 + 0.1 * values
        if kind == "token_embd":
            return values
        if name.endswith(".ssm_a"):  # negative, so that states decay
            return -np.abs(values)
        values *= GAINS.get(kind, 1.0) / np.float32(np.sqrt(shape[-1]))
        if kind == "output":
            values *= _head_gains()[:, None]
        return values

    def tokenizer_files(self) -> TokenizerFiles:
        ids = {token: NUM_BYTES + index for index, token in enumerate(SPECIAL_TOKENS)}
        return TokenizerFiles(
            tokenizer=byte_tokenizer().to_str(),
            config={
                "bos_token": "<|endoftext|>",
                "eos_token": "<|im_end|>",
                "pad_token": "<|pad|>",
                "add_bos_token": False,
                "chat_template": CHAT_TEMPLATE,
            },
            generation={
                "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
                "bos_token_id": ids["<|endoftext|>"],
                "pad_token_id": ids["<|pad|>"],
            },
        )


def random_source(name: str) -> RandomTinySource:
    """Return the source `random:NAME`. Raises BuildError for an unknown name."""
    if name not in RANDOM_SPECS:
        known = ", ".join(f"random:{each}" for each in RANDOM_SPECS)
        raise BuildError(f"random:{name}: there are only {known}")
    return RandomTinySource(RANDOM_SPECS[name])


def byte_tokenizer() -> Tokenizer:
    """Create a tokenizer: token ids 0 to 255 are the byte values; the special tokens follow."""
    characters = _byte_characters()
    reserved = [f"<|reserved_{index}|>" for index in range(NUM_RESERVED)]
    vocab = {token: index for index, token in enumerate([*characters, *SPECIAL_TOKENS, *reserved])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    # Splits text into words, as real tokenizers do. Without this, the `tokenizers` library would cache full
    # prompts as words.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True, normalized=False) for token in (*SPECIAL_TOKENS, *reserved)]
    tokenizer.add_special_tokens(special)
    return tokenizer


def _byte_characters() -> list[str]:
    """Return GPT-2's printable character for each byte value (`bytes_to_unicode` of its encoder.py)."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = iter(range(NUM_BYTES, 2 * NUM_BYTES))
    return [chr(value if value in printable else next(others)) for value in range(NUM_BYTES)]


def _head_gains() -> Array:
    gains = np.full(SPEC.vocab_size, UNLIKELY_GAIN, np.float32)
    gains[LIKELY] = 1.0
    return gains
