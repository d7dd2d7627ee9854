"""Adds orders for receipts to requests: to those with the field `receipt` or, with `--receipts`, to all.

A receipt records the inputs of an answer with a digest of its logits (docs/determinism.md).
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from shortfin_apps.llm.components.grammar.compiled import CompiledGrammar
from shortfin_apps.llm.components.grammar.source import GrammarSource
from shortfin_apps.llm.components.request.grammar import Grammar
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.serving.api.sampling import with_seed
from shortfin_apps.llm.serving.api.schema import SamplingFields
from shortfin_apps.llm.serving.api.service import Service
from shortfin_apps.llm.serving.frontend.text_stream import TextDelta, TextRequest
from shortfin_apps.llm.serving.receipts.draft import ModelIdentity, ReceiptOrder
from shortfin_apps.llm.serving.receipts.sampling import recorded_sampling

SEED_BITS = 53  # JSON readers that use doubles keep integers exactly up to this size

Wanted = bool | Literal["text"]  # "text": include the prompt's text


def with_receipts(
    requests: Sequence[TextRequest], given: Wanted | None, body: SamplingFields, service: Service
) -> list[TextRequest]:
    """Return the requests of one prompt, with receipt orders and seeds if receipts are requested.

    `given`: the body's field `receipt`. Raises InvalidRequestError if a receipt is impossible: for answers
    without tokens (if the field requests it), for a beam search, or for a model without identity.
    """
    wanted = service.receipts.are_default if given is None else given
    generates = all(request.generates for request in requests)
    if not wanted or (given is None and not generates):  # without tokens there is nothing to record
        return list(requests)
    if not generates:
        raise InvalidRequestError("`receipt` is of tokens, and none is generated; leave it out", "receipt")
    if any(request.num_beams > 1 for request in requests):
        raise InvalidRequestError(
            "`receipt` is of one chain of tokens, and a beam search has several; set it to false, or"
            " `num_beams` to 1",
            "receipt",
        )
    source = _source(requests[0].params.output_grammar)
    if source is not None and source.budget is not None:
        if given is None:
            return list(requests)
        raise InvalidRequestError(
            "`receipt` does not record a budget of reasoning; set it to false, or leave the budget out",
            "receipt",
        )
    prompt = requests[0].prompt_token_ids
    tokenizer = service.model.generator.tokenizer
    text = tokenizer.decode(prompt, skip_special_tokens=False) if wanted == "text" else None
    identity, base = _identity(service), _seeded(requests[0].params)
    return [_ordered(each, with_seed(base, each.choice), body, identity, text, service) for each in requests]


def receipt_field(answer: TextDelta) -> dict[str, Any]:
    """Return the field `receipt` of an answer, or of a stream's last delta; empty if there is none."""
    return {} if answer.receipt is None else {"receipt": answer.receipt}


def _identity(service: Service) -> ModelIdentity:
    if (identity := service.model.identity) is None:
        raise InvalidRequestError(
            "`receipt` needs to know what answers, and this model's files have no manifest; serve a directory"
            " that `shortfin-llm build` wrote",
            "receipt",
        )
    return identity


def _seeded(params: SamplingParams) -> SamplingParams:
    """Draw a seed for a sampled request without one, because a seed of the engine would not be recorded."""
    if params.greedy or params.seed is not None:
        return params
    return replace(params, seed=secrets.randbits(SEED_BITS))


def _ordered(
    request: TextRequest,
    params: SamplingParams,
    body: SamplingFields,
    identity: ModelIdentity,
    text: str | None,
    service: Service,
) -> TextRequest:
    sampling = recorded_sampling(
        params,
        stop=request.stop,
        skip_special_tokens=request.skip_special_tokens,
        bad_words=body.bad_words or (),
        grammar=_source(params.output_grammar),
    )
    order = ReceiptOrder(identity=identity, sampling=sampling, prompt=text, signer=service.receipts.signer)
    return replace(request, params=replace(params, chosen_logits=True), receipt=order)


def _source(grammar: Grammar | None) -> GrammarSource | None:
    if grammar is None:
        return None
    assert isinstance(grammar, CompiledGrammar), "routes compile with GrammarCompiler"
    return grammar.source
