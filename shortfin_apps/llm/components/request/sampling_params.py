"""Sampling parameters: how a request's tokens are chosen, and when it ends."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shortfin_apps.llm.components.request.grammar import Grammar
from shortfin_apps.llm.contract.errors import InvalidRequestError

MAX_LOGPROBS = 20  # maximum alternatives reported per token
MAX_PENALTY = 2.0  # OpenAI's bound on the magnitude of presence and frequency penalties
MAX_REPETITION_PENALTY = 100.0
MAX_BIAS = 100.0
MAX_BIASES = 1024
MAX_BAD_WORDS = 1024  # token sequences; each word has one or two
# The smallest normal f32, the type in which logits are divided by the temperature: a smaller one becomes 0,
# or has a reciprocal that overflows.
SMALLEST_TEMPERATURE = 2.0**-126
NOT_WITH_GRAMMAR = "cannot be combined with structured output, whose grammar says where it may end"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of a request. Values are checked, never clamped.

    Stop strings are not included; the front end matches them.

    Any `temperature` below SMALLEST_TEMPERATURE is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are off.
    `logprobs` is the number of alternatives to report for each generated token (0: only the chosen token);
    None reports nothing. `chosen_logits` reports each token's logit (`ChosenLogit`), for receipts; neither
    changes a token. `output_grammar` is the grammar that the output must match; it alone then decides when
    the output may end.

    Penalties and biases change the logits, as in vLLM. For tokens in prompt and output, `repetition_penalty`
    (1: off) divides positive logits and multiplies the others. `frequency_penalty` (0: off) is subtracted for
    each time that a token was generated, `presence_penalty` (0: off) once. `logit_bias` has pairs of a token
    ID and the value added to its logit. `bad_words` are token sequences that the output never contains;
    `allowed_token_ids` the only tokens that it may contain, None for all. `typical_p` (1: off) keeps the
    tokens with information content nearest to the entropy (locally typical sampling, arXiv:2202.00666).

    `forced_token_ids` are the output's first tokens, whatever their logits: the front end uses them to score
    prompts (`serving/frontend/prompt_scoring.py`). No route accepts it.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None
    chosen_logits: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: frozenset[int] | None = None
    typical_p: float = 1.0
    forced_token_ids: tuple[int, ...] = ()
    output_grammar: Grammar | None = None

    def __post_init__(self) -> None:
        _check("max_tokens", self.max_tokens >= 1, "must be at least 1")
        _check("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "must lie in [0, max_tokens]")
        finite = math.isfinite(self.temperature)
        _check("temperature", finite and 0 <= self.temperature <= 100, "must lie in [0, 100]")
        _check("top_k", self.top_k >= 0, "must be 0 (off) or more")
        _check("top_p", 0 < self.top_p <= 1, "must lie in (0, 1]")
        _check("min_p", 0 <= self.min_p <= 1, "must lie in [0, 1]")
        _check(
            "seed", self.seed is None or 0 <= self.seed < 2**63, "must lie in [0, 2**63), or be -1 (random)"
        )
        is_free = self.output_grammar is None
        _check("min_tokens", is_free or not self.min_tokens, NOT_WITH_GRAMMAR)
        _check("ignore_eos", is_free or not self.ignore_eos, NOT_WITH_GRAMMAR)
        few = self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS
        _check("logprobs", few, f"must lie in [0, {MAX_LOGPROBS}]")
        self._check_adjustments()

    def _check_adjustments(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            ok = abs(getattr(self, name)) <= MAX_PENALTY  # False for NaN
            _check(name, ok, f"must lie in [-{MAX_PENALTY:g}, {MAX_PENALTY:g}]")
        within = 0 < self.repetition_penalty <= MAX_REPETITION_PENALTY
        _check("repetition_penalty", within, f"must lie in (0, {MAX_REPETITION_PENALTY:g}]")
        _check("logit_bias", len(self.logit_bias) <= MAX_BIASES, f"may have at most {MAX_BIASES} tokens")
        biases = all(abs(bias) <= MAX_BIAS for _, bias in self.logit_bias)
        _check("logit_bias", biases, f"must have values in [-{MAX_BIAS:g}, {MAX_BIAS:g}]")
        _check("bad_words", len(self.bad_words) <= MAX_BAD_WORDS, "has too many words")
        _check("bad_words", all(self.bad_words), "must not have an empty word")
        some = self.allowed_token_ids is None or len(self.allowed_token_ids) > 0
        _check("allowed_token_ids", some, "must have at least one token")
        _check("typical_p", 0 < self.typical_p <= 1, "must lie in (0, 1]")

    @property
    def greedy(self) -> bool:
        return self.temperature < SMALLEST_TEMPERATURE or self.top_k == 1


def _check(param: str, ok: bool, rule: str) -> None:
    if not ok:
        raise InvalidRequestError(f"`{param}` {rule}", param)
