"""Rules that split text into words (pre-tokenizers), for byte-level BPE vocabularies in GGUF files.

A GGUF file only has the name of the rules, `tokenizer.ggml.pre`. Where the model's original `tokenizer.json`
and llama.cpp differ, as for letters with combining marks, these rules follow `tokenizer.json`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from tokenizers import Regex, normalizers, pre_tokenizers


@dataclass(frozen=True, slots=True)
class WordRules:
    """The rules of a named pre-tokenizer.

    `patterns`: Oniguruma regular expressions. The first splits the text into its matches and the pieces
    between them; each following pattern splits these further. The resulting pieces are the words.
    `whole_words`: a word that is in the vocabulary becomes one token, even if merges do not produce it;
    `adds_bos`: the default of `tokenizer.ggml.add_bos_token`; `composes`: text is first normalised to NFC.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    adds_bos: bool = False
    composes: bool = False

    @property
    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.composes else None

    @property
    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """The pre-tokenizer that splits text into words, then maps each byte to a printable character."""
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(False, use_regex=False)])


# Parts common to several patterns.
_CONTRACTION = r"'s|'t|'re|'ve|'m|'ll|'d"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_HAN_AND_KANA = r"[\x{4e00}-\x{9fa5}\x{3040}-\x{30ff}]+"
# _WORD: optional capitals, then lower-case letters; _CAPITALS: capitals, then optional lower-case letters.
_WORD = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_CAPITALS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
# Cased letters that DeepSeek's pattern does not match, as it lists the letters of an old Unicode version.
_UNLISTED = (
    r"\x{560}\x{588}\x{10c7}-\x{10ff}\x{1c80}-\x{1c8a}\x{2d00}-\x{2d2d}\x{a790}-\x{a7fa}\x{ab30}-\x{ab68}"
    r"\x{10570}-\x{105bc}\x{10d50}-\x{10d85}\x{16e40}-\x{16e7f}\x{1d400}-\x{1df2a}"
)

_GPT2 = rf"{_CONTRACTION}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
# Anything but spaces, full stops and commas, of several scripts.
_NO_STOPS = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{ff0c}\x{3001}\x{964}\x{6d4}\x{60c})]+"
_HAN_AND_HANGUL = r"[\x{4e00}-\x{9fa5}\x{800}-\x{4e00}\x{ac00}-\x{d7ff}]+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)


def _gpt4(numbers: str, letters: str = r"\p{L}", line_ends: str = r"[\r\n]*") -> str:
    """Return GPT-4's pattern.

    It matches a contraction, letters with at most one other character before them, `numbers`, or the rest,
    with `line_ends` after punctuation.
    """
    letter = letters if letters == r"\p{L}" else f"[{letters}]"
    return (
        rf"(?i:{_CONTRACTION})|[^\r\n\p{{L}}\p{{N}}]?{letter}+|{numbers}"
        rf"| ?[^\s{letters}\p{{N}}]+{line_ends}|{_SPACES}"
    )


def _gpt4o(numbers: str, contraction: str = "") -> str:
    """Return GPT-4o's pattern: like GPT-4's, but words are also split before a capital after lower case.

    `contraction`: the pattern of a contraction that belongs to the word before it.
    """
    words = "|".join(rf"[^\r\n\p{{L}}\p{{N}}]?{word}{contraction}" for word in (_WORD, _CAPITALS))
    return rf"{words}|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


_CASED_CONTRACTION = f"(?i:{_CONTRACTION})?"

LLAMA3 = WordRules((_gpt4(r"\p{N}{1,3}"),), whole_words=True, adds_bos=True)
GPT4 = replace(LLAMA3, whole_words=False, adds_bos=False)
GPT2 = WordRules((_GPT2,))
DIGITS = WordRules((r"\p{N}", _GPT2))
QWEN2 = WordRules((_gpt4(r"\p{N}"),), composes=True)
GPT4O = WordRules((_gpt4o(r"\p{N}{1,3}", _CASED_CONTRACTION),))
DEEPSEEK3 = WordRules((r"\p{N}{1,3}", _HAN_AND_KANA, _DEEPSEEK3))


def _named(rules: Mapping[WordRules, Iterable[str]]) -> dict[str, WordRules]:
    return {name: rule for rule, names in rules.items() for name in names}


WORD_RULES = _named(
    {
        WordRules((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")): ("default",),
        GPT2: (
            *("gpt-2", "phi-2", "jais", "trillion", "exaone4"),
            *("gigachat", "a.x-4.0", "mellum", "modern-bert"),
        ),
        replace(GPT2, composes=True): ("olmo", "mpt"),
        DIGITS: ("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"),
        replace(DIGITS, composes=True): ("command-r",),
        LLAMA3: (
            *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        ),
        GPT4: ("dbrx", "smaug-bpe", "chatglm-bpe", "granite-docling"),  # in llama.cpp, the last is as GPT-2's
        replace(GPT4, whole_words=True): ("glm4", "glm5"),
        QWEN2: ("qwen2",),
        replace(QWEN2, composes=False): (
            *("deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan", "solar-open", "grok-2", "kormo"),
        ),
        WordRules((_gpt4(r"\p{N}", line_ends=""),)): ("seed-coder",),
        WordRules((r"\p{N}{1,3}", _gpt4(r"\p{N}+")), whole_words=True): ("minicpm5",),
        WordRules((_NO_STOPS, r"\p{N}")): ("viking",),
        WordRules((r"\p{N}+", r"(?=(\d{3})+(?!\d))")): ("superbpe",),
        WordRules((_gpt4(r"\p{N}", r"\p{L}\p{M}"),), composes=True): ("qwen35",),
        GPT4O: ("gpt-4o", "llama4", "kanana2", "minimax-m2"),
        WordRules((_gpt4o(r"\p{N}"),), whole_words=True, adds_bos=True): ("tekken",),
        WordRules(
            (
                r"[\r\n]",
                rf"\s?[\p{{Lu}}\p{{Ll}}\p{{Lt}}&&[^{_UNLISTED}]]+",
                r"\s?[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}]+",
                r"\s+$",
                _HAN_AND_HANGUL,
                r"\p{N}+",
            )
        ): ("deepseek-llm",),
        WordRules((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_AND_HANGUL, r"\p{N}")): ("deepseek-coder",),
        DEEPSEEK3: ("deepseek-v3", "hunyuan-dense", "joyai-llm"),
        WordRules((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]")): ("falcon",),
    }
)
