"""Control characters of texts that others wrote, which must not move a terminal's cursor or colour it."""

from __future__ import annotations

_KEPT = "\n\t\r"
# U+2400 and so on are pictures of the characters below U+0020; those from U+0080 have none.
_PICTURES = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in _KEPT},
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
    **dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A)), 0xFFFD),  # they reorder what is beside
}


def visible(text: str) -> str:
    """The text with pictures in the place of control characters; line ends and tabs stay."""
    return text.translate(_PICTURES)
