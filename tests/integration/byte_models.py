"""The golden models with a vocabulary of bytes, so that there is a tokenizer for them."""

from __future__ import annotations

from pathlib import Path

from shortfin_apps.llm.builder.sources.random_tiny import RandomTinySource
from tests.builder.golden_families import GoldenFamily
from tests.golden.family_weights import weight


def write_byte_model(name: str, folder: Path, *, drafts: bool = False, **config: int) -> Path:
    """The golden model of the family, but for these fields, as a Hugging Face directory.

    With `drafts`, it has a draft layer.
    """
    tokenizer, family = RandomTinySource(), GoldenFamily.of(name)
    if drafts:
        family.add_draft_layer()
    family.config.update(vocab_size=tokenizer.spec.vocab_size, **config)
    for tensor, values in family.tensors.items():
        if tensor.endswith(("embed_tokens.weight", "lm_head.weight")):
            family.tensors[tensor] = weight(tensor, (tokenizer.spec.vocab_size, values.shape[1]))
    source = family.write_hf(folder)
    Path(source, "tokenizer.json").write_text(tokenizer.tokenizer_files().tokenizer)
    return source
