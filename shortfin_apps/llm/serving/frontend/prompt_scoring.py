"""Log-probabilities of a prompt's tokens.

A model's entries return logits of the last token only. Therefore a second request, the scoring request,
generates the prompt as its output: its own prompt is the first token, and the other tokens are forced, one
per decode, batched with other requests. Scoring a prompt takes as long as generating it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shortfin_apps.llm.components.request.messages import FinishReason, TokenLogprobs
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.contract.errors import RequestAbortedError
from shortfin_apps.llm.serving.frontend.text_stream import TextDelta, TextRequest

PromptLogprobs = tuple[TokenLogprobs | None, ...]
"""One entry per prompt token, or per token from `start` on; None for the prompt's first token."""


def scoring_request(request: TextRequest, num_top: int, start: int = 0) -> TextRequest | None:
    """Return the request that scores the prompt's tokens from `start` on, with `num_top` alternatives each.

    Returns None if there is nothing to score: the first token has no context.
    """
    given, forced = request.prompt_token_ids[: max(1, start)], request.prompt_token_ids[max(1, start) :]
    if not forced:
        return None
    params = SamplingParams(
        max_tokens=len(forced), temperature=0, ignore_eos=True, logprobs=num_top, forced_token_ids=forced
    )
    return replace(
        request,
        prompt_token_ids=given,
        params=params,
        stop=(),
        num_beams=1,
        choice=0,
        conversation=None,
        receipt=None,
    )


def prompt_logprobs(
    prompt_token_ids: Sequence[int], answer: TextDelta | None, start: int = 0
) -> PromptLogprobs:
    """Return the prompt's entries from `start` on, or raise the error that ended the scoring request.

    `answer`: the answer to the scoring request; None if there was nothing to score.
    """
    if answer is not None and answer.finish_reason is not FinishReason.LENGTH:
        raise answer.error or RequestAbortedError("the request was aborted")
    first: PromptLogprobs = (None,) if start == 0 and prompt_token_ids else ()
    return first + (() if answer is None else answer.logprobs)
