"""Loads keys, which needs an optional dependency."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shortfin_apps.llm.serving.receipts.errors import ReceiptError

if TYPE_CHECKING:  # an extra
    from shortfin_apps.llm.serving.receipts.signature import Signer, Verifier


def load_signer(path: Path) -> Signer:
    """Loads a private key. Raises ReceiptError if the file has none, or the extra is not installed."""
    try:
        from shortfin_apps.llm.serving.receipts.signature import Signer
    except ModuleNotFoundError as error:
        raise _without(error) from error
    return Signer.load(path)


def load_verifier(path: Path) -> Verifier:
    """Loads a public key. Raises ReceiptError if the file has none, or the extra is not installed."""
    try:
        from shortfin_apps.llm.serving.receipts.signature import Verifier
    except ModuleNotFoundError as error:
        raise _without(error) from error
    return Verifier.load(path)


def _without(error: ModuleNotFoundError) -> ReceiptError:
    return ReceiptError(
        f"signatures need {error.name}; install it with `pip install 'shortfin-llm[receipts]'`"
    )
