"""Rebuild the tokenizer of a GGUF file for the `tokenizers` library.

GGUF stores the vocabulary with its merges or scores, but only the *name* of the rules that split text into
words (`tokenizer.ggml.pre`); word_rules.py defines these rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from gguf import TokenType
from pydantic import BaseModel, ConfigDict, Field, model_validator
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors

from shortfin_apps.llm.builder.sources.base import TokenizerFiles, templates
from shortfin_apps.llm.builder.sources.metadata_limits import (
    MAX_MERGED_CHARS,
    MAX_MERGES,
    MAX_TEMPLATE_CHARS,
    check_at_most,
    check_charsmap,
    check_vocabulary,
)
from shortfin_apps.llm.builder.sources.word_rules import WORD_RULES
from shortfin_apps.llm.contract.errors import BuildError, is_library_error
from shortfin_apps.llm.contract.tokenizer_config import NAMED_TOKENS

# `tokenizer.ggml.model` -> keys, without the prefix `tokenizer.`, that its files may lack.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"ggml.bos_token_id": 1, "ggml.eos_token_id": 2},  # the unknown token is found by its name
    "t5": {"ggml.eos_token_id": 1, "ggml.unknown_token_id": 2, "ggml.padding_token_id": 0},
}


class GgufVocabulary(BaseModel):
    """The `tokenizer.*` keys of a GGUF file, without the prefix."""

    model_config = ConfigDict(extra="ignore")

    model: str = Field(alias="ggml.model")
    pre: str = Field("default", alias="ggml.pre")
    tokens: list[str] = Field(alias="ggml.tokens", min_length=1)
    token_type: list[int] = Field([], alias="ggml.token_type")
    scores: list[float] = Field([], alias="ggml.scores")
    merges: list[str] = Field([], alias="ggml.merges")
    bos_token_id: int | None = Field(None, alias="ggml.bos_token_id")
    eos_token_id: int | None = Field(None, alias="ggml.eos_token_id")
    eot_token_id: int | None = Field(None, alias="ggml.eot_token_id")
    eom_token_id: int | None = Field(None, alias="ggml.eom_token_id")
    unk_token_id: int | None = Field(None, alias="ggml.unknown_token_id")
    sep_token_id: int | None = Field(None, alias="ggml.seperator_token_id")  # llama.cpp's spelling
    pad_token_id: int | None = Field(None, alias="ggml.padding_token_id")
    cls_token_id: int | None = Field(None, alias="ggml.cls_token_id")
    mask_token_id: int | None = Field(None, alias="ggml.mask_token_id")
    add_bos_token: bool | None = Field(None, alias="ggml.add_bos_token")
    add_eos_token: bool = Field(False, alias="ggml.add_eos_token")
    add_space_prefix: bool = Field(True, alias="ggml.add_space_prefix")
    remove_extra_whitespaces: bool = Field(False, alias="ggml.remove_extra_whitespaces")
    precompiled_charsmap: list[int] = Field([], alias="ggml.precompiled_charsmap")
    chat_template: str | None = None
    named_templates: dict[str, str] = {}

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, keys: dict[str, Any]) -> dict[str, Any]:
        """Add llama.cpp's defaults, and collect chat templates from the keys `chat_template.NAME`."""
        prefix = "chat_template."
        named = {k.removeprefix(prefix): text for k, text in keys.items() if k.startswith(prefix)}
        return {**_DEFAULTS.get(str(keys.get("ggml.model")), {}), **keys, "named_templates": named}

    def text(self, token_id: int | None) -> str | None:
        """Return the token string of an id; None if the id is None or outside the vocabulary."""
        if token_id is None or not 0 <= token_id < len(self.tokens):
            return None
        return self.tokens[token_id]

    @property
    def control(self) -> list[str]:
        """Token strings of type CONTROL, and of any type those in END_TOKENS, as in llama.cpp."""
        named = set(self.of_type(TokenType.CONTROL))
        return [token for token in self.tokens if token in named or token in END_TOKENS]

    def of_type(self, *types: TokenType) -> list[str]:
        return [token for token, kind in zip(self.tokens, self.token_type, strict=False) if kind in types]


# Tokens that end a turn or a document, from llama.cpp's list; all of them stop generation.
END_TOKENS = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>"),
        *("<|return|>", "<|call|>", "<|end_of_text|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
        *(
            "<turn|>",
            "<end_of_utterance>",
            "<\uff5cend\u2581of\u2581sentence\uff5c>",
            "<|flush|>",
            "<|calls|>",
        ),
    }
)
# These end a turn only if they are of type CONTROL: in Gemma's vocabulary, `</s>` is a tag of HTML.
CONTROL_ENDS = frozenset({"</s>", "<eos>"})
# For gpt-oss, where a turn has several messages: <|end|> ends a message, but not the turn.
TURN_ENDS = frozenset({"<|return|>", "<|call|>"})
MESSAGE_END = "<|end|>"
# Phi-3's added tokens take the white space after them, except PHI3_KEEPS_SPACES. GGUF files do not say so:
# its vocabulary is recognised by one of its tokens.
PHI3_TOKEN = "<|placeholder1|>"
PHI3_KEEPS_SPACES = frozenset({"<unk>", "<s>", "<|endoftext|>"})


# llama.cpp's `general.sampling.*` keys -> fields of `generation_config.json`.
_SAMPLING_NAMES = {
    **{name: name for name in ("sequence", "top_k", "top_p", "min_p", "xtc_probability", "xtc_threshold")},
    **{name: name for name in ("penalty_last_n", "mirostat", "mirostat_tau", "mirostat_eta")},
    "temp": "temperature",
    "penalty_repeat": "repetition_penalty",
}


def check_tokenizer(where: str, model: str, pre: object) -> None:
    """Raise BuildError unless `tokenizer.ggml.model` and `tokenizer.ggml.pre` (or None) are supported."""
    if model not in _BUILDERS:
        known = ", ".join(sorted(_BUILDERS))
        raise BuildError(f"{where}: tokenizer model `{model}` is not supported; known are {known}")
    if model != "gpt2" or (isinstance(pre, str) and pre in WORD_RULES):
        return
    if pre is None:
        raise BuildError(
            f"{where}: has no `tokenizer.ggml.pre`, the rules that split text into words; download a "
            "conversion of May 2024 or later"
        )
    known = ", ".join(sorted(WORD_RULES))
    raise BuildError(f"{where}: pre-tokenizer `{pre}` is not supported; known are {known}")


def check_lists(where: str, vocabulary: GgufVocabulary, rows: int) -> None:
    """Raise BuildError unless the tokens have an embedding each, of `rows`, and types, scores and merges."""
    count = len(vocabulary.tokens)
    if count > rows:
        raise BuildError(f"{where}: has {count} tokens, but embeddings of {rows}; download the model again")
    for name, given in (("token_type", vocabulary.token_type), ("scores", vocabulary.scores)):
        if given and len(given) != count:
            raise BuildError(f"{where}: `tokenizer.ggml.{name}` has {len(given)} items for {count} tokens")
    merged = (token for token in vocabulary.of_type(TokenType.NORMAL) if len(token) > 1)
    if vocabulary.model in ("gpt2", "gemma4") and not vocabulary.merges and any(merged):
        raise BuildError(f"{where}: has no `tokenizer.ggml.merges`; download another conversion")


def rebuild_tokenizer(where: str, vocabulary: GgufVocabulary) -> TokenizerFiles:
    """Return the tokenizer's files. Raises BuildError if the tokenizer is unsupported or damaged.

    `where` names the GGUF file.
    """
    check_tokenizer(where, vocabulary.model, vocabulary.pre)
    _check_sizes(where, vocabulary)
    if len(set(vocabulary.tokens)) != len(vocabulary.tokens):
        raise BuildError(f"{where}: the vocabulary names a token twice")
    add_bos = _adds_bos(vocabulary)
    try:
        tokenizer = _BUILDERS[vocabulary.model](where, vocabulary)
        _add_special_tokens(tokenizer, vocabulary)
        _frame(tokenizer, vocabulary, add_bos)
    except BuildError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or is_library_error(error):  # a damaged file can raise anything
            raise BuildError(f"{where}: the tokenizer cannot be rebuilt ({error})") from error
        raise
    return TokenizerFiles(
        tokenizer=tokenizer.to_str(),
        config=_tokenizer_config(vocabulary, add_bos),
        generation=_generation_config(vocabulary),
    )


def _check_sizes(where: str, vocabulary: GgufVocabulary) -> None:
    """Raise BuildError for tokens, character maps or chat templates beyond the limits."""
    check_vocabulary(where, vocabulary.tokens)
    if vocabulary.precompiled_charsmap:
        check_charsmap(where, _charsmap(vocabulary))
    for template in (vocabulary.chat_template or "", *vocabulary.named_templates.values()):
        check_at_most(where, "a chat template has {} characters", len(template), MAX_TEMPLATE_CHARS)


def sampling_defaults(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Convert `general.sampling.*` keys, given without this prefix, to fields of `generation_config.json`.

    Keys that llama.cpp does not define are dropped, as they could replace other fields, such as
    `eos_token_id`.
    """
    found = {_SAMPLING_NAMES[key]: _shortest(keys[key]) for key in keys if key in _SAMPLING_NAMES}
    if found.get("penalty_last_n") == 0:  # the penalty applies to no token
        found.pop("repetition_penalty", None)
    if isinstance(found.get("temperature"), float):
        found["temperature"] = max(found["temperature"], 0.0)  # in llama.cpp, negative ones mean greedy, too
    return found


def _shortest(value: Any) -> Any:
    """Return a float as the shortest decimal of the same f32, as in 0.7 for 0.699999988079071."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _byte_level(where: str, vocabulary: GgufVocabulary) -> Tokenizer:
    """Build GPT-2's byte-level BPE."""
    rules = WORD_RULES[vocabulary.pre]
    merges = [_pair(where, merge) for merge in vocabulary.merges]
    vocab = {token: index for index, token in enumerate(vocabulary.tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=rules.whole_words))
    if rules.normalizer is not None:
        tokenizer.normalizer = rules.normalizer
    tokenizer.pre_tokenizer = rules.pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pair(where: str, merge: str) -> tuple[str, str]:
    pair = merge.split(" ", 2)  # a damaged merge may have millions of spaces
    if len(pair) != 2:
        raise BuildError(f"{where}: a merge of the vocabulary is not a pair of tokens")
    return pair[0], pair[1]


def _sentence_piece(where: str, vocabulary: GgufVocabulary) -> Tokenizer:
    """Build SentencePiece's BPE, with merges derived from scores, and byte tokens for unknown characters."""
    _check_scores(where, vocabulary)
    vocab = {token: index for index, token in enumerate(vocabulary.tokens)}
    return _with_byte_tokens(vocabulary, vocab, _merges_of_scores(where, vocabulary, vocab))


def _gemma4(where: str, vocabulary: GgufVocabulary) -> Tokenizer:
    """Build Gemma 4's BPE, which is SentencePiece's with merges in the file."""
    vocab = {token: index for index, token in enumerate(vocabulary.tokens)}
    return _with_byte_tokens(vocabulary, vocab, [_pair(where, merge) for merge in vocabulary.merges])


def _with_byte_tokens(
    vocabulary: GgufVocabulary, vocab: dict[str, int], merges: list[tuple[str, str]]
) -> Tokenizer:
    unknown = vocabulary.text(vocabulary.unk_token_id) or "<unk>"
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges,
            unk_token=unknown if unknown in vocab else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    _mark_spaces(tokenizer, vocabulary, [])
    return tokenizer


def _unigram(where: str, vocabulary: GgufVocabulary) -> Tokenizer:
    """Build SentencePiece's unigram model: splits text into the pieces with the largest sum of scores.

    Characters that no piece matches become byte tokens, if the vocabulary has them.
    """
    _check_scores(where, vocabulary)
    kinds = vocabulary.token_type or [TokenType.NORMAL] * len(vocabulary.tokens)
    plain = (TokenType.NORMAL, TokenType.USER_DEFINED)
    found = [score for score, kind in zip(vocabulary.scores, kinds, strict=True) if kind in plain]
    # Tokens of other types should not match text. The library matches all tokens, but prefers higher scores,
    # so these tokens get the lowest score.
    least = min(found, default=0.0)
    scored = zip(vocabulary.tokens, vocabulary.scores, kinds, strict=True)
    vocab = [(token, score if kind in plain else least) for token, score, kind in scored]
    has_bytes = TokenType.BYTE in kinds
    tokenizer = Tokenizer(models.Unigram(vocab, vocabulary.unk_token_id or 0, has_bytes))
    _mark_spaces(tokenizer, vocabulary, _cleaning(vocabulary))
    return tokenizer


def _charsmap(vocabulary: GgufVocabulary) -> bytes:
    return bytes(each % 256 for each in vocabulary.precompiled_charsmap)


def _cleaning(vocabulary: GgufVocabulary) -> list[Any]:
    """Return the normalisation steps before spaces are replaced by `▁`."""
    steps: list[Any] = []
    if vocabulary.precompiled_charsmap:
        steps.append(normalizers.Precompiled(_charsmap(vocabulary)))
    if vocabulary.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(r"\A +| +\z|(?<= ) +"), ""))
    return steps


def _mark_spaces(tokenizer: Tokenizer, vocabulary: GgufVocabulary, cleaning: list[Any]) -> None:
    spaces: list[Any] = [normalizers.Replace(" ", "▁")]
    text: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.add_space_prefix:
        spaces.insert(0, normalizers.Prepend("▁"))
        text.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence([*cleaning, *spaces])
    tokenizer.decoder = decoders.Sequence(text)


def _check_scores(where: str, vocabulary: GgufVocabulary) -> None:
    if len(vocabulary.scores) != len(vocabulary.tokens):
        raise BuildError(f"{where}: the vocabulary has {len(vocabulary.scores)} scores for its tokens")


def _merges_of_scores(where: str, vocabulary: GgufVocabulary, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Return all pairs of pieces whose concatenation is a piece, by descending score of the concatenation."""
    ranked = sorted(range(len(vocabulary.tokens)), key=lambda index: -vocabulary.scores[index])
    lengths = {len(piece) for piece in vocab}
    merges: list[tuple[str, str]] = []
    num_chars = 0
    for piece in (vocabulary.tokens[index] for index in ranked):
        pairs = sorted(_pairs(piece, vocab, lengths), key=lambda p: (vocab[p[0]], vocab[p[1]]))
        merges += pairs
        num_chars += len(piece) * len(pairs)
        check_at_most(where, "the vocabulary has {} merges", len(merges), MAX_MERGES)
        check_at_most(where, "the merges of the vocabulary have {} characters", num_chars, MAX_MERGED_CHARS)
    return merges


def _pairs(piece: str, vocab: dict[str, int], lengths: set[int]) -> Iterator[tuple[str, str]]:
    """Yield the splits of `piece` into two pieces of `vocab`; `lengths`: the lengths of all pieces."""
    for cut in range(1, len(piece)):
        if cut in lengths and len(piece) - cut in lengths:
            pair = piece[:cut], piece[cut:]
            if pair[0] in vocab and pair[1] in vocab:
                yield pair


def _add_special_tokens(tokenizer: Tokenizer, vocabulary: GgufVocabulary) -> None:
    special = dict.fromkeys([*vocabulary.control, *vocabulary.of_type(TokenType.UNKNOWN)])
    plain = [t for t in vocabulary.of_type(TokenType.USER_DEFINED) if t not in special]
    is_phi3 = vocabulary.model == "llama" and PHI3_TOKEN in special

    def added(token: str, special: bool) -> AddedToken:
        strips = is_phi3 and token not in PHI3_KEEPS_SPACES
        return AddedToken(token, special=special, normalized=False, rstrip=strips)

    tokenizer.add_special_tokens([added(token, special=True) for token in special])
    tokenizer.add_tokens([added(token, special=False) for token in plain])


def _adds_bos(vocabulary: GgufVocabulary) -> bool:
    if vocabulary.add_bos_token is not None:
        return vocabulary.add_bos_token
    if vocabulary.model == "gpt2":
        return WORD_RULES[vocabulary.pre].adds_bos
    return vocabulary.model in ("llama", "gemma4")


def _frame(tokenizer: Tokenizer, vocabulary: GgufVocabulary, add_bos: bool) -> None:
    """Make `encode` add the BOS token if `add_bos`, and the EOS token if the vocabulary says so."""
    bos = vocabulary.text(vocabulary.bos_token_id) if add_bos else None
    eos = vocabulary.text(vocabulary.eos_token_id) if vocabulary.add_eos_token else None
    added = [token for token in (bos, eos) if token is not None]
    if not added:
        return
    single = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[(token, tokenizer.token_to_id(token)) for token in set(added)]
    )


def _tokenizer_config(vocabulary: GgufVocabulary, add_bos: bool) -> dict[str, Any]:
    config = {
        **{name: vocabulary.text(getattr(vocabulary, f"{name}_id")) for name in NAMED_TOKENS},
        "add_bos_token": add_bos,
        "add_eos_token": vocabulary.add_eos_token,
        "chat_template": templates(vocabulary.chat_template, vocabulary.named_templates),
    }
    return {key: value for key, value in config.items() if value is not None}


def _generation_config(vocabulary: GgufVocabulary) -> dict[str, Any]:
    named = [vocabulary.eos_token_id, vocabulary.eot_token_id, vocabulary.eom_token_id]
    control = set(vocabulary.control)
    found = END_TOKENS | (CONTROL_ENDS & control)
    ends = [i for i, token in enumerate(vocabulary.tokens) if token in found]
    eos = list(dict.fromkeys(i for i in (*named, *ends) if vocabulary.text(i) is not None))
    if control.issuperset(TURN_ENDS):
        eos = [i for i in eos if vocabulary.text(i) != MESSAGE_END]
    others = {"bos_token_id": vocabulary.bos_token_id, "pad_token_id": vocabulary.pad_token_id}
    known = {name: token_id for name, token_id in others.items() if vocabulary.text(token_id) is not None}
    return {"eos_token_id": eos, **known}


_BUILDERS: dict[str, Callable[[str, GgufVocabulary], Tokenizer]] = {
    "gemma4": _gemma4,
    "gpt2": _byte_level,
    "llama": _sentence_piece,
    "t5": _unigram,
}
