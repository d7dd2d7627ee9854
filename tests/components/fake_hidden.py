"""Hidden states of a fake device: a hash of the tokens up to each one, in the table by row.

A row that is not the token's before it, or was written by another request, is an error of the host's.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np

from shortfin_apps.llm.components.runtime.device import Array
from shortfin_apps.llm.contract.abi import NO_HIDDEN, hidden_row


def follow_hidden(arguments: Mapping[str, Array], starts: Array, seq_lens: Array) -> Array:
    """Check what each row reads of the table, once its tokens are stored, and write what it leaves.

    Returns whether each row knows the hidden state before its first token, [rows].
    """
    table, cache, blocks = (arguments[name] for name in ("hidden_states", "cache", "seq_block_ids"))
    sources, targets = _rows(arguments)
    stride = cache.shape[1]
    knows, left = [], 0.0
    for row, (start, seq_len) in enumerate(zip(starts, seq_lens, strict=True)):
        tokens = cache[blocks[row]].reshape(-1)[:seq_len]
        source = sources[row]
        read = left if source < 0 else 0.0 if source == NO_HIDDEN else float(table[source, 0])
        # Drafts past a row's pages read the scratch page, which others write.
        wanted = _hidden_of(tokens[:start]) if blocks[row][: -(-int(seq_len) // stride)].all() else np.nan
        if source != NO_HIDDEN and not np.isnan(wanted) and not np.isnan(read):
            assert read == wanted, f"the hidden state before position {start} is another's"
        knows.append(source != NO_HIDDEN and not np.isnan(read))
        left = _hidden_of(tokens)
        if targets[row] != NO_HIDDEN:
            table[targets[row], 0] = left
    used = targets[targets != NO_HIDDEN]
    assert len(set(used.tolist())) == len(used), "two rows leave their hidden states in one place"
    return np.array(knows)


def _rows(arguments: Mapping[str, Array]) -> tuple[Array, Array]:
    if "hidden_to" in arguments:
        return arguments["hidden_from"], arguments["hidden_to"]
    pairs = list(zip(arguments["slots"].tolist(), arguments["positions"].tolist(), strict=True))
    sources, targets = (
        np.array([hidden_row(slot, at - back) if at >= back else NO_HIDDEN for slot, at in pairs])
        for back in (1, 0)
    )
    return np.where(arguments["hidden_from"] == NO_HIDDEN, NO_HIDDEN, sources), targets


def _hidden_of(tokens: Array) -> float:
    """NaN if one of them is."""
    return (
        np.nan if np.isnan(tokens).any() else float(1 + zlib.crc32(tokens.astype(np.int64).tobytes()) % 9973)
    )
