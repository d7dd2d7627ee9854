"""Texts in many scripts, the same wherever they are made, on which tokenizers are compared."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

_Below = Callable[[int], int]  # a number from 0 to below this one

NUM_TEXTS = 10_000
# Ranges of code points: letters with and without case, marks, numbers, punctuation, symbols, emoji.
SCRIPTS = (
    *((0x61, 0x7B), (0x61, 0x7B), (0x41, 0x5B), (0x30, 0x3A), (0x21, 0x7F)),  # ASCII
    *((0xA1, 0x180), (0x180, 0x250), (0x300, 0x330), (0x391, 0x3CA), (0x410, 0x450)),  # Europe
    *((0x531, 0x557), (0x5D0, 0x5EB), (0x5B0, 0x5BE), (0x620, 0x66A), (0x6F0, 0x6FA)),  # Armenia, Near East
    *((0x905, 0x93A), (0x93A, 0x950), (0x966, 0x970), (0x985, 0x9CD), (0xB85, 0xBCE)),  # India
    *((0xE01, 0xE3B), (0xE40, 0xE50), (0x10D0, 0x10F1), (0x1200, 0x1240), (0x1780, 0x17D4)),
    *((0x1E00, 0x1F00), (0x1F00, 0x1F16), (0x2010, 0x2027), (0x2150, 0x2190), (0x2200, 0x2240)),
    *((0x3001, 0x3012), (0x3041, 0x3097), (0x30A1, 0x30FB), (0x4E00, 0x4F00), (0x9F00, 0x9FA5)),
    *((0xAC00, 0xAD00), (0x1100, 0x1113), (0xFF01, 0xFF5F), (0x1D400, 0x1D440), (0x1F600, 0x1F640)),
)
PIECES = (
    *(
        "'s",
        "'S",
        "'ll",
        "'LL",
        "'Re",
        "\u2019s",
        "'",
        "I'm",
        "don't",
        "camelCase",
        "HTTPServer",
        "XMLs",
        "Ünïcode",
    ),
    *(
        "12345",
        "3.14",
        "1,000,000",
        "٣٤٥",
        "x1",
        "return x",
        "def f(x):",
        "=>",
        "!=",
        "///",
        "...",
        "`",
        "$9",
    ),
    *(
        "<s>",
        "</s>",
        "<|end|>",
        "e\u0301",
        "n\u0303a",
        "\u200d",
        "\ufe0f",
        "👩‍👩‍👧",
        "🇫🇷",
        "한글",
        "日本語",
        "ไทย",
    ),
)
SPACES = (" ", " ", " ", "  ", "    ", "\n", "\n\n", " \n", "\r\n", "\t", "\u00a0", "\u3000", "")


def texts() -> list[str]:
    """NUM_TEXTS texts of up to some 60 characters."""
    # Of Python's generator, only `random()` promises to stay the same.
    random = Random(16).random
    return [_text(lambda bound: int(random() * bound)) for _ in range(NUM_TEXTS)]


def _text(below: _Below) -> str:
    words = (_word(below) + SPACES[below(len(SPACES))] for _ in range(1 + below(8)))
    return SPACES[below(len(SPACES))] * below(2) + "".join(words)


def _word(below: _Below) -> str:
    if below(4) == 0:
        return PIECES[below(len(PIECES))]
    first, end = SCRIPTS[below(len(SCRIPTS))]
    return "".join(chr(first + below(end - first)) for _ in range(1 + below(7)))
