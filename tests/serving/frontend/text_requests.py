"""A text generator over a scripted engine, and requests to it."""

from __future__ import annotations

from typing import Any

from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.serving.frontend.metrics import ServerMetrics
from shortfin_apps.llm.serving.frontend.text_generation import TextGenerator
from shortfin_apps.llm.serving.frontend.text_stream import TextRequest
from shortfin_apps.llm.serving.text.tokenizer import Tokenizer
from tests.serving.api.scripted_engine import Script, ScriptedEngine
from tests.serving.text.tiny_tokenizers import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
MAX_SEQ_LEN = 64


def make_generator(
    script: Script, tokenizer: Tokenizer = TOKENIZER, request_timeout_s: float | None = None
) -> tuple[TextGenerator, ScriptedEngine]:
    engine = ScriptedEngine(script)
    generator = TextGenerator(
        tokenizer,
        engine,
        max_seq_len=MAX_SEQ_LEN,
        max_requests=4,
        metrics=ServerMetrics("m"),
        request_timeout_s=request_timeout_s,
    )
    return generator, engine


def request(
    *, max_tokens: int = 50, min_tokens: int = 0, stop: tuple[str, ...] = (), include_stop: bool = False
) -> TextRequest:
    params = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens)
    return TextRequest(
        request_id="r", prompt_token_ids=(1,), params=params, stop=stop, include_stop=include_stop
    )


def beams(num_beams: int = 3, *, include_stop: bool = False, **params: Any) -> TextRequest:
    return TextRequest(
        request_id="b",
        prompt_token_ids=(1,),
        params=SamplingParams(**{"max_tokens": 4, **params}),
        include_stop=include_stop,
        num_beams=num_beams,
    )
