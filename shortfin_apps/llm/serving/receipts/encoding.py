"""The encoding of a receipt's values: canonical JSON, which digests are computed from, and bytes as text."""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Mapping, Sequence
from hashlib import blake2b

DIGEST_BYTES = 16
LARGEST_EXACT = 2**53  # numbers up to this are exact in JSON readers of every language


def canonical_json(value: object) -> bytes:
    """Returns ASCII JSON with sorted keys and no white space, and 1.0 as 1; numbers must be finite."""
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def digest(*parts: bytes) -> bytes:
    """Returns blake2b with 16 bytes."""
    return blake2b(b"".join(parts), digest_size=DIGEST_BYTES).digest()


def to_text(data: bytes) -> str:
    """Returns base64url (RFC 4648) without padding."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def from_text(text: str) -> bytes:
    """Decodes the output of `to_text`. Raises ValueError for anything else."""
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise ValueError(f"{text[:40]!r} is not base64url") from error
    if to_text(data) != text:
        raise ValueError(f"{text[:40]!r} is not base64url as it is written here")
    return data


def _plain(value: object) -> object:
    """Converts whole floats to integers: a JSON tool in between may write 1.0 as 1."""
    if (
        isinstance(value, float)
        and math.isfinite(value)
        and value == int(value)
        and abs(value) < LARGEST_EXACT
    ):
        return int(value)
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(inner) for inner in value]
    return value
