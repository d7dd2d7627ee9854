"""Creates the requests of one prompt from a body in OpenAI's format, native or converted."""

from __future__ import annotations

from starlette.requests import Request

from shortfin_apps.llm.components.request.grammar import Grammar
from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.serving.api.auth import caller_of
from shortfin_apps.llm.serving.api.best_of import Choices
from shortfin_apps.llm.serving.api.receipts import with_receipts
from shortfin_apps.llm.serving.api.sampling import NamedTokens, params_named, sampling_params, stop_strings
from shortfin_apps.llm.serving.api.schema import ChatBody, CompletionBody, OpenAIBody
from shortfin_apps.llm.serving.api.service import Service, request_id_of, service_of
from shortfin_apps.llm.serving.api.terms import terms_of
from shortfin_apps.llm.serving.frontend.text_generation import TextGenerator, with_seed
from shortfin_apps.llm.serving.frontend.text_stream import TextRequest


def check_limits(service: Service, body: OpenAIBody) -> None:
    """Raise InvalidRequestError for too many choices, stop strings, banned words or log-probabilities."""
    service.limits.check_choices(body.n, body.stop)
    service.limits.check_bad_words(body.bad_words)
    service.limits.check_logprobs(body.prompt_logprobs, "prompt_logprobs")


def is_empty(body: OpenAIBody) -> bool:
    """Whether no token is generated: `max_tokens` of 0, for completions only, as in OpenAI's API and vLLM."""
    return isinstance(body, CompletionBody) and body.max_tokens == 0


def text_requests(
    body: OpenAIBody,
    request: Request,
    prompt_token_ids: tuple[int, ...],
    *,
    prompt_field: str,
    max_tokens: tuple[str, int | None],
    default_max_tokens: int | None,
    logprobs: int | None,
    conversation: str | None = None,
    choices: Choices | None = None,
    grammar: Grammar | None = None,
    tokens: NamedTokens | None = None,
    shown_ids: frozenset[int] = frozenset(),
) -> list[TextRequest]:
    """Create the `n` or `best_of` requests of one prompt. `conversation` is the text of a chat's prompt.

    `default_max_tokens` defaults to the model's. `tokens` are the body's; pass them for a batch.
    """
    max_name, max_value = max_tokens
    model = service_of(request).model
    generator = model.generator
    if default_max_tokens is None:
        default_max_tokens = model.openai_defaults.max_tokens
    logprobs_name = "top_logprobs" if isinstance(body, ChatBody) else "logprobs"
    with params_named({"max_tokens": max_name, "logprobs": logprobs_name}):
        params = sampling_params(
            body,
            model.openai_defaults,
            tokenizer=generator.tokenizer,
            tokens=tokens or NamedTokens.of(body, generator.tokenizer.vocab_size),
            max_tokens=_max_tokens(
                body, generator, prompt_token_ids, max_value, default_max_tokens, prompt_field
            ),
            logprobs=logprobs,
            output_grammar=grammar,
        )
    requests = [
        TextRequest(
            request_id=request_id_of(request),
            prompt_token_ids=prompt_token_ids,
            params=with_seed(params, choice),
            stop=stop_strings(body.stop),
            include_stop=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
            shown_ids=shown_ids,
            cache_salt=caller_of(request).cache_salt(body.cache_salt),
            terms=terms_of(body, request),
            choice=choice,
            conversation=conversation,
            generates=not is_empty(body),
        )
        for choice in range(choices.generated if choices else body.n or 1)
    ]
    return with_receipts(requests, body.receipt, body, service_of(request))


def _max_tokens(
    body: OpenAIBody,
    generator: TextGenerator,
    prompt_token_ids: tuple[int, ...],
    max_tokens: int | None,
    default: int | None,
    prompt_field: str,
) -> int:
    """Apply `TextGenerator.fit` after checking that `max_tokens` of 0 is allowed."""
    if max_tokens == 0 and not is_empty(body):
        raise InvalidRequestError("`max_tokens` must be at least 1", "max_tokens")
    if max_tokens == 0 and body.min_tokens:
        raise InvalidRequestError("`min_tokens` must lie in [0, max_tokens]", "min_tokens")
    return generator.fit(prompt_token_ids, max_tokens, default=default, param=prompt_field)
