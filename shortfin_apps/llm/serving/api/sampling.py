"""Converts a body's sampling fields to SamplingParams, with the model's defaults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from shortfin_apps.llm.components.request.grammar import Grammar
from shortfin_apps.llm.components.request.sampling_params import MAX_BIASES, SamplingParams
from shortfin_apps.llm.contract.errors import ArtifactError, InvalidRequestError
from shortfin_apps.llm.serving.api.schema import SamplingFields
from shortfin_apps.llm.serving.text.tokenizer import Tokenizer, bad_word_ids, first_out_of_range

PARAM_NAMES = tuple(field.name for field in fields(SamplingParams))
MAX_ID_DIGITS = 18
RANDOM_SEED = -1  # vLLM's and llama.cpp's value; SamplingParams has None
TOP_K_OFF = -1  # SGLang's and vLLM's value; SamplingParams has 0
NO_PENALTY = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
# Sampling settings that a model may request but that are not applied, with the values that disable them:
# fields of transformers, then of llama.cpp (`general.sampling.*`).
UNAPPLIED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "encoder_repetition_penalty", "guidance_scale"), (1,)),
    **dict.fromkeys(("penalty_alpha", "epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("encoder_no_repeat_ngram_size", "min_length", "min_new_tokens", "top_h"), (0,)),
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias"), ([],)),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), ()),
    **dict.fromkeys(("stop_strings", "dola_layers", "watermarking_config", "sequence"), ()),
    **dict.fromkeys(("mirostat", "xtc_probability"), (0,)),
    "penalty_last_n": (-1, 0),
}


Int64 = Annotated[int, Field(lt=2**63)]  # the limit of messages to the engine's process


class _Generation(BaseModel):
    """The supported fields of `generation_config.json`. Numbers are not parsed strictly."""

    do_sample: bool | None = None
    temperature: float | None = None
    top_k: Int64 | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: Int64 | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Defaults for a request's missing fields; each is named like its field in SamplingParams.

    `max_tokens` is for chats; None allows all that fits into the context.
    """

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None

    @classmethod
    def of_model(
        cls, generation: Mapping[str, Any], *, otherwise: float, override: float | None
    ) -> SamplingDefaults:
        """Return the defaults of a model with the given `generation_config.json`.

        The temperature is `override` if given, else the file's (0 with `do_sample: false`), else
        `otherwise`. Raises ArtifactError if a value in the file is out of range.
        """
        given = _parsed(generation).model_dump(exclude_none=True)
        is_greedy = given.pop("do_sample", None) is False
        temperature = 0.0 if is_greedy else given.pop("temperature", otherwise)
        if "top_k" in given:
            given["top_k"] = max(given["top_k"], 0)  # negative values also mean off
        if "max_new_tokens" in given:
            given["max_tokens"] = given.pop("max_new_tokens")
        values = {**given, "temperature": temperature if override is None else override}
        defaults = cls(**values)
        defaults._check()
        return defaults

    def _check(self) -> None:
        try:
            SamplingParams(
                **(asdict(self) | {"max_tokens": 1 if self.max_tokens is None else self.max_tokens})
            )
        except InvalidRequestError as error:
            raise ArtifactError(f"`generation_config.json`: {error}") from error

    def differences(self) -> dict[str, Any]:
        """Return the defaults that differ from SamplingParams' defaults."""
        usual = {field.name: field.default for field in fields(SamplingParams)} | {"max_tokens": None}
        return {name: value for name, value in asdict(self).items() if value != usual[name]}


def unapplied_fields(generation: Mapping[str, Any]) -> list[str]:
    """Return the fields of `generation_config.json` that request unsupported sampling."""
    given = {name: generation[name] for name in UNAPPLIED if generation.get(name) is not None}
    return [name for name, value in given.items() if value is not False and value not in UNAPPLIED[name]]


def penalties(generation: Mapping[str, Any]) -> list[str]:
    """Return the penalties set in `generation_config.json`; they need full rows of logits."""
    given = _parsed(generation).model_dump(exclude_none=True)
    return [name for name, off in NO_PENALTY.items() if given.get(name, off) != off]


def _parsed(generation: Mapping[str, Any]) -> _Generation:
    try:
        return _Generation.model_validate(generation)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        name = ".".join(map(str, problem["loc"]))
        raise ArtifactError(f"`generation_config.json`: `{name}`: {problem['msg']}") from None


@dataclass(frozen=True, slots=True)
class NamedTokens:
    """Token ids in a body's fields, converted once for all prompts of a batch."""

    stop_token_ids: frozenset[int]
    allowed_token_ids: frozenset[int] | None
    logit_bias: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, body: SamplingFields, vocab_size: int) -> NamedTokens:
        """Convert the fields. InvalidRequestError for a wrong id names the field as SamplingParams does."""
        stop, allowed, biases = body.stop_token_ids, body.allowed_token_ids, _biases(body.logit_bias or {})
        _check_ids("stop_token_ids", stop or [], vocab_size)
        _check_ids("logit_bias", [token_id for token_id, _ in biases], vocab_size)
        _check_ids("allowed_token_ids", allowed or [], vocab_size)
        return cls(frozenset(stop or ()), None if allowed is None else frozenset(allowed), biases)


def sampling_params(
    body: SamplingFields,
    defaults: SamplingDefaults,
    *,
    tokenizer: Tokenizer,
    tokens: NamedTokens,
    **resolved: int | Grammar | None,
) -> SamplingParams:
    """Merge `body`'s fields and `defaults` to SamplingParams.

    `tokens` are the body's. `resolved` are parameters that the route determined itself, for example from
    aliases. InvalidRequestError for a value out of range names the field as SamplingParams does.
    """
    given = {name: getattr(body, name, None) for name in PARAM_NAMES} | resolved
    values: dict[str, Any] = asdict(defaults) | {k: v for k, v in given.items() if v is not None}
    values["stop_token_ids"] = tokens.stop_token_ids
    values["logit_bias"], values["forced_token_ids"] = tokens.logit_bias, ()
    values["chosen_logits"] = False  # not settable by a body
    values["bad_words"] = bad_word_ids(tokenizer, tuple(body.bad_words or ()))
    if tokens.allowed_token_ids is not None:
        values["allowed_token_ids"] = tokens.allowed_token_ids
    values["top_k"] = 0 if values["top_k"] == TOP_K_OFF else values["top_k"]
    values["seed"] = None if values.get("seed") == RANDOM_SEED else values.get("seed")
    return SamplingParams(**values)


def _check_ids(param: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if (bad_id := first_out_of_range(token_ids, vocab_size)) is not None:
        raise InvalidRequestError(f"`{param}`: {bad_id} is not in [0, {vocab_size})", param)


def _biases(logit_bias: Mapping[str, Any] | Sequence[Any]) -> tuple[tuple[int, float], ...]:
    """Return (token id, bias) pairs from OpenAI's object or llama.cpp's list of pairs.

    Raises InvalidRequestError for the first malformed entry.
    """
    if len(logit_bias) > MAX_BIASES:
        raise InvalidRequestError(f"`logit_bias` may have at most {MAX_BIASES} tokens", "logit_bias")
    if isinstance(logit_bias, Mapping):
        return tuple((_token_id(name), _bias(value)) for name, value in logit_bias.items())
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in logit_bias):
        raise InvalidRequestError("`logit_bias` must hold pairs of a token id and a number", "logit_bias")
    return tuple((_token_id(str(token_id)), _bias(value)) for token_id, value in logit_bias)


def _token_id(name: str) -> int:
    if not (name.isascii() and name.isdecimal() and len(name) <= MAX_ID_DIGITS):
        raise InvalidRequestError(f"`logit_bias`: {name[:40]!r} is not a token id", "logit_bias")
    return int(name)


def _bias(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequestError("`logit_bias`: a bias must be a number", "logit_bias")
    return value


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


@contextmanager
def params_named(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the parameter in an InvalidRequestError to the caller's name for it, given by `names`."""
    try:
        yield
    except InvalidRequestError as error:
        caller_name = names.get(error.param or "")
        if caller_name is None:
            raise
        message = str(error).replace(f"`{error.param}`", f"`{caller_name}`")
        raise InvalidRequestError(message, caller_name, error.extra) from None
