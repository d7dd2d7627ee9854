"""From a body's sampling fields to SamplingParams, with the model's defaults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.components.text.tokenizer import first_out_of_range
from shortfin_apps.llm.errors import ArtifactError, InvalidRequestError

TOP_K_OFF = -1  # how SGLang and vLLM spell it; ours is 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """What holds when a request does not say; the fields of SamplingParams of the same names."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @classmethod
    def of_model(
        cls, generation: Mapping[str, Any], *, otherwise: float, override: float | None
    ) -> SamplingDefaults:
        """From a `generation_config.json`.

        The temperature is `override` if given, else the file's (0 if it says `do_sample: false`), else
        `otherwise`. Raises ArtifactError when a value of the file is out of range.
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
            SamplingParams(
                max_tokens=1,
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                min_p=self.min_p,
            )
        except (InvalidRequestError, TypeError) as error:
            raise ArtifactError(f"`generation_config.json`: {error}") from error


class SamplingFields(Protocol):
    """The fields that bodies have in common; None where the client said nothing."""

    @property
    def temperature(self) -> float | None: ...
    @property
    def top_k(self) -> int | None: ...
    @property
    def top_p(self) -> float | None: ...
    @property
    def min_p(self) -> float | None: ...
    @property
    def stop_token_ids(self) -> list[int] | None: ...
    @property
    def ignore_eos(self) -> bool | None: ...


def sampling_params(
    fields: SamplingFields,
    defaults: SamplingDefaults,
    *,
    vocab_size: int,
    max_tokens: int,
    min_tokens: int | None,
    seed: int | None,
    logprobs: int | None,
) -> SamplingParams:
    """Raises InvalidRequestError with SamplingParams' name of the field that is out of range."""
    stop_ids = fields.stop_token_ids or []
    if (stranger := first_out_of_range(stop_ids, vocab_size)) is not None:
        raise InvalidRequestError(
            f"`stop_token_ids`: {stranger} is not in [0, {vocab_size})", "stop_token_ids"
        )
    top_k = defaults.top_k if fields.top_k is None else fields.top_k
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens or 0,
        temperature=defaults.temperature if fields.temperature is None else fields.temperature,
        top_k=0 if top_k == TOP_K_OFF else top_k,
        top_p=defaults.top_p if fields.top_p is None else fields.top_p,
        min_p=defaults.min_p if fields.min_p is None else fields.min_p,
        seed=seed,
        stop_token_ids=frozenset(stop_ids),
        ignore_eos=bool(fields.ignore_eos),
        logprobs=logprobs,
    )


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


@contextmanager
def spelled(names: Mapping[str, str]) -> Iterator[None]:
    """Renames the parameter of an InvalidRequestError from our word to the caller's."""
    try:
        yield
    except InvalidRequestError as error:
        theirs = names.get(error.param or "")
        if theirs is None:
            raise
        message = str(error).replace(f"`{error.param}`", f"`{theirs}`")
        raise InvalidRequestError(message, theirs, error.extra) from None
