"""Records the token ids that llama.cpp gives for a GGUF vocabulary with each rule for words.

    pip install llama-cpp-python==0.3.36  # llama.cpp 0c1e570
    python -m tests.golden.make_tokenizer_ids

The vocabularies are small, but their merges were learned from texts in many scripts that were not split into
words, so that nearly every border between two words shows in the ids. llama.cpp's ids are recorded as hashes
of blocks of texts, without those texts, named by their index, for which ours differ: tests/builder/sources/
test_word_rules.py says why they do.
"""

from __future__ import annotations

import json
import re
import tempfile
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gguf import GGUFWriter
from llama_cpp import Llama  # type: ignore[import-not-found]
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from shortfin_apps.llm.builder.sources.word_rules import WORD_RULES
from tests.golden.tokenizer_corpus import texts
from tests.golden.tokenizer_vocabularies import GOLDEN, SPACE_PREFIX, hashes, keys_of, names_of_rules, own_ids

NUM_MERGES = 1500


def main() -> None:
    recorded: dict[str, Any] = {"merges": _learned_merges(), "pieces": _learned_pieces(), "ids": {}}
    _write(recorded)  # keys_of reads it
    for name in (*SPACE_PREFIX, *names_of_rules()):
        theirs, ours = _llama_ids(name), own_ids(name)
        differ = [i for i, (their, our) in enumerate(zip(theirs, ours, strict=True)) if their != list(our)]
        recorded["ids"][name] = {"differ": differ, "hashes": hashes(theirs, set(differ))}
        print(f"{name}: {len(differ)} of {len(theirs)} texts differ")
        _write(recorded)


def _write(recorded: dict[str, Any]) -> None:
    """One line for each vocabulary's ids, and the merges and pieces in a line each."""
    ids = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in recorded["ids"].items())
    learned = "".join(f'"{key}": {json.dumps(recorded[key])},\n' for key in ("merges", "pieces"))
    GOLDEN.write_text(f'{{\n{learned}"ids": {{\n{ids}\n}}}}\n', encoding="utf-8")


def _learned_merges() -> list[str]:
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    _train(learned, _plain_texts(), len(alphabet) + NUM_MERGES, alphabet)
    return [" ".join(pair) for pair in json.loads(learned.to_str())["model"]["merges"]]


def _learned_pieces() -> list[str]:
    """Pieces that merges of pieces make, the earliest first, then characters."""
    learned = Tokenizer(models.BPE())
    spaced = [text.replace(" ", "▁") for text in _plain_texts()]
    _train(learned, spaced, 2 * NUM_MERGES, [])
    made = ["".join(pair) for pair in json.loads(learned.to_str())["model"]["merges"]]
    common = sorted(set("".join(made)))
    return list(dict.fromkeys([*made, *common]))


def _plain_texts() -> list[str]:
    """The texts without the names of special tokens, which no merges may make."""
    return [re.sub(r"</?s>|<\|end\|>", "", text) for text in texts()]


def _train(tokenizer: Tokenizer, corpus: Sequence[str], size: int, alphabet: list[str]) -> None:
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)


def _llama_ids(name: str) -> list[list[int]]:
    """llama.cpp's ids of the texts; it does not bring them into form NFC, as some models' tokenizers do."""
    rules = WORD_RULES.get(name)
    composed = rules is not None and rules.composes
    corpus = [unicodedata.normalize("NFC", text) if composed else text for text in texts()]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.gguf"
        _write_gguf(path, keys_of(name))
        llama = Llama(str(path), vocab_only=True, verbose=False)
        return [llama.tokenize(text.encode(), add_bos=False, special=True) for text in corpus]


def _write_gguf(path: Path, keys: dict[str, Any]) -> None:
    writer = GGUFWriter(path, "llama")
    for key, value in keys.items():
        name = f"tokenizer.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_string(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


if __name__ == "__main__":
    main()
