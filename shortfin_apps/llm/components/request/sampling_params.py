"""Sampling parameters: how a request's tokens are chosen, and when its output ends.

Each field declared with `param` is also a field of every generating route's body, of receipts and, if
`of_model`, of `generation_config.json`. Its type, default, range and description are declared only here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from shortfin_apps.llm.components.request.grammar import Grammar
from shortfin_apps.llm.contract.errors import InvalidRequestError

MAX_LOGPROBS = 20  # maximum alternatives reported per token
MAX_BIAS = 100.0
MAX_BIASES = 1024
MAX_BAD_WORDS = 1024  # token sequences; each word has one or two
# The smallest normal f32. Logits are divided by the temperature in f32, where a smaller temperature becomes 0
# or has a reciprocal that overflows.
SMALLEST_TEMPERATURE = 2.0**-126
NOT_WITH_GRAMMAR = "cannot be combined with structured output, whose grammar says where it may end"
KINDS: dict[str, type] = {"int": int, "int | None": int, "float": float, "bool": bool}


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """One sampling parameter of a request body.

    `kind`: type of the value; None if the API converts the value (lists, and words to tokens).
    `default`: the value that turns the parameter off; in a body, `also_off` does so too.
    `allows`: predicate of allowed values; `rule` describes these values in error messages.
    `of_model`: the model's `generation_config.json` may give another default.
    `changes_logits`: beam searches refuse the parameter, and a model without logits gives no default for it.
    `native`: the parameter's names in `sampling_params` of `/generate`; error messages use the first.
    """

    name: str
    kind: type | None
    default: Any
    text: str
    rule: str
    allows: Callable[[Any], bool]
    also_off: Any = None
    of_model: bool = False
    changes_logits: bool = False
    native: tuple[str, ...] = ()


def param(
    default: Any, text: str, rule: str = "", allows: Callable[[Any], bool] = lambda value: True, **more: Any
) -> Any:
    """Declare a field of SamplingParams. `more` are other fields of Param."""
    return field(default=default, metadata={"text": text, "rule": rule, "allows": allows, **more})


def within(low: float, high: float) -> tuple[str, Callable[[float], bool]]:
    """Return the rule (a text) and the check of the range [low, high]. NaN fails the check."""
    return f"must lie in [{low:g}, {high:g}]", lambda value: low <= value <= high


def above(low: float, high: float) -> tuple[str, Callable[[float], bool]]:
    """Return the rule (a text) and the check of the range (low, high]. NaN fails the check."""
    return f"must lie in ({low:g}, {high:g}]", lambda value: low < value <= high


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of a request. Values are checked, never clamped.

    Stop strings are not included; the front end matches them.

    `logprobs` is the number of alternatives to report for each generated token (0: only the chosen token);
    None reports nothing. `chosen_logits` reports each token's logit (`ChosenLogit`), for receipts. Neither
    option changes which tokens are chosen. `output_grammar` is the grammar that the output must match;
    `min_tokens` and `ignore_eos` are refused with a grammar, because it says where the output may end.

    `forced_token_ids` are the output's first tokens, whatever their logits. The front end uses them to score
    prompts (`serving/frontend/prompt_scoring.py`). No route accepts this field.
    """

    max_tokens: int
    min_tokens: int = param(
        0, "tokens that are generated before the output may end", native=("min_new_tokens", "min_tokens")
    )
    temperature: float = param(
        1.0, "divides the logits; 0, or any below the f32 range, is greedy", *within(0, 100), of_model=True
    )
    top_k: int = param(
        0,
        "keeps that many of the likeliest tokens",
        "must be 0 (off) or more",
        lambda value: value >= 0,
        also_off=-1,  # SGLang's and vLLM's
        of_model=True,
    )
    top_p: float = param(
        1.0, "keeps the likeliest tokens of that total probability", *above(0, 1), of_model=True
    )
    min_p: float = param(
        0.0,
        "keeps tokens with at least this share of the best one's probability",
        *within(0, 1),
        of_model=True,
    )
    seed: int | None = param(
        None,
        "the same seed gives the same tokens",
        "must lie in [0, 2**63), or be -1 (random)",
        lambda value: value is None or 0 <= value < 2**63,
        also_off=-1,  # vLLM's and llama.cpp's
        native=("seed", "sampling_seed"),
    )
    stop_token_ids: frozenset[int] = param(frozenset(), "tokens that end the output")
    ignore_eos: bool = param(False, "goes on after an end-of-sequence token")
    logprobs: int | None = None
    chosen_logits: bool = False
    presence_penalty: float = param(
        0.0,
        "is subtracted from the logit of a generated token",
        *within(-2, 2),
        of_model=True,
        changes_logits=True,
    )
    frequency_penalty: float = param(
        0.0,
        "is subtracted from a token's logit for each time that it was generated",
        *within(-2, 2),
        of_model=True,
        changes_logits=True,
    )
    repetition_penalty: float = param(
        1.0,
        "divides positive logits of tokens in prompt and output, and multiplies their other logits",
        *above(0, 100),
        of_model=True,
        changes_logits=True,
    )
    logit_bias: tuple[tuple[int, float], ...] = param(
        (), "pairs of a token ID and the value added to its logit", changes_logits=True
    )
    bad_words: tuple[tuple[int, ...], ...] = param(
        (), "words that the output never contains", changes_logits=True
    )
    allowed_token_ids: frozenset[int] | None = param(
        None, "the only tokens that the output may contain", changes_logits=True
    )
    typical_p: float = param(
        1.0,
        "keeps the tokens with information nearest to the entropy (arXiv:2202.00666)",
        *above(0, 1),
        of_model=True,
    )
    forced_token_ids: tuple[int, ...] = ()
    output_grammar: Grammar | None = None

    def __post_init__(self) -> None:
        _check("max_tokens", self.max_tokens >= 1, "must be at least 1")
        _check("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "must lie in [0, max_tokens]")
        for each in PARAMS.values():
            _check(each.name, each.allows(getattr(self, each.name)), each.rule)
        is_free = self.output_grammar is None
        _check("min_tokens", is_free or not self.min_tokens, NOT_WITH_GRAMMAR)
        _check("ignore_eos", is_free or not self.ignore_eos, NOT_WITH_GRAMMAR)
        few = self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS
        _check("logprobs", few, f"must lie in [0, {MAX_LOGPROBS}]")
        _check("logit_bias", len(self.logit_bias) <= MAX_BIASES, f"may have at most {MAX_BIASES} tokens")
        biases = all(abs(bias) <= MAX_BIAS for _, bias in self.logit_bias)
        _check("logit_bias", biases, f"must have values in [-{MAX_BIAS:g}, {MAX_BIAS:g}]")
        _check("bad_words", len(self.bad_words) <= MAX_BAD_WORDS, "has too many words")
        _check("bad_words", all(self.bad_words), "must not have an empty word")
        some = self.allowed_token_ids is None or len(self.allowed_token_ids) > 0
        _check("allowed_token_ids", some, "must have at least one token")

    @property
    def greedy(self) -> bool:
        return self.temperature < SMALLEST_TEMPERATURE or self.top_k == 1


def _check(param: str, ok: bool, rule: str) -> None:
    if not ok:
        raise InvalidRequestError(f"`{param}` {rule}", param)


PARAMS: dict[str, Param] = {
    each.name: Param(name=each.name, kind=KINDS.get(str(each.type)), default=each.default, **each.metadata)
    for each in fields(SamplingParams)
    if each.metadata
}
PLAIN = {name: each for name, each in PARAMS.items() if each.kind is not None}
OF_MODEL = {name: each for name, each in PLAIN.items() if each.of_model}
