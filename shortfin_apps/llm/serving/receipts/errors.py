"""Errors of receipts and keys."""

from __future__ import annotations

from shortfin_apps.llm.contract.errors import LlmError


class ReceiptError(LlmError):
    """A receipt that cannot be read or verified, or a key that cannot be used."""
