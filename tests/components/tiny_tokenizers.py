"""Tokenizers made on the spot: every byte a token, and a few merges that cut across characters."""

from __future__ import annotations

from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from shortfin_apps.llm.components.tokenizer import Tokenizer

EOS = "<|end|>"
BOS = "<|begin|>"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def byte_level_backend() -> tokenizers.Tokenizer:
    """Ids 0..255 are bytes (in the alphabet's order), then merges, then the two special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("a", "n"), ("â", "Ĥ"), ("ð", "Ł"), ("Ĥ", "¬")]
    vocab = {token: i for i, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(BOS, special=True), AddedToken(EOS, special=True)])
    return backend


def byte_fallback_backend() -> tokenizers.Tokenizer:
    """SentencePiece's manner: words with a leading mark, and single bytes as `<0xNN>`."""
    words = ["<unk>", "▁", "▁the", "▁an", "a", "n", "t", "h", "e"]
    vocab = {token: i for i, token in enumerate([*words, *(f"<0x{b:02X}>" for b in range(256))])}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def byte_level_tokenizer(**settings: Any) -> Tokenizer:
    """With an end-of-sequence token and a chat template, unless `settings` say otherwise."""
    defaults = {"bos_token": BOS, "eos_token": {"content": EOS}, "chat_template": TEMPLATE}
    return Tokenizer(byte_level_backend(), defaults | settings)


def byte_fallback_tokenizer() -> Tokenizer:
    return Tokenizer(byte_fallback_backend())
