"""Records the token ids that SentencePiece gives for two unigram vocabularies with bytes for what they lack.

    pip install sentencepiece==0.2.3
    python -m tests.golden.make_unigram_ids

The vocabularies are learned from some of the texts. Ids are recorded as hashes of blocks of texts, without
those texts, named by their index, for which ours differ.
"""

from __future__ import annotations

import base64
import io
import json
import tempfile
import unicodedata
import zlib
from typing import Any

import sentencepiece  # type: ignore[import-not-found]
from sentencepiece import sentencepiece_model_pb2 as model_pb2

from tests.golden.tokenizer_vocabularies import hashes
from tests.golden.unigram import GOLDEN, NORMALISATIONS, own_unigram_ids, plain_texts


def main() -> None:
    recorded: dict[str, Any] = {}
    trained = {rule: _trained(rule) for rule in NORMALISATIONS}
    for rule, model in trained.items():
        recorded[rule] = _vocabulary(model)
    _write(recorded)  # own_unigram_ids reads it
    for rule, model in trained.items():
        theirs = sentencepiece.SentencePieceProcessor(model_proto=model).encode(plain_texts())
        ours = own_unigram_ids(rule)
        differ = [i for i, (their, our) in enumerate(zip(theirs, ours, strict=True)) if their != list(our)]
        recorded[rule] |= {"differ": differ, "hashes": hashes(theirs, set(differ))}
        print(f"{rule}: {len(differ)} of {len(theirs)} texts differ")
    _write(recorded)


def _write(recorded: dict[str, Any]) -> None:
    lines = ",\n".join(
        f'"{rule}": {json.dumps(value, ensure_ascii=False)}' for rule, value in recorded.items()
    )
    GOLDEN.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def _trained(rule: str) -> bytes:
    with tempfile.NamedTemporaryFile("w", suffix=".tsv") as rules:
        rules.write(_rules())
        rules.flush()
        named = {"normalization_rule_tsv": rules.name} if rule == "widths" else {}
        return _train(rule, named or {"normalization_rule_name": rule})


def _rules() -> str:
    """Characters of full width become ASCII, ligatures letters, and what is like a space a space."""
    characters = [*map(chr, range(0xFF01, 0xFF5F)), *"\t\n\r\u00a0\u3000", *"ﬁﬂ"]
    pairs = [
        (each, unicodedata.normalize("NFKC", each) if each.isprintable() else " ") for each in characters
    ]
    return "".join(f"{ord(each):X}\t{' '.join(f'{ord(c):X}' for c in text)}\n" for each, text in pairs)


def _train(rule: str, normalisation: dict[str, str]) -> bytes:
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(plain_texts()[:600]),
        model_writer=made,
        vocab_size=2400,
        character_coverage=0.98,
        model_type="unigram",
        byte_fallback=True,
        **normalisation,
        remove_extra_whitespaces=NORMALISATIONS[rule],
        num_threads=1,
        minloglevel=2,
    )
    return made.getvalue()


def _vocabulary(model: bytes) -> dict[str, Any]:
    parsed = model_pb2.ModelProto.FromString(model)
    charsmap = zlib.compress(parsed.normalizer_spec.precompiled_charsmap, 9)
    return {
        "tokens": [piece.piece for piece in parsed.pieces],
        "scores": [round(piece.score, 6) for piece in parsed.pieces],
        "types": [piece.type for piece in parsed.pieces],
        "charsmap": base64.b64encode(charsmap).decode(),
    }


if __name__ == "__main__":
    main()
