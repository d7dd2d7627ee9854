from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.serving.frontend.metrics import ServerMetrics
from shortfin_apps.llm.serving.receipts.receipt import ReceiptError
from shortfin_apps.llm.serving.receipts.signature import Signer
from shortfin_apps.llm.serving.server.config import ServerConfigError
from shortfin_apps.llm.serving.server.model_loading import load_model, open_artifact
from shortfin_apps.llm.serving.server.service import make_service, receipt_settings
from tests.serving.server.settings import parse


def test_receipts_are_off_unless_they_are_asked_for() -> None:
    settings = receipt_settings(parse("DIR"))
    assert (settings.are_default, settings.signer) == (False, None)
    assert receipt_settings(parse("DIR", "--receipts")).are_default


def test_a_key_signs_whatever_the_default_is(tmp_path: Path) -> None:
    key, file = Ed25519PrivateKey.generate(), tmp_path / "key.pem"
    file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    service = make_service(parse("DIR", "--receipt-key", str(file)), "m", ServerMetrics("m"))
    assert isinstance(service.receipts.signer, Signer)
    assert service.receipts.signer.key == Signer(key).key


def test_a_wrong_key_is_told_before_the_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ReceiptError, match=r"no-such\.pem: cannot be read"):
        make_service(parse("DIR", "--receipt-key", str(tmp_path / "no-such.pem")), "m", ServerMetrics("m"))


def test_files_without_a_manifest_cannot_have_receipts_by_default(
    tiny_artifact: Artifact, tmp_path: Path
) -> None:
    files = tiny_artifact.vmfb.parent
    config = parse(
        *("--vmfb", str(files / "model.vmfb"), "--parameters", str(files / "model.irpa")),
        *("--model-config", str(files / "config.json"), "--tokenizer-json", str(files / "tokenizer.json")),
        "--receipts",
    )
    with pytest.raises(ServerConfigError, match="`--receipts` needs the manifest"):
        load_model(open_artifact(config), config, ServerMetrics("m"))


@pytest.mark.parametrize(
    ("flags", "keeps_any"),
    [
        ([], True),
        (["--stored-responses", "0"], False),
        (["--device", "hip"], True),
        (["--api-processes", "1"], True),
        (["--api-processes", "2"], False),
        (["--api-processes", "2", "--stored-responses", "9"], False),
    ],
)
def test_responses_are_stored_by_a_single_process_only(flags: list[str], keeps_any: bool) -> None:
    service = make_service(parse("DIR", *flags), "m", ServerMetrics("m"))
    assert service.responses.keeps_any == keeps_any
