"""Creates the engine requests of all routes.

A route translates its body to prompts and a GenerateRequest. `engine_requests` then checks limits, applies
the chat template, tokenises, compiles grammars, and sets the model's defaults, seeds and receipts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any, TypeVar

from starlette.requests import Request

from shortfin_apps.llm.components.grammar.source import AskedGrammar
from shortfin_apps.llm.components.request.grammar import Grammar
from shortfin_apps.llm.components.request.messages import Terms
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.serving.api.json_body import note_unread
from shortfin_apps.llm.serving.api.limits import excess_of
from shortfin_apps.llm.serving.api.receipts import with_receipts
from shortfin_apps.llm.serving.api.sampling import (
    NamedTokens,
    SamplingDefaults,
    given_params,
    params_named,
    stop_strings,
    with_seed,
)
from shortfin_apps.llm.serving.api.schema import (
    ChatMessage,
    CompletionBody,
    SamplingBody,
    SamplingFields,
    ServingFields,
)
from shortfin_apps.llm.serving.api.service import Service, request_id_of, service_of
from shortfin_apps.llm.serving.frontend.text_generation import TextGenerator
from shortfin_apps.llm.serving.frontend.text_stream import PendingAnswer, TextDelta, TextRequest, TextStream
from shortfin_apps.llm.serving.http.access_log import access_of
from shortfin_apps.llm.serving.http.auth import TENANT_HEADER, caller_of
from shortfin_apps.llm.serving.http.streaming import unless_disconnected
from shortfin_apps.llm.serving.text.tokenizer import Tokenizer, bad_word_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A prompt for the chat template. `variables`: the template's, from `chat_template_kwargs`."""

    messages: Sequence[ChatMessage]
    add_generation_prompt: bool | None = None
    variables: Mapping[str, Any] | None = None
    tools: Sequence[Mapping[str, Any]] = ()


Prompt = str | Sequence[int] | Conversation
NUM_LAST_TOKENS = 32  # of a prompt of token ids, whose text tells a grammar whether reasoning has begun
_Submitted = TypeVar("_Submitted", bound=PendingAnswer)


@dataclass(frozen=True, slots=True)
class Choices:
    """How many answers are generated and returned for each prompt.

    `best_of` (OpenAI's and former vLLM's) generates more answers than it returns: those with the greatest
    mean token log-probability are returned, best first. The usage counts all generated answers.
    `logprobs`: alternatives returned for each token; None: no log-probabilities.
    """

    returned: int
    generated: int
    logprobs: int | None

    @property
    def are_ranked(self) -> bool:
        return self.generated > self.returned

    @property
    def computed_logprobs(self) -> int | None:
        """The `logprobs` to request from the engine: 0 instead of None if answers are ranked."""
        return 0 if self.logprobs is None and self.are_ranked else self.logprobs

    def pick(self, answers: Sequence[TextDelta]) -> list[TextDelta]:
        """Return the answers to send. `answers`: all answers to all prompts, in order."""
        if not self.are_ranked:
            return list(answers)
        groups = [answers[i : i + self.generated] for i in range(0, len(answers), self.generated)]
        best = [each for group in groups for each in sorted(group, key=_cost)[: self.returned]]
        return [each._replace(logprobs=()) for each in best] if self.logprobs is None else best

    def of_returned(self, requests: Sequence[TextRequest]) -> list[TextRequest]:
        """Return one request for each answer to send, with the client's `logprobs`, for formatting."""
        returned = [each for each in requests if each.choice < self.returned]
        return [replace(each, params=replace(each.params, logprobs=self.logprobs)) for each in returned]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A generation to run for a prompt, independent of the route.

    `prefix`: how the names of the `sampling` fields begin in the body. `max_tokens_field`, `logprobs_field`:
    their names in errors. `default_max_tokens`: the route's default; None: the free context.
    `may_be_empty`: `max_tokens` of 0 returns an empty answer instead of an error.
    `cuts_to_fit`: a `max_tokens` above the free context is reduced instead of an error.
    """

    sampling: SamplingFields
    serving: ServingFields
    defaults: SamplingDefaults
    choices: Choices
    grammar: AskedGrammar | None
    prefix: str = ""
    max_tokens: int | None
    max_tokens_field: str = "max_tokens"
    default_max_tokens: int | None
    may_be_empty: bool = False
    cuts_to_fit: bool = False
    logprobs_field: str = "logprobs"
    include_stop: bool | None = None
    num_beams: int = 1
    request_id: str | None = None  # None: the id of the HTTP request
    add_special_tokens: bool = True  # only for a prompt given as text
    shown_ids: frozenset[int] = frozenset()  # special tokens that appear in the text for the answer's parser


async def engine_requests(
    prompts: Sequence[Prompt], field: str, wanted: Iterable[GenerateRequest], request: Request
) -> list[list[TextRequest]]:
    """Create engine requests: for each prompt, a list with one request per answer.

    `field`: the name of the prompts in the body. `wanted`: an item for each prompt (it may be an endless
    iterator), read only after the number of prompts was checked. Raises InvalidRequestError, which names
    fields as the body does.
    """
    service = service_of(request)
    service.limits.check_prompts(prompts, field)
    listed = [each for each, _ in zip(wanted, prompts, strict=False)]
    _check_limits(listed, service)
    tokens: dict[int, NamedTokens] = {}  # by id of the SamplingFields, which prompts of a batch may share
    requests = []
    for prompt, each in zip(prompts, listed, strict=True):
        requests.append(await _of_prompt(prompt, field, each, tokens, request))
        await asyncio.sleep(0)  # lets other requests run during a large batch
    return requests


async def submitted(
    requests: Sequence[TextRequest], request: Request, scorings: Sequence[TextRequest] = ()
) -> list[TextStream]:
    """Submit the `requests` that generate tokens, then the `scorings` of prompts; return their streams.

    The access log reports only `requests`. Raises the engine's error if the engine does not admit all.
    """
    return await _logged(requests, request, scorings, service_of(request).model.generator.submit)


async def submitted_whole(
    requests: Sequence[TextRequest], request: Request, scorings: Sequence[TextRequest] = ()
) -> list[PendingAnswer]:
    """Submit requests like `submitted`, for complete answers; each request may be a beam search."""
    return await _logged(requests, request, scorings, service_of(request).model.generator.submit_whole)


async def _logged(
    requests: Sequence[TextRequest],
    request: Request,
    scorings: Sequence[TextRequest],
    submit: Callable[[Sequence[TextRequest]], Awaitable[list[_Submitted]]],
) -> list[_Submitted]:
    """Submit with `submit`, and tell the access log which requests and answers to report."""
    access = access_of(request)
    access.requests = requests
    generating = [each for each in requests if each.generates]
    pending = await submit([*generating, *scorings])
    access.pending = pending[: len(generating)]
    return pending


def _check_limits(wanted: Sequence[GenerateRequest], service: Service) -> None:
    limits = service.limits
    distinct = {id(each.sampling): each for each in wanted}.values()
    for each in distinct:
        limits.check_choices(each.sampling.n, each.choices.generated, each.sampling.stop, each.prefix)
        limits.check_logprobs(each.choices.logprobs, each.logprobs_field)
    prefix = wanted[0].prefix
    limits.check_bad_words([word for each in distinct for word in each.sampling.bad_words or ()], prefix)
    name = "best_of" if any(each.choices.are_ranked for each in wanted) else "n"
    service.model.generator.check_count(sum(each.choices.generated for each in wanted), prefix + name)


async def _of_prompt(
    prompt: Prompt, field: str, wanted: GenerateRequest, tokens: dict[int, NamedTokens], request: Request
) -> list[TextRequest]:
    """Create the requests of one prompt."""
    service, sampling, serving = service_of(request), wanted.sampling, wanted.serving
    terms = terms_of(serving, request)
    salt = caller_of(request).cache_salt(serving.cache_salt)
    text, token_ids = await encoded(prompt, field, request, salt, wanted.add_special_tokens)
    grammar = None
    if (asked := wanted.grammar) is not None:
        begun = text or _last_text(token_ids, service.model.generator.tokenizer)
        sources = [partial(source, begun) for source in asked.sources]
        compiling = service.model.generator.grammars.compile_first(sources, asked.param, terms.tenant)
        grammar = await unless_disconnected(request, compiling)
    params = _params(wanted, token_ids, field, grammar, tokens, service.model.generator)
    first = TextRequest(
        request_id=wanted.request_id or request_id_of(request),
        prompt_token_ids=token_ids,
        params=params,
        stop=stop_strings(sampling.stop),
        include_stop=bool(wanted.include_stop),
        skip_special_tokens=sampling.skip_special_tokens is not False,
        shown_ids=wanted.shown_ids,
        cache_salt=salt,
        num_beams=wanted.num_beams,
        terms=terms,
        conversation=text if isinstance(prompt, Conversation) else None,
        generates=wanted.max_tokens != 0,
    )
    answers = range(wanted.choices.generated)
    requests = [replace(first, params=with_seed(params, choice), choice=choice) for choice in answers]
    return with_receipts(requests, serving.receipt, sampling, service)


def _last_text(token_ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """Return the text of the last tokens of a prompt given as token ids, of which any may be unknown."""
    known = [each for each in token_ids[-NUM_LAST_TOKENS:] if 0 <= each < tokenizer.vocab_size]
    return tokenizer.decode(known, skip_special_tokens=False)


def terms_of(body: ServingFields, request: Request) -> Terms:
    """Return the priority, tenant and timeout of a request. Raises InvalidRequestError naming the field.

    The tenant is the caller's; without API keys, it is the header `X-Tenant` or the body's `user`.
    """
    claimed = request.headers.get(TENANT_HEADER) or body.user or ""
    access_of(request).set_claimed_tenant(claimed)
    return Terms(
        priority=body.priority or 0,
        tenant=caller_of(request).tenant or claimed,
        timeout_s=body.timeout_s,
    )


async def encoded(
    prompt: Prompt, field: str, request: Request, salt: str | None, add_special_tokens: bool = True
) -> tuple[str, tuple[int, ...]]:
    """Return the text and the token ids of a prompt; the text is "" for a prompt given as token ids.

    `salt`: the caller's cache salt. Raises InvalidRequestError if the text is too long, or if the chat
    template refuses the conversation.
    """
    generator = service_of(request).model.generator
    if isinstance(prompt, str):
        encoding = generator.encode(prompt, add_special_tokens=add_special_tokens, param=field)
        return prompt, await encoding
    if isinstance(prompt, Conversation):
        text = await rendered(prompt, field, request)
        return text, await generator.encode_conversation(text, salt, field)
    return "", tuple(prompt)


async def rendered(conversation: Conversation, field: str, request: Request) -> str:
    """Render messages with the model's chat template. Raises InvalidRequestError, which names `field`.

    Rendering and parsing the arguments of tool calls may be slow, so both run in a worker thread.
    """
    service, messages = service_of(request), conversation.messages
    note_unread(messages, conversation.variables, request, field)
    num_chars = sum(message.num_chars for message in messages)
    service.limits.check_chars(num_chars, field)
    arguments = [text for message in messages for text in _arguments_of(message)]
    if (excess := excess_of(*arguments)) is not None:
        raise InvalidRequestError(
            f"`{field}`: the arguments of its tool calls have more than {excess}", field
        )
    generator = service.model.generator
    text = await generator.workers.run(num_chars, _rendered, generator.tokenizer, conversation)
    service.limits.check_chars(len(text), field)
    return text


def _rendered(tokenizer: Tokenizer, conversation: Conversation) -> str:
    return tokenizer.apply_chat_template(
        [message.for_template() for message in conversation.messages],
        add_generation_prompt=conversation.add_generation_prompt is not False,
        variables=conversation.variables,
        tools=conversation.tools,
    )


def _arguments_of(message: ChatMessage) -> list[bytes]:
    """Return the arguments of the message's tool calls, those that are JSON strings."""
    given = [call.function.arguments for call in message.tool_calls or ()]
    return [text.encode("utf-8", "surrogatepass") for text in given if isinstance(text, str)]


def _params(
    wanted: GenerateRequest,
    prompt_token_ids: Sequence[int],
    field: str,
    grammar: Grammar | None,
    tokens: dict[int, NamedTokens],
    generator: TextGenerator,
) -> SamplingParams:
    """Return the sampling parameters: the body's, else the model's defaults. Raises InvalidRequestError."""
    sampling, max_tokens = wanted.sampling, wanted.max_tokens
    given, names = given_params(sampling, wanted.prefix)
    names |= {"max_tokens": wanted.max_tokens_field, "logprobs": wanted.logprobs_field}
    with params_named(names):
        if id(sampling) not in tokens:
            tokens[id(sampling)] = NamedTokens.of(sampling, generator.tokenizer.vocab_size)
        named = tokens[id(sampling)]
        if max_tokens == 0 and not wanted.may_be_empty:
            raise InvalidRequestError("`max_tokens` must be at least 1", "max_tokens")
        if max_tokens == 0 and given.get("min_tokens"):
            rule = f"must lie in [0, {wanted.max_tokens_field}]"
            raise InvalidRequestError(f"`min_tokens` {rule}", "min_tokens")
        if wanted.cuts_to_fit and max_tokens is not None:
            max_tokens = min(max_tokens, max(generator.max_seq_len - len(prompt_token_ids), 1))
        fitting = generator.fit(prompt_token_ids, max_tokens, default=wanted.default_max_tokens, param=field)
        values: dict[str, Any] = {**wanted.defaults.values, **given}
        return SamplingParams(
            **values,
            max_tokens=fitting,
            stop_token_ids=named.stop_token_ids,
            logit_bias=named.logit_bias,
            allowed_token_ids=named.allowed_token_ids,
            bad_words=bad_word_ids(generator.tokenizer, tuple(sampling.bad_words or ())),
            logprobs=wanted.choices.computed_logprobs,
            output_grammar=grammar,
        )


def choices_of(
    body: CompletionBody | SamplingBody, logprobs: int | None, *, stream: bool | None, prefix: str = ""
) -> Choices:
    """Read `n` and `best_of`. Raises InvalidRequestError, which names the fields with `prefix`."""
    returned, name = body.n or 1, f"{prefix}best_of"
    generated = returned if body.best_of is None else body.best_of
    if generated < returned:
        raise InvalidRequestError(f"`{name}` must be at least `{prefix}n`, which is {returned}", name)
    if stream and generated > returned:
        raise InvalidRequestError(
            f"`{name}` cannot be greater than `{prefix}n` in a stream, as answers are ranked at their end;"
            " leave out `stream`",
            name,
        )
    return Choices(returned, generated, logprobs)


def _cost(answer: TextDelta) -> float:
    """Return the sort key of an answer: its negative mean token log-probability."""
    return -fmean(each.logprob for each in answer.logprobs) if answer.logprobs else 0.0
