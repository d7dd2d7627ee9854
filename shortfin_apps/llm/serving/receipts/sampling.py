"""A receipt's `sampling`: the sampling parameters, in the form that `/generate` accepts.

`sampling` has the values that differ from SamplingParams' defaults. Stop strings, bad words and the grammar,
which SamplingParams does not have in this form, are copied from the request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError, create_model

from shortfin_apps.llm.components.grammar.source import GrammarKind, GrammarSource
from shortfin_apps.llm.components.request.grammar import Grammar
from shortfin_apps.llm.components.request.sampling_params import OF_MODEL, PLAIN, SamplingParams
from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.serving.receipts.receipt import ReceiptError

# Fields that only affect what is reported, and fields that are recorded as the request gave them.
NOT_RECORDED = {"logprobs", "chosen_logits", "forced_token_ids", "bad_words", "output_grammar"}
_NAMES = {GrammarKind.JSON_SCHEMA: "json", GrammarKind.REGEX: "regex"}


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class StructuredOutputs(_Strict):
    """A grammar, as one of `json`, `regex` and `grammar`."""

    json_text: str | None = Field(None, alias="json")
    regex: str | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = False

    def source(self) -> GrammarSource:
        if self.json_text is not None:
            return GrammarSource(GrammarKind.JSON_SCHEMA, self.json_text, self.disable_any_whitespace)
        if self.regex is not None:
            return GrammarSource(GrammarKind.REGEX, self.regex)
        return GrammarSource(GrammarKind.EBNF, self.grammar or "")


if TYPE_CHECKING:
    _Params = _Strict
else:
    _Params = create_model(
        "_Params",
        __base__=_Strict,
        **{
            name: (each.kind if each.default is not None else each.kind | None, each.default)
            for name, each in PLAIN.items()
        },
    )


class RecordedSampling(_Params):
    """A receipt's parsed `sampling`: SamplingParams' fields, and the last four as the request gave them."""

    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    skip_special_tokens: bool = True
    stop: tuple[str, ...] = ()
    bad_words: tuple[str, ...] = ()
    structured_outputs: StructuredOutputs | None = None

    @classmethod
    def parse(cls, sampling: dict[str, JsonValue]) -> RecordedSampling:
        """Parse a receipt's `sampling`. Raises ReceiptError."""
        try:
            return cls.model_validate_json(_JSON.dump_json(sampling))
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            name = ".".join(map(str, problem["loc"]))
            raise ReceiptError(f"the receipt's `sampling.{name}`: {problem['msg']}") from None

    def params(
        self, word_ids: Callable[[Sequence[str]], tuple[tuple[int, ...], ...]], grammar: Grammar | None
    ) -> SamplingParams:
        """Return SamplingParams that report logits. `word_ids` tokenises bad words; `grammar`: compiled.

        Raises ReceiptError for a value out of range.
        """
        named = self.model_dump(exclude={"skip_special_tokens", "stop", "structured_outputs"})
        allowed = self.allowed_token_ids
        changed: dict[str, Any] = {
            "stop_token_ids": frozenset(self.stop_token_ids),
            "allowed_token_ids": None if allowed is None else frozenset(allowed),
            "bad_words": word_ids(self.bad_words),
            "output_grammar": grammar,
            "chosen_logits": True,
        }
        try:
            return SamplingParams(**(named | changed))
        except InvalidRequestError as error:
            raise ReceiptError(f"the receipt's `sampling`: {error}") from None


_JSON: TypeAdapter[dict[str, JsonValue]] = TypeAdapter(dict[str, Annotated[JsonValue, Field()]])


def recorded_sampling(
    params: SamplingParams,
    *,
    stop: Sequence[str] = (),
    skip_special_tokens: bool = True,
    bad_words: Sequence[str] = (),
    grammar: GrammarSource | None = None,
) -> dict[str, JsonValue]:
    """Return the `sampling` of a request's receipt."""
    recorded = _changed(params)
    if stop:
        recorded["stop"] = list(stop)
        if not skip_special_tokens:  # affects which text is searched for stop strings
            recorded["skip_special_tokens"] = False
    if bad_words:
        recorded["bad_words"] = list(bad_words)
    if grammar is not None:
        recorded["structured_outputs"] = _structured(grammar)
    return recorded


def request_sampling(sampling: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Return the `sampling_params` with which a `/generate` request gets the receipt's answer again."""
    # A server's own defaults may differ for these fields, so a replay must send them.
    named: dict[str, JsonValue] = {name: each.default for name, each in OF_MODEL.items()}
    return named | sampling


def _changed(params: SamplingParams) -> dict[str, JsonValue]:
    names = [field.name for field in fields(params) if getattr(params, field.name) != field.default]
    return {name: _listed(getattr(params, name)) for name in names if name not in NOT_RECORDED}


def _listed(value: Any) -> JsonValue:
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, tuple):
        return [list(each) for each in value]
    plain: JsonValue = value
    return plain


def _structured(grammar: GrammarSource) -> dict[str, JsonValue]:
    """Return vLLM's `structured_outputs`. A Lark grammar, also one of choices or tools, is its `grammar`."""
    compact: dict[str, JsonValue] = {"disable_any_whitespace": True} if grammar.is_compact else {}
    return {_NAMES.get(grammar.kind, "grammar"): grammar.text, **compact}
