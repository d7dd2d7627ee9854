from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.grammar.source import GrammarKind, GrammarSource
from shortfin_apps.llm.components.grammar.thought_budget import ThoughtBudget
from shortfin_apps.llm.components.request.messages import (
    ChosenLogit,
    ComputedTask,
    Delta,
    FinishReason,
    GenerateCall,
    Terms,
    TokenLogprobs,
)
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.contract import errors
from shortfin_apps.llm.contract.errors import InvalidRequestError, LlmError, OverloadedError
from shortfin_apps.llm.serving.engine_link import messages
from shortfin_apps.llm.serving.engine_link.messages import (
    Abort,
    AbortAll,
    AbortRequests,
    Admitted,
    Ask,
    Counted,
    Deltas,
    EngineState,
    FlushCache,
    Order,
    Prepared,
    ReadMetrics,
    Refused,
    SetLogLevel,
    Submit,
    decoder_from_api,
    decoder_from_engine,
    encode,
)

TOKENS = st.integers(0, 2**31)
FLOATS = st.floats(allow_nan=False)
IDS = st.text(max_size=9)

ERRORS = st.one_of(
    st.builds(InvalidRequestError, IDS, st.none() | IDS, st.dictionaries(IDS, st.none() | st.integers(0, 9))),
    st.builds(errors.ConstraintError, IDS, st.none() | IDS),
    st.builds(OverloadedError, IDS, FLOATS),
    st.builds(errors.UnavailableError, IDS),
    st.builds(errors.RequestAbortedError, IDS),
    st.builds(errors.DeadlineExceededError, IDS),
    st.builds(errors.InvocationError, IDS),
    st.builds(errors.DeviceLostError, IDS),
)
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 9000),
    temperature=st.floats(0, 100),
    top_p=st.floats(0.1, 1),
    seed=st.none() | st.integers(0, 2**63 - 1),
    stop_token_ids=st.frozensets(TOKENS, max_size=3),
    logprobs=st.none() | st.integers(0, 20),
    logit_bias=st.lists(st.tuples(TOKENS, st.floats(-100, 100)), max_size=3).map(tuple),
    bad_words=st.lists(st.lists(TOKENS, min_size=1, max_size=2).map(tuple), max_size=2).map(tuple),
    allowed_token_ids=st.none() | st.frozensets(TOKENS, min_size=1, max_size=3),
    forced_token_ids=st.lists(TOKENS, max_size=3).map(tuple),
)
CALLS = st.builds(
    GenerateCall,
    request_id=IDS,
    prompt_token_ids=st.lists(TOKENS, max_size=20).map(tuple),
    params=PARAMS,
    cache_salt=st.none() | IDS,
    resumes=st.booleans(),
    is_traced=st.booleans(),
    terms=st.builds(Terms, priority=st.integers(-9, 9), tenant=IDS, timeout_s=st.none() | st.floats(0, 1e9)),
)
LOGPROBS = st.builds(
    TokenLogprobs,
    logprob=FLOATS,
    top=st.lists(st.tuples(TOKENS, FLOATS), max_size=3).map(tuple),
    rank=st.integers(1, 99),
)
COMPUTED = st.builds(
    ComputedTask,
    began_s=FLOATS,
    ended_s=FLOATS,
    device_before_s=FLOATS,
    device_after_s=FLOATS,
    start_position=TOKENS,
    num_tokens=TOKENS,
    entry_family=IDS,
    batch_tasks=TOKENS,
)
DELTAS = st.builds(
    Delta,
    request_id=IDS,
    token_ids=st.lists(TOKENS, max_size=4).map(tuple),
    logprobs=st.lists(LOGPROBS, max_size=2).map(tuple),
    num_cached_tokens=TOKENS,
    queue_s=FLOATS,
    computed=st.lists(COMPUTED, max_size=2).map(tuple),
    finish_reason=st.none() | st.sampled_from(FinishReason),
    stop_token_id=st.none() | TOKENS,
    error=st.none() | ERRORS,
    logits=st.lists(st.builds(ChosenLogit, FLOATS, IDS), max_size=4).map(tuple),
)
TEXTS = st.lists(IDS, max_size=2).map(tuple)
BUDGETS = st.builds(ThoughtBudget, st.integers(0, 2**31 - 1), TEXTS, TEXTS)
SOURCES = st.builds(GrammarSource, st.sampled_from(GrammarKind), IDS, st.booleans(), st.none() | BUDGETS)
COMMANDS = st.one_of(
    st.builds(AbortRequests, st.lists(IDS, max_size=3).map(tuple), st.none() | IDS),
    st.builds(AbortAll),
    st.builds(SetLogLevel, IDS),
    st.builds(ReadMetrics),
)
COUNTED = st.builds(Counted, TOKENS, st.lists(FLOATS, max_size=5))
FROM_API = st.one_of(
    st.builds(Prepared),
    st.builds(Submit, CALLS, st.none() | SOURCES),
    st.builds(Abort, IDS, st.none() | ERRORS),
    st.builds(FlushCache),
    st.builds(Ask, TOKENS, COMMANDS),
    COUNTED,
)
FROM_ENGINE = st.one_of(
    st.builds(Admitted, IDS),
    st.builds(Refused, IDS, ERRORS),
    st.builds(Deltas, st.lists(DELTAS, max_size=4)),
    st.builds(EngineState, st.booleans(), st.none() | st.text()),
    st.builds(Order, TOKENS, COMMANDS),
    COUNTED,
)


def plain(value: Any) -> Any:
    """`value` with errors, which compare by identity, as their class and what they hold."""
    if isinstance(value, LlmError):
        return type(value), str(value), vars(value)
    if isinstance(value, messages.Message):
        return type(value), [plain(getattr(value, name)) for name in value.__struct_fields__]
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


@given(FROM_API)
def test_what_an_api_process_says_arrives(message: Any) -> None:
    assert plain(decoder_from_api().decode(encode(message))) == plain(message)


@given(FROM_ENGINE)
def test_what_the_engine_says_arrives(message: Any) -> None:
    assert plain(decoder_from_engine().decode(encode(message))) == plain(message)


def test_an_error_of_a_class_that_only_one_side_knows_arrives_as_its_base() -> None:
    class LocalError(errors.DeadlineExceededError):
        """Not in `errors`."""

    arrived = decoder_from_engine().decode(encode(Refused("a", LocalError("late"))))
    assert isinstance(arrived, Refused)
    assert type(arrived.error) is errors.DeadlineExceededError
    assert str(arrived.error) == "late"


def test_nothing_else_crosses_by_accident() -> None:
    with pytest.raises(NotImplementedError, match="object"):
        encode(Refused("a", object()))  # type: ignore[arg-type]
