"""The error for files of a batch."""

from __future__ import annotations

from shortfin_apps.llm.contract.errors import LlmError


class BatchFileError(LlmError):
    """A file of a batch cannot be read or written, or does not belong to the batch."""
