from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.serving.receipts.receipt import Receipt, ReceiptError, to_text
from shortfin_apps.llm.serving.receipts.signature import Signer, Verifier
from tests.serving.receipts.examples import receipt_json

KEY = Ed25519PrivateKey.from_private_bytes(b"s" * 32)
SIGNER, VERIFIER = Signer(KEY), Verifier(KEY.public_key())
SIGNED = receipt_json(signer=SIGNER, prompt="abc", seed=7)

CHANGES: dict[str, st.SearchStrategy[Any]] = {
    "artifact": st.binary(min_size=16, max_size=16).map(to_text),
    "tokenizer": st.binary(min_size=16, max_size=16).map(to_text),
    "logits": st.binary(min_size=16, max_size=16).map(to_text),
    "marks": st.binary(min_size=3, max_size=3).map(to_text),
    "prompt_ids": st.lists(st.integers(0, 9)),
    "output_ids": st.lists(st.integers(0, 9), min_size=3, max_size=3),
    "sampling": st.dictionaries(st.text(), st.integers() | st.text()),
    "finish": st.sampled_from(["stop", "length", "abort"]),
    "entries": st.lists(st.text(), max_size=2),
    "prompt": st.text(),
    "signature": st.binary(min_size=64, max_size=64).map(to_text),
}


def test_what_is_signed_is_verified() -> None:
    VERIFIER.check(Receipt.parse(SIGNED))


@given(st.data())
def test_any_change_breaks_the_signature(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(CHANGES)))
    changed = SIGNED | {name: data.draw(CHANGES[name].filter(lambda value: value != SIGNED[name]))}
    with pytest.raises(ReceiptError, match="was changed"):
        VERIFIER.check(Receipt.parse(changed))


def test_every_field_can_be_changed_above() -> None:
    assert set(CHANGES) == set(SIGNED) - {"version", "key"}  # which have one value, and name the key


def test_leaving_the_prompt_out_breaks_the_signature() -> None:
    with pytest.raises(ReceiptError, match="was changed"):
        VERIFIER.check(Receipt.parse({k: v for k, v in SIGNED.items() if k != "prompt"}))


def test_another_key_is_named() -> None:
    other = Verifier(Ed25519PrivateKey.from_private_bytes(b"o" * 32).public_key())
    with pytest.raises(ReceiptError, match=f"signed with the key {SIGNER.key}, and this is {other.key}"):
        other.check(Receipt.parse(SIGNED))


def test_an_unsigned_receipt_is_not_verified() -> None:
    with pytest.raises(ReceiptError, match="not signed"):
        VERIFIER.check(Receipt.parse(receipt_json()))


def test_keys_of_openssl_are_read(tmp_path: Path) -> None:
    private, public, rsa = (tmp_path / name for name in ("key.pem", "public.pem", "rsa.pem"))
    for command in (
        f"openssl genpkey -algorithm ed25519 -out {private}",
        f"openssl pkey -in {private} -pubout -out {public}",
        f"openssl genpkey -algorithm rsa -out {rsa}",
    ):
        subprocess.run(command.split(), check=True, capture_output=True)
    Verifier.load(public).check(Receipt.parse(receipt_json(signer=Signer.load(private))))
    for wrong in (public, rsa):
        with pytest.raises(ReceiptError, match="no private Ed25519 key"):
            Signer.load(wrong)
    for wrong in (private, rsa):
        with pytest.raises(ReceiptError, match="no public Ed25519 key"):
            Verifier.load(wrong)


@pytest.mark.parametrize("load", [Signer.load, Verifier.load])
def test_a_file_that_is_no_key_is_named(load: Any, tmp_path: Path) -> None:
    with pytest.raises(ReceiptError, match=r"no-such: cannot be read \(No such file or directory\)"):
        load(tmp_path / "no-such")
    file = tmp_path / "key.pem"
    file.write_bytes(b"\xff\x00 garbage")
    with pytest.raises(ReceiptError, match="holds no"):
        load(file)


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "shortfin_apps.llm.serving.receipts.signature", raising=False)
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    with pytest.raises(ReceiptError, match=r"pip install 'shortfin-llm\[receipts\]'"):
        importlib.import_module("shortfin_apps.llm.serving.receipts.signature")
