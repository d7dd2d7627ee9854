from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from shortfin_apps.llm.serving.receipts.errors import ReceiptError
from shortfin_apps.llm.serving.receipts.key_files import load_signer, load_verifier


@pytest.mark.parametrize("load", [load_signer, load_verifier])
def test_without_the_extra_it_is_named(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "shortfin_apps.llm.serving.receipts.signature", raising=False)
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    with pytest.raises(ReceiptError, match=r"pip install 'shortfin-llm\[receipts\]'"):
        load(Path("key.pem"))


@pytest.mark.parametrize("load", [load_signer, load_verifier])
def test_a_missing_file_is_named(load: Any) -> None:
    with pytest.raises(ReceiptError, match=r"no-such\.pem"):
        load(Path("no-such.pem"))
