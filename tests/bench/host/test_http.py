from __future__ import annotations

from bench.host.http import OUTPUT_TOKENS, stream_tokens


async def test_every_token_arrives() -> None:
    figures = await stream_tokens(2, step_ms=1.0)
    assert figures.errors == 0
    assert figures.tokens_per_s > 0
    assert 1 <= figures.tokens_per_chunk < OUTPUT_TOKENS
    assert min(figures.server_us, figures.client_us) > 0
