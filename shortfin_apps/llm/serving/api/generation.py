"""Creates engine requests: every generating route puts its body into a GenerateRequest for this."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request

from shortfin_apps.llm.components.request.grammar import Grammar
from shortfin_apps.llm.components.request.messages import Terms
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.serving.api.receipts import with_receipts
from shortfin_apps.llm.serving.api.sampling import (
    NamedTokens,
    SamplingDefaults,
    given_params,
    params_named,
    stop_strings,
)
from shortfin_apps.llm.serving.api.schema import SamplingFields, ServingFields
from shortfin_apps.llm.serving.api.service import request_id_of, service_of
from shortfin_apps.llm.serving.api.structured_output import AskedGrammar
from shortfin_apps.llm.serving.frontend.text_generation import TextGenerator, with_seed
from shortfin_apps.llm.serving.frontend.text_stream import TextRequest
from shortfin_apps.llm.serving.http.access_log import access_of
from shortfin_apps.llm.serving.http.auth import TENANT_HEADER, caller_of
from shortfin_apps.llm.serving.http.streaming import unless_disconnected
from shortfin_apps.llm.serving.text.tokenizer import bad_word_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A request for one prompt, independent of the route.

    `sampling` and `serving` are the fields that all routes share; the names of the sampling fields begin with
    `prefix` in the body. The other names, for errors, are `prompt_field`, `max_tokens_field` and
    `logprobs_field`. `default_max_tokens` is the route's, None for all that fits into the context.
    `tokens` are the sampling's, converted once for a batch.
    `may_be_empty`: `max_tokens` of 0 is an empty answer, not an error. `conversation` is a chat's prompt.
    """

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingFields
    serving: ServingFields
    defaults: SamplingDefaults
    tokens: NamedTokens | None = None
    prefix: str = ""
    prompt_field: str
    max_tokens: int | None
    max_tokens_field: str = "max_tokens"
    default_max_tokens: int | None
    may_be_empty: bool = False
    num_answers: int = 1
    logprobs: int | None = None
    logprobs_field: str = "logprobs"
    grammar: AskedGrammar | None = None
    include_stop: bool | None = None
    num_beams: int = 1
    request_id: str | None = None  # None: the HTTP request's
    conversation: str | None = None
    shown_ids: frozenset[int] = frozenset()


def terms_of(body: ServingFields, request: Request) -> Terms:
    """Read the terms. The tenant is the caller's; without keys, the `X-Tenant` header or the body's `user`.

    Raises InvalidRequestError naming the field.
    """
    claimed = request.headers.get(TENANT_HEADER) or body.user or ""
    access_of(request).set_claimed_tenant(claimed)
    return Terms(
        priority=body.priority or 0,
        tenant=caller_of(request).tenant or claimed,
        timeout_s=body.timeout_s,
    )


async def engine_requests(wanted: GenerateRequest, request: Request) -> list[TextRequest]:
    """Create the requests of one prompt, one for each answer. Errors name fields as the body does."""
    service, sampling, serving = service_of(request), wanted.sampling, wanted.serving
    terms = terms_of(serving, request)
    grammar = None if wanted.grammar is None else await compiled(wanted.grammar, terms.tenant, request)
    params = _params(wanted, grammar, service.model.generator)
    first = TextRequest(
        request_id=wanted.request_id or request_id_of(request),
        prompt_token_ids=wanted.prompt_token_ids,
        params=params,
        stop=stop_strings(sampling.stop),
        include_stop=bool(wanted.include_stop),
        skip_special_tokens=sampling.skip_special_tokens is not False,
        shown_ids=wanted.shown_ids,
        cache_salt=caller_of(request).cache_salt(serving.cache_salt),
        num_beams=wanted.num_beams,
        terms=terms,
        conversation=wanted.conversation,
        generates=wanted.max_tokens != 0,
    )
    answers = range(wanted.num_answers)
    requests = [replace(first, params=with_seed(params, choice), choice=choice) for choice in answers]
    return with_receipts(requests, serving.receipt, sampling, service)


async def compiled(asked: AskedGrammar, tenant: str, request: Request) -> Grammar:
    """Compile a grammar, until the client disconnects. Raises InvalidRequestError if all are refused."""
    generator, (*others, last) = service_of(request).model.generator, asked.sources
    for looser in others:
        with suppress(InvalidRequestError):
            return await unless_disconnected(
                request, generator.compile_grammar(looser(), asked.param, tenant)
            )
        await asyncio.sleep(0)  # lets other requests run: writing one for many arguments takes long
    return await unless_disconnected(request, generator.compile_grammar(last(), asked.param, tenant))


def _params(wanted: GenerateRequest, grammar: Grammar | None, generator: TextGenerator) -> SamplingParams:
    """Merge the body's parameters and the model's defaults."""
    given, names = given_params(wanted.sampling, wanted.prefix)
    names |= {"max_tokens": wanted.max_tokens_field, "logprobs": wanted.logprobs_field}
    with params_named(names):
        tokens = wanted.tokens or NamedTokens.of(wanted.sampling, generator.tokenizer.vocab_size)
        if wanted.max_tokens == 0 and not wanted.may_be_empty:
            raise InvalidRequestError("`max_tokens` must be at least 1", "max_tokens")
        if wanted.max_tokens == 0 and given.get("min_tokens"):
            rule = f"must lie in [0, {wanted.max_tokens_field}]"
            raise InvalidRequestError(f"`min_tokens` {rule}", "min_tokens")
        fitting = generator.fit(
            wanted.prompt_token_ids,
            wanted.max_tokens,
            default=wanted.default_max_tokens,
            param=wanted.prompt_field,
        )
        values: dict[str, Any] = {**wanted.defaults.values, **given}
        return SamplingParams(
            **values,
            max_tokens=fitting,
            stop_token_ids=tokens.stop_token_ids,
            logit_bias=tokens.logit_bias,
            allowed_token_ids=tokens.allowed_token_ids,
            bad_words=bad_word_ids(generator.tokenizer, tuple(wanted.sampling.bad_words or ())),
            logprobs=wanted.logprobs,
            output_grammar=grammar,
        )
