"""Converts a body's sampling fields to SamplingParams, with the model's defaults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError, create_model

from shortfin_apps.llm.components.request.sampling_params import (
    MAX_BIASES,
    OF_MODEL,
    PARAMS,
    PLAIN,
    SamplingParams,
)
from shortfin_apps.llm.contract.errors import ArtifactError, InvalidRequestError
from shortfin_apps.llm.serving.api.schema import SamplingBody, SamplingFields
from shortfin_apps.llm.serving.text.tokenizer import first_out_of_range

MAX_ID_DIGITS = 18
# Sampling settings that a model may have but that are not applied, with the values that disable them:
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


Int64 = Annotated[int, Field(lt=2**63)]  # messages to the engine's process hold no larger integers


# The supported fields of `generation_config.json`. Types are not strict: 1.0 is read as an int.
_GENERATION: dict[str, Any] = {
    "do_sample": (bool | None, None),
    "max_new_tokens": (Int64 | None, None),
    **{each.name: (Int64 | None if each.kind is int else float | None, None) for each in OF_MODEL.values()},
}
_Generation: type[BaseModel] = create_model("_Generation", **_GENERATION)


class SamplingDefaults:
    """Values of sampling parameters that a request does not give.

    `values`: the parameters in OF_MODEL, by name. `max_tokens`: for chats only; None: the free context.
    """

    def __init__(self, *, max_tokens: int | None = None, **given: Any) -> None:
        """Check and store the defaults. Raises InvalidRequestError if a value is out of range."""
        self.max_tokens = max_tokens
        self.values = {each.name: given.pop(each.name, each.default) for each in OF_MODEL.values()}
        SamplingParams(max_tokens=1 if max_tokens is None else max_tokens, **self.values, **given)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SamplingDefaults) and vars(self) == vars(other)

    @classmethod
    def of_model(
        cls, generation: Mapping[str, Any], *, otherwise: float, override: float | None
    ) -> SamplingDefaults:
        """Return the defaults of a model. `generation`: its `generation_config.json`.

        The temperature is `override` unless None, else the file's (0 with `do_sample: false`), else
        `otherwise`. Raises ArtifactError if a value in the file is out of range.
        """
        given = _parsed(generation)
        is_greedy = given.pop("do_sample", None) is False
        temperature = 0.0 if is_greedy else given.pop("temperature", otherwise)
        if "top_k" in given:
            given["top_k"] = max(given["top_k"], 0)  # negative values also mean off
        max_tokens = given.pop("max_new_tokens", None)
        values = {**given, "temperature": temperature if override is None else override}
        try:
            return cls(max_tokens=max_tokens, **values)
        except InvalidRequestError as error:
            raise ArtifactError(f"`generation_config.json`: {error}") from error

    def differences(self) -> dict[str, Any]:
        """Return the defaults that differ from those of SamplingParams, by parameter name."""
        changed = {name: value for name, value in self.values.items() if value != PARAMS[name].default}
        return changed if self.max_tokens is None else {**changed, "max_tokens": self.max_tokens}


def unapplied_fields(generation: Mapping[str, Any]) -> list[str]:
    """Return the names of fields in `generation_config.json` that enable unsupported sampling methods."""
    given = {name: generation[name] for name in UNAPPLIED if generation.get(name) is not None}
    return [name for name, value in given.items() if value is not False and value not in UNAPPLIED[name]]


def penalties(generation: Mapping[str, Any]) -> list[str]:
    """Return the names of parameters in `generation_config.json` that change logits, such as penalties.

    These parameters need all logits of a token instead of the top-k candidates.
    """
    given = _parsed(generation)
    changing = [each for each in OF_MODEL.values() if each.changes_logits]
    return [each.name for each in changing if given.get(each.name, each.default) != each.default]


def _parsed(generation: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return _Generation.model_validate(generation).model_dump(exclude_none=True)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        name = ".".join(map(str, problem["loc"]))
        raise ArtifactError(f"`generation_config.json`: `{name}`: {problem['msg']}") from None


@dataclass(frozen=True, slots=True)
class NamedTokens:
    """The token ids in a body's sampling fields, converted once for all prompts of the body."""

    stop_token_ids: frozenset[int]
    allowed_token_ids: frozenset[int] | None
    logit_bias: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, body: SamplingFields, vocab_size: int) -> NamedTokens:
        """Convert the fields. Raises InvalidRequestError for an invalid id or bias.

        The error names the field as SamplingParams does.
        """
        stop, allowed, biases = body.stop_token_ids, body.allowed_token_ids, _biases(body.logit_bias or {})
        _check_ids("stop_token_ids", stop or [], vocab_size)
        _check_ids("logit_bias", [token_id for token_id, _ in biases], vocab_size)
        _check_ids("allowed_token_ids", allowed or [], vocab_size)
        return cls(frozenset(stop or ()), None if allowed is None else frozenset(allowed), biases)


def given_params(body: SamplingFields, prefix: str = "") -> tuple[dict[str, Any], dict[str, str]]:
    """Return two dicts keyed by parameter name: values given in the body, and field names in the body.

    The first has only the given parameters that need no conversion. The second has all parameters.
    Raises InvalidRequestError if two fields for one parameter disagree.
    """
    values: dict[str, Any] = {}
    names = {name: prefix + name for name in PARAMS}
    for each in PLAIN.values():
        aliases = each.native if isinstance(body, SamplingBody) and each.native else (each.name,)
        given_name, value = first_given(body, *aliases, prefix=prefix)
        names[each.name] = prefix + given_name
        if value is not None:
            values[each.name] = each.default if value == each.also_off else value
    return values, names


def first_given(body: SamplingFields, *names: str, prefix: str = "") -> tuple[str, Any]:
    """Return the name and value of the first of several aliases that the body gives.

    Returns the first alias and None if none is given. Raises InvalidRequestError if aliases disagree.
    """
    given = {name: value for name in names if (value := getattr(body, name)) is not None}
    if len(set(given.values())) > 1:
        first, second = list(given)[:2]
        raise InvalidRequestError(f"`{prefix}{first}` and `{prefix}{second}` disagree", prefix + second)
    return next(iter(given.items()), (names[0], None))


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


def with_seed(params: SamplingParams, index: int) -> SamplingParams:
    """Return the parameters of a prompt's `index`-th choice; with a seed, each choice gets its own."""
    if params.seed is None or index == 0:
        return params
    return replace(params, seed=(params.seed + index) % 2**63)


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


@contextmanager
def params_named(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the parameter in an InvalidRequestError to the client's name for it.

    `names`: parameter name to client's name. Other parameters keep their names.
    """
    try:
        yield
    except InvalidRequestError as error:
        caller_name = names.get(error.param or "")
        if caller_name is None:
            raise
        message = str(error).replace(f"`{error.param}`", f"`{caller_name}`")
        raise type(error)(message, caller_name, error.extra) from None
