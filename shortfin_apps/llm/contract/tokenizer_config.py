"""Names in `tokenizer_config.json`, which the builder writes and the server reads."""

from __future__ import annotations

# Special tokens, also in `special_tokens_map.json`; passed to chat templates, as in transformers.
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
