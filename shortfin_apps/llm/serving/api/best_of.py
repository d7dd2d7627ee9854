"""`best_of`: generates more answers than are returned, as in OpenAI's API and former vLLM.

The `n` answers with the greatest mean token log-probability are returned, best first. The usage counts all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Protocol

from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.serving.frontend.text_stream import TextDelta, TextRequest


class WithBestOf(Protocol):
    """A body with the fields `n` and `best_of`."""

    n: int | None
    best_of: int | None


@dataclass(frozen=True, slots=True)
class Choices:
    """Numbers of answers generated and returned for each prompt.

    `logprobs` is the number of alternatives returned for each token; None for no log-probabilities.
    """

    returned: int
    generated: int
    logprobs: int | None

    @property
    def are_ranked(self) -> bool:
        return self.generated > self.returned

    @property
    def computed_logprobs(self) -> int | None:
        """The `logprobs` to request from the engine: ranking needs the tokens' log-probabilities."""
        return 0 if self.logprobs is None and self.are_ranked else self.logprobs

    def pick(self, answers: Sequence[TextDelta]) -> list[TextDelta]:
        """Choose the answers to return. `answers` holds all answers to all prompts, in order."""
        if not self.are_ranked:
            return list(answers)
        groups = [answers[i : i + self.generated] for i in range(0, len(answers), self.generated)]
        best = [each for group in groups for each in sorted(group, key=_cost)[: self.returned]]
        return [each._replace(logprobs=()) for each in best] if self.logprobs is None else best

    def of_returned(self, requests: Sequence[TextRequest]) -> list[TextRequest]:
        """Return one request for each returned answer; they describe the answers' format."""
        returned = [each for each in requests if each.choice < self.returned]
        return [replace(each, params=replace(each.params, logprobs=self.logprobs)) for each in returned]


def choices_of(body: WithBestOf, logprobs: int | None, *, stream: bool | None, prefix: str = "") -> Choices:
    """Read the fields. Raises InvalidRequestError, which names them with `prefix`."""
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
    """The sort key: lower is better, and ties keep their order."""
    return -fmean(each.logprob for each in answer.logprobs) if answer.logprobs else 0.0
