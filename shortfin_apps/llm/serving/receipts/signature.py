"""Signs and verifies receipts: Ed25519 (RFC 8032), with keys in PEM files.

openssl genpkey -algorithm ed25519 -out key.pem
openssl pkey -in key.pem -pubout -out public.pem

Importing this module raises ReceiptError if the extra `receipts` is not installed.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

from shortfin_apps.llm.serving.receipts.receipt import KEY_ID_BYTES, Receipt, ReceiptError, from_text, to_text

try:
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key
except ModuleNotFoundError as error:  # an extra
    raise ReceiptError(
        f"signatures need {error.name}; install it with `pip install 'shortfin-llm[receipts]'`"
    ) from error


class Signer:
    """Signs with a private key; `key` is the id of its public key."""

    def __init__(self, private_key: Ed25519PrivateKey) -> None:
        self._private_key = private_key
        self.key = key_id(private_key.public_key())

    @classmethod
    def load(cls, path: Path) -> Signer:
        """Load a PEM file. Raises ReceiptError with a message that never contains key material."""
        try:
            key = load_pem_private_key(_read(path), password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            raise _not_a_key(path, "private", "`openssl genpkey -algorithm ed25519`") from None
        if not isinstance(key, Ed25519PrivateKey):
            raise _not_a_key(path, "private", "`openssl genpkey -algorithm ed25519`")
        return cls(key)

    def signed(self, receipt: Receipt) -> Receipt:
        receipt = replace(receipt, key=self.key)
        return replace(receipt, signature=to_text(self._private_key.sign(receipt.signed_bytes)))


class Verifier:
    """Verifies signatures with a public key."""

    def __init__(self, public_key: Ed25519PublicKey) -> None:
        self._public_key = public_key
        self.key = key_id(public_key)

    @classmethod
    def load(cls, path: Path) -> Verifier:
        """Load a PEM file. Raises ReceiptError."""
        try:
            key = load_pem_public_key(_read(path))
        except (ValueError, UnsupportedAlgorithm):
            raise _not_a_key(path, "public", "`openssl pkey -pubout`") from None
        if not isinstance(key, Ed25519PublicKey):
            raise _not_a_key(path, "public", "`openssl pkey -pubout`")
        return cls(key)

    def check(self, receipt: Receipt) -> None:
        """Raise ReceiptError unless this key signed the receipt in its present form."""
        if receipt.signature is None:
            raise ReceiptError("the receipt is not signed; serve with `--receipt-key`")
        if receipt.key != self.key:
            raise ReceiptError(f"the receipt is signed with the key {receipt.key}, and this is {self.key}")
        try:
            self._public_key.verify(from_text(receipt.signature), receipt.signed_bytes)
        except InvalidSignature:
            raise ReceiptError("the receipt was changed: its signature is of another one") from None


def key_id(public_key: Ed25519PublicKey) -> str:
    """Return the 8-byte blake2b digest of the key's 32 bytes, as base64url."""
    return to_text(blake2b(public_key.public_bytes_raw(), digest_size=KEY_ID_BYTES).digest())


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ReceiptError(f"{path}: cannot be read ({error.strerror})") from error


def _not_a_key(path: Path, kind: str, command: str) -> ReceiptError:
    return ReceiptError(f"{path}: holds no {kind} Ed25519 key in PEM without a password; {command} makes one")
