"""Token sequences of words that an output must not contain."""

from __future__ import annotations

from functools import lru_cache

from shortfin_apps.llm.serving.text.tokenizer import Tokenizer


@lru_cache(maxsize=64)
def bad_word_ids(tokenizer: Tokenizer, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Returns each word's sequences: at the start of a text, and after a space.

    As in vLLM, the second is omitted if the space is a separate token, because banning the word's last token
    after it would ban the same token elsewhere. Cached, because all prompts of a batch may share words.
    """
    return tuple(dict.fromkeys(ids for word in words for ids in _sequences(tokenizer, word) if ids))


def _sequences(tokenizer: Tokenizer, word: str) -> list[tuple[int, ...]]:
    plain = tuple(tokenizer.encode(word, add_special_tokens=False))
    spaced = tuple(tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
    is_another_token = len(spaced) == len(plain) and spaced[:1] != plain[:1]
    return [plain, spaced] if is_another_token else [plain]
