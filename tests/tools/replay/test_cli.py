from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.cli import main
from shortfin_apps.llm.serving.receipts.receipt import Receipt, to_text
from shortfin_apps.llm.serving.receipts.signature import Signer

KEY = Ed25519PrivateKey.from_private_bytes(b"k" * 32)


def written(tmp_path: Path, *receipts: Receipt) -> str:
    file = tmp_path / "receipts.jsonl"
    file.write_text("".join(json.dumps(receipt.to_json()) + "\n" for receipt in receipts))
    return str(file)


def test_replays_here_and_says_so(
    tiny_artifact: Artifact, receipts: list[Receipt], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, directory = written(tmp_path, *receipts), str(tiny_artifact.vmfb.parent)
    assert main(["replay", file, directory, "--schedule", "alone,warm"]) == 0
    printed = capsys.readouterr().out
    assert f"{len(receipts)} of {len(receipts)}" in printed
    assert "ok (cached tokens: " in printed


def test_a_difference_is_the_exit_status(
    tiny_artifact: Artifact, receipts: list[Receipt], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, receipts[0], replace(receipts[1], logits=to_text(b"x" * 16)))
    arguments = [file, str(tiny_artifact.vmfb.parent), "--schedule", "alone", "--json", "-"]
    assert main(["replay", *arguments]) == 1
    [schedule] = json.loads(capsys.readouterr().out)["schedules"]
    assert (schedule["same"], [each["receipt"] for each in schedule["differences"]]) == (1, [2])


def test_signatures_are_verified_first(
    tiny_artifact: Artifact, receipts: list[Receipt], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    public = tmp_path / "public.pem"
    pem = KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    public.write_bytes(pem)
    signed = Signer(KEY).signed(receipts[0])
    common = [str(tiny_artifact.vmfb.parent), "--schedule", "alone", "--public-key", str(public)]
    assert main(["replay", written(tmp_path, signed), *common]) == 0
    for forged in (receipts[0], replace(signed, output_ids=signed.output_ids[::-1])):
        assert main(["replay", written(tmp_path, forged), *common]) == 2
    assert "was changed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such"], "cannot be read"),
        (["FILE", "DIR", "--schedule", "alone,wrong"], "no schedule is named 'wrong'; there are alone, "),
        (["FILE", "--schedule", "alone"], "needs DIR"),
        (["FILE", "--concurrency", "0"], "at least 1"),
        (["FILE", "no-such-directory"], "no-such-directory"),
        (["FILE", "--url", "http://127.0.0.1:9"], "no server answers"),
        (["FILE", "DIR", "--public-key", "no-such"], "cannot be read"),
    ],
)
def test_misuse_is_a_sentence(
    arguments: list[str],
    message: str,
    tiny_artifact: Artifact,
    receipts: list[Receipt],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    known: dict[str, Any] = {"FILE": written(tmp_path, receipts[0]), "DIR": str(tiny_artifact.vmfb.parent)}
    assert main(["replay", *(known.get(argument, argument) for argument in arguments)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
