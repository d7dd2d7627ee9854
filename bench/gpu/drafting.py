"""Speculation with the model's own draft layer, right as often as a trained one.

Weights are noise, so a draft layer could only guess. Here, the layers of the model hardly change the residual
stream, so that the next token depends on the last one alone, and the draft layer computes it from the
embedding of that token, with so much noise that it is right about 7 times in 10. All invocations read and
compute as much as with other weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal
from unittest.mock import patch

from bench.gpu import engine as engine_part
from bench.gpu.models import Model
from bench.gpu.weights import Parameter
from shortfin_apps.llm.components.engine.draft_layer import DraftLayer
from shortfin_apps.llm.components.engine.drafter import Drafter
from shortfin_apps.llm.components.engine.engine import Engine
from shortfin_apps.llm.components.request.request import Request
from shortfin_apps.llm.model.draft_layer import EMBEDDING_NORM, PROJECTION, RESULT_NORM
from shortfin_apps.llm.model.spec import ModelSpec

Rounds = Literal["off", "in step", "ahead"]
ROUNDS: tuple[Rounds, ...] = ("off", "in step", "ahead")
MEASURED_TOKENS = 256  # per request
FAINT = 2**-13  # deviation of what the layers add; embeddings have 1 / sqrt(hidden size)
WRONG = 0.12  # deviation of the draft's error: the best of 128,256 tokens stays the best 7 times in 10
ADDED = ("attn_output.weight", "ffn_down.weight")
PLAIN_NORMS = ("output_norm.weight", EMBEDDING_NORM, RESULT_NORM)  # a draft must have the model's scale


def predictable(spec: ModelSpec, parameter: Parameter) -> Parameter:
    """Return a parameter of a model with a draft layer, with the noise that this module describes."""
    if spec.draft is None:
        return parameter
    if parameter.name.endswith(ADDED):
        return replace(parameter, deviation=FAINT)
    if parameter.name.endswith(PLAIN_NORMS):
        return replace(parameter, deviation=0.0)
    if parameter.name.endswith(PROJECTION):
        return replace(parameter, deviation=WRONG, is_identity=True)
    return parameter


@contextmanager
def rounds(kind: Rounds) -> Iterator[None]:
    """Have engines draft only once the step before is committed in the `with` block, if `kind` says so."""
    if kind != "in step":
        yield
        return
    with patch.object(DraftLayer, "draft_ahead", Drafter.draft_ahead):
        yield


@contextmanager
def always() -> Iterator[None]:
    """Have engines draft three tokens each time in the `with` block, right or wrong."""

    def num_worth(drafter: Drafter, request: Request, least: float, most: int) -> int:
        return 0 if drafter.has_given_up else max(0, min(most, 3))

    with patch.object(Drafter, "num_worth", num_worth):
        yield


def pages(model: Model) -> int:
    """Return the number of pages for the largest batch, plus the scratch page."""
    longest = model.context + MEASURED_TOKENS
    return 1 + max(engine_part.sizes(model)) * (-(-longest // model.options.block_seq_stride) + 2)


def measure(engine: Engine, model: Model, requests: int) -> dict[str, Any]:
    """Measure greedy decodes of `requests` at once, around the model's context. Raises LlmError."""
    before = engine.stats().speculation
    steps = engine_part.steady_steps(engine, model, requests, "greedy", MEASURED_TOKENS)
    found = {"requests": requests, "context": model.context, **steps.record()}
    after = engine.stats().speculation
    if before is None or after is None:
        return found
    proposed, accepted = after.proposed - before.proposed, after.accepted - before.accepted
    return {**found, "proposed": proposed, "accepted": accepted}
