"""Small tokenizers for tests: a token for every byte, and a few merges that split characters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from shortfin_apps.llm.serving.text.tokenizer import Tokenizer

SentencePieceForm = Literal["prepend", "metaspace", "metaspace decoder"]

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
    """Like SentencePiece: words with a leading space mark, and single bytes as `<0xNN>`."""
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
    """A tokenizer with an end-of-sequence token and a chat template; `settings` override these."""
    defaults = {"bos_token": BOS, "eos_token": {"content": EOS}, "chat_template": TEMPLATE}
    return Tokenizer(byte_level_backend(), defaults | settings)


def byte_fallback_tokenizer() -> Tokenizer:
    return Tokenizer(byte_fallback_backend())


def sentencepiece_tokenizer(folder: Path, form: SentencePieceForm = "prepend", **settings: Any) -> Tokenizer:
    """A tokenizer saved as `tokenizer.json` and loaded again."""
    path = folder / "tokenizer.json"
    sentencepiece_backend(form).save(str(path))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>", **settings}), encoding="utf-8"
    )
    return Tokenizer.load(path)


def sentencepiece_backend(form: SentencePieceForm = "prepend") -> tokenizers.Tokenizer:
    """A SentencePiece model in the format of Llama 2's `tokenizer.json` ("prepend") or of later exports.

    Ids: <unk>, <s>, </s>, the 256 bytes, then single characters and merged tokens.
    """
    letters = ["\u2581", *"abdehlnortw0123456789!,."]
    merges = [
        pair for word in ("\u2581hello", "\u2581world", "\u2581the", "\u2581and") for pair in _merges_of(word)
    ]
    merges = list(dict.fromkeys(merges))
    special = ["<unk>", "<s>", "</s>"]
    tokens = [*special, *(f"<0x{b:02X}>" for b in range(256)), *letters, *(a + b for a, b in merges)]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=merges,
            byte_fallback=True,
            unk_token="<unk>",
            fuse_unk=True,
        )
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    if form == "prepend":
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    if form == "metaspace decoder":
        backend.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return backend


def _merges_of(word: str) -> list[tuple[str, str]]:
    """The merges that build a word from its characters, from the left."""
    return [(word[:end], word[end]) for end in range(1, len(word))]
