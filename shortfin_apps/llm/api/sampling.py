"""Converts a body's sampling fields to SamplingParams, with the model's defaults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any

from shortfin_apps.llm.api.schema import SamplingFields
from shortfin_apps.llm.components.request.grammar import Grammar
from shortfin_apps.llm.components.request.sampling_params import MAX_BIASES, SamplingParams
from shortfin_apps.llm.components.text.bad_words import bad_word_ids
from shortfin_apps.llm.components.text.tokenizer import Tokenizer, first_out_of_range
from shortfin_apps.llm.errors import ArtifactError, InvalidRequestError

PARAM_NAMES = tuple(field.name for field in fields(SamplingParams))
MAX_ID_DIGITS = 18
RANDOM_SEED = -1  # vLLM's and llama.cpp's value; SamplingParams has None
TOP_K_OFF = -1  # SGLang's and vLLM's value; SamplingParams has 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Defaults for a request's missing fields; each has the name of its field in SamplingParams."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @classmethod
    def of_model(
        cls, generation: Mapping[str, Any], *, otherwise: float, override: float | None
    ) -> SamplingDefaults:
        """The defaults of a model with the given `generation_config.json`.

        The temperature is `override` if given, else the file's (0 with `do_sample: false`), else
        `otherwise`. Raises ArtifactError when a value in the file is out of range.
        """
        temperature = generation.get("temperature")
        if generation.get("do_sample") is False:
            temperature = 0.0
        if override is not None:
            temperature = override
        fields = {k: generation[k] for k in ("top_k", "top_p", "min_p") if generation.get(k) is not None}
        defaults = cls(temperature=otherwise if temperature is None else temperature, **fields)
        defaults._check()
        return defaults

    def _check(self) -> None:
        try:
            SamplingParams(max_tokens=1, **asdict(self))
        except (InvalidRequestError, TypeError) as error:
            raise ArtifactError(f"`generation_config.json`: {error}") from error


def sampling_params(
    body: SamplingFields,
    defaults: SamplingDefaults,
    *,
    tokenizer: Tokenizer,
    **resolved: int | Grammar | None,
) -> SamplingParams:
    """SamplingParams with the values of `body`'s fields of the same names, `defaults` where it has none.

    `resolved` are parameters that a route determined itself, as for a field with several names. Raises
    InvalidRequestError with SamplingParams' name of the field that is out of range.
    """
    stop_token_ids, biases = body.stop_token_ids or [], _biases(body.logit_bias or {})
    _check_ids("stop_token_ids", stop_token_ids, tokenizer.vocab_size)
    _check_ids("logit_bias", [token_id for token_id, _ in biases], tokenizer.vocab_size)
    _check_ids("allowed_token_ids", body.allowed_token_ids or [], tokenizer.vocab_size)
    given = {name: getattr(body, name, None) for name in PARAM_NAMES} | resolved
    values: dict[str, Any] = asdict(defaults) | {k: v for k, v in given.items() if v is not None}
    values["stop_token_ids"] = frozenset(stop_token_ids)
    values["logit_bias"], values["forced_token_ids"] = biases, ()
    values["chosen_logits"] = False  # which is no field of a body
    values["bad_words"] = bad_word_ids(tokenizer, tuple(body.bad_words or ()))
    if body.allowed_token_ids is not None:
        values["allowed_token_ids"] = frozenset(body.allowed_token_ids)
    values["top_k"] = 0 if values["top_k"] == TOP_K_OFF else values["top_k"]
    values["seed"] = None if values.get("seed") == RANDOM_SEED else values.get("seed")
    return SamplingParams(**values)


def _check_ids(param: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if (bad_id := first_out_of_range(token_ids, vocab_size)) is not None:
        raise InvalidRequestError(f"`{param}`: {bad_id} is not in [0, {vocab_size})", param)


def _biases(logit_bias: Mapping[str, Any] | Sequence[Any]) -> tuple[tuple[int, float], ...]:
    """Pairs of a token id and its bias, of OpenAI's object or of llama.cpp's list of pairs.

    Raises InvalidRequestError for the first entry that is not such a pair.
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
    """Renames the parameter of an InvalidRequestError to the name that the caller used, found in `names`."""
    try:
        yield
    except InvalidRequestError as error:
        caller_name = names.get(error.param or "")
        if caller_name is None:
            raise
        message = str(error).replace(f"`{error.param}`", f"`{caller_name}`")
        raise InvalidRequestError(message, caller_name, error.extra) from None
