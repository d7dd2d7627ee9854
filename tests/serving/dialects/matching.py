"""Whether a grammar lets a text through, token by token."""

from __future__ import annotations

from shortfin_apps.llm.components.request.grammar import Grammar
from shortfin_apps.llm.serving.text.tokenizer import Tokenizer


def lets_through(grammar: Grammar, tokenizer: Tokenizer, text: str, *, to_the_end: bool = True) -> bool:
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    ends = sorted(tokenizer.eos_token_ids) if to_the_end else []
    matcher = grammar.matcher()
    for place, token_id in enumerate([*token_ids, *ends]):
        allowed = matcher.allowed(token_ids[:place])
        if not allowed[token_id // 8] >> token_id % 8 & 1:
            return False
    return True
