"""Text from files, servers and models, made safe for a terminal and for files."""

from __future__ import annotations

_KEPT = "\n\t"
_REPLACEMENT = 0xFFFD
# U+2400 and so on are pictures of the characters below U+0020; those from U+0080 have none.
_SHOWN: dict[int, int | None] = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in _KEPT},
    ord("\r"): None,  # part of a line end, or it would let what follows overwrite the line
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), _REPLACEMENT),
    **dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A)), _REPLACEMENT),  # they reorder the line
    **dict.fromkeys(range(0xD800, 0xE000), _REPLACEMENT),  # lone surrogates, which no stream can encode
}


def visible(text: str) -> str:
    """The text with pictures in the place of control characters; line feeds and tabs stay.

    Each character is replaced alone, so pieces of a text may be shown one by one.
    """
    return text.translate(_SHOWN)
