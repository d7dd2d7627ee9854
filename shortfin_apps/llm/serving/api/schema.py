"""Request bodies. Types are strict; SamplingParams checks ranges and serving/api/limits.py checks sizes.

`unserved_fields.py` lists fields of other servers that are not supported here. `json_body.py` refuses or
ignores these fields, and unknown ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, create_model, model_validator

from shortfin_apps.llm.components.grammar.source import FIELDS as GRAMMAR_FIELDS
from shortfin_apps.llm.components.request.sampling_params import PLAIN, Param
from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.serving.api.call_arguments import arguments_in_history
from shortfin_apps.llm.serving.api.unserved_fields import (
    ABORT_INERT,
    ABORT_REFUSED,
    CALL_INERT,
    CHAT_INERT,
    CHAT_INSTEAD,
    CHAT_REFUSED,
    COMPLETION_INERT,
    COMPLETION_INSTEAD,
    COMPLETION_REFUSED,
    DETOKENIZE_REFUSED,
    GENERATE_INERT,
    GENERATE_REFUSED,
    INSTEAD,
    LEAVE_OUT,
    SAMPLING_INERT,
    SAMPLING_REFUSED,
    STREAM_OPTIONS_REFUSED,
    STRUCTURED_OUTPUTS_REFUSED,
    TOKENIZE_INERT,
    TOKENIZE_REFUSED,
    Refused,
)
from shortfin_apps.llm.serving.text.strict_turns import THOUGHT_NAMES

BUDGET_FIELDS = (  # vLLM's name, then llama.cpp's three
    *("thinking_token_budget", "thinking_budget_tokens", "reasoning_budget_tokens", "reasoning_budget"),
)
MAX_TOOLS = 128  # OpenAI's
MAX_ABORTED = 20_000  # ids of one `POST /abort`

LINKS = frozenset({"tool_call_id"})  # message fields that templates may ignore: the order implies their value

NOT_SERVED = "not_served"  # pydantic error type for an unsupported type of list entry

Number = Annotated[float, Field(allow_inf_nan=False)]
# `fail_fast`: a list is refused at its first invalid entry, as errors of millions of entries take seconds.
TokenIds = Annotated[list[int], Field(fail_fast=True)]
Strings = Annotated[list[str], Field(fail_fast=True)]
TokenIdLists = Annotated[list[TokenIds], Field(fail_fast=True)]
Ints = Annotated[list[int], Field(fail_fast=True)]
Bools = Annotated[list[bool], Field(fail_fast=True)]
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,256}$")]


FIELD_NAMES: set[str] = set()  # names, as in JSON, of all declared fields of all bodies


class Body(BaseModel):
    """Base class of request bodies, and of the objects in bodies."""

    model_config = ConfigDict(strict=True, extra="allow")

    REFUSED: ClassVar[Refused] = {}
    INERT: ClassVar[frozenset[str]] = frozenset()
    INSTEAD: ClassVar[Mapping[str, str]] = {}  # refused field: what to do instead
    READS_EXTRAS: ClassVar[bool] = False  # whether undeclared fields have an effect

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Remove the fields that the subclass declares from `REFUSED`; add their names to FIELD_NAMES."""
        super().__pydantic_init_subclass__(**kwargs)
        FIELD_NAMES.update(field.alias or name for name, field in cls.model_fields.items())
        cls.REFUSED = {name: off for name, off in cls.REFUSED.items() if name not in cls.model_fields}

    def unread_fields(self, prefix: str = "") -> list[str]:
        """Return the names of given fields without effect: inert or unknown fields that are not null.

        Raises InvalidRequestError for a field in `REFUSED`, unless its value is null or listed there.
        """
        extra = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        for name, value in extra.items():
            if value not in self.REFUSED.get(name, (value,)):
                instead = self.INSTEAD.get(name) or INSTEAD.get(name, LEAVE_OUT)
                raise InvalidRequestError(
                    f"`{prefix}{name}` is not supported by this server; {instead}", prefix + name
                )
        return [] if self.READS_EXTRAS else [name for name in extra if name not in self.REFUSED]

    def idle_fields(self) -> list[str]:
        """Return the names of declared fields that have no effect without another field."""
        return []


class StructuredOutputs(Body):
    """vLLM's structured outputs: exactly one of the first five fields."""

    REFUSED = STRUCTURED_OUTPUTS_REFUSED

    json_value: str | dict[str, Any] | None = Field(None, alias="json")  # `json` is a method of BaseModel
    json_object: bool | None = None
    regex: str | None = None
    choice: Strings | None = None
    grammar: str | None = None
    disable_any_whitespace: bool | None = None


def _wire_field(param: Param) -> tuple[Any, Any]:
    """Return the type and the pydantic Field of a sampling parameter in a body."""
    default = "" if param.default is None else f"; {param.default} is off"
    about = f"{param.text}{default}; {param.rule}" if param.rule else param.text + default
    kind = Number if param.kind is float else param.kind
    return kind | None, Field(None, description=about)  # type: ignore[operator]


if TYPE_CHECKING:
    _Params = Body
else:
    _Params = create_model("_Params", __base__=Body, **{name: _wire_field(PLAIN[name]) for name in PLAIN})


class SamplingFields(_Params):
    """Sampling fields of all routes that generate. None: the client left the field out.

    Scalar parameters are inherited: `components/request/sampling_params.py` declares them. The fields below
    are converted in `serving/api/sampling.py` and `components/grammar/source.py`.
    """

    max_tokens: int | None = None
    logit_bias: dict[str, Any] | list[Any] | None = None  # entries are checked in serving/api/sampling.py
    bad_words: Strings | None = None
    allowed_token_ids: TokenIds | None = None
    n: int | None = None
    stop: str | Strings | None = None
    stop_token_ids: TokenIds | None = None
    skip_special_tokens: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Strings | None = None
    guided_grammar: str | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    thinking_token_budget: int | None = None
    thinking_budget_tokens: int | None = None
    reasoning_budget_tokens: int | None = None
    reasoning_budget: int | None = None

    def grammar_fields(self) -> dict[str, Any]:
        """Return the fields that `components/grammar/source.py` reads, keyed by their names in JSON."""
        return self.model_dump(include=set(GRAMMAR_FIELDS), by_alias=True)


class ServingFields(Body):
    """Fields of all routes that generate: how a request is served, without effect on its tokens."""

    cache_salt: str | None = None
    priority: int | None = None
    user: str | None = None
    timeout_s: Number | None = None
    stream: bool | None = None
    receipt: bool | Literal["text"] | None = None


class SamplingBody(SamplingFields):
    """`sampling_params` of `/generate`, with the names of upstream shortfin and of SGLang."""

    REFUSED = SAMPLING_REFUSED
    INERT = SAMPLING_INERT

    max_completion_tokens: int | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    best_of: int | None = None
    num_beams: int | None = None
    sampling_seed: int | None = None
    no_stop_trim: bool | None = None


class GenerateBody(ServingFields):
    """Body of `POST /generate`: exactly one of `text` and `input_ids`, with one prompt or several prompts."""

    # Sampling fields are refused at the top level, where they would have no effect.
    REFUSED = {**SAMPLING_REFUSED, **dict.fromkeys(SamplingBody.model_fields, ()), **GENERATE_REFUSED}
    INERT = GENERATE_INERT
    INSTEAD = dict.fromkeys(SamplingBody.model_fields, "put it into `sampling_params`")

    text: str | Strings | None = None
    input_ids: TokenIds | TokenIdLists | None = None
    sampling_params: SamplingBody | Annotated[list[SamplingBody], Field(fail_fast=True)] | None = None
    rid: str | Strings | None = None
    return_input_ids: bool | None = None
    return_logprob: bool | Bools | None = None
    logprob_start_len: int | Ints | None = None
    top_logprobs_num: int | Ints | None = None
    return_text_in_logprobs: bool | None = None


class AbortBody(Body):
    """Body of `POST /abort`: one request id or several request ids."""

    REFUSED = ABORT_REFUSED
    INERT = ABORT_INERT

    rid: str | Annotated[list[str], Field(fail_fast=True, max_length=MAX_ABORTED)]


class StreamOptions(Body):
    REFUSED = STREAM_OPTIONS_REFUSED

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class OpenAIBody(ServingFields, SamplingFields):
    """Fields that `/v1/completions` and `/v1/chat/completions` share, vLLM's extra fields included."""

    model: str | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    stream_options: StreamOptions | None = None

    def idle_fields(self) -> list[str]:
        return ["stream_options"] if self.stream_options is not None and not self.stream else []


class CompletionBody(OpenAIBody):
    """Body of `POST /v1/completions`."""

    REFUSED = COMPLETION_REFUSED
    INERT = COMPLETION_INERT
    INSTEAD = COMPLETION_INSTEAD

    prompt: str | TokenIds | Strings | TokenIdLists
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None


class TextPart(Body):
    """A text part. `/v1/responses` uses the types `input_text` and `output_text`."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(Body):
    """A refusal in an earlier answer. This server never generates one."""

    type: Literal["refusal"]
    refusal: str


# Tags appear in the locations of pydantic's errors, so a tag must not be the name of a field.
PART_TAGS = {
    **dict.fromkeys(("text", "input_text", "output_text"), "text part"),
    "refusal": "refusal part",
}


def type_of(value: object) -> str | None:
    """Return the `type` of a part, an item or a choice, given as a JSON object or as a Body.

    Returns None if there is none, or if it is not a string.
    """
    kind = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    return kind if isinstance(kind, str) else None


Part = Annotated[
    Annotated[TextPart, Tag("text part")] | Annotated[RefusalPart, Tag("refusal part")],
    Discriminator(
        lambda part: PART_TAGS.get(type_of(part) or ""),
        custom_error_type=NOT_SERVED,
        custom_error_message="a part must be of type `text` or `refusal`:"
        " images, audio and files are not supported by this server",
    ),
]
Parts = Annotated[list[Part], Field(fail_fast=True)]


class CalledFunction(Body):
    name: str
    arguments: str | dict[str, Any] | None = None

    def for_template(self) -> dict[str, Any]:
        return {"name": self.name, "arguments": arguments_object(self.arguments)}


class ToolCall(Body):
    """A tool call in an assistant's message."""

    INERT = CALL_INERT

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        known = {"type": self.type, "function": self.function.for_template()}
        return known if self.id is None else {"id": self.id, **known}


class ChatMessage(Body):
    """One message; additional fields are passed to the chat template unchanged."""

    READS_EXTRAS = True

    role: str
    content: str | Parts | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's and OpenRouter's name of `reasoning_content`
    refusal: str | None = None

    @property
    def text(self) -> str:
        """The content, or the refusal if there is no content; text parts are joined by line ends."""
        content = self.content or self.refusal
        return "\n".join(map(_text_of, content)) if isinstance(content, list) else content or ""

    @property
    def thought(self) -> str:
        """The reasoning. Raises InvalidRequestError if `reasoning` and `reasoning_content` disagree."""
        if self.reasoning and self.reasoning_content and self.reasoning != self.reasoning_content:
            raise InvalidRequestError(
                "`messages.reasoning` and `messages.reasoning_content` disagree; send one of them", "messages"
            )
        return self.reasoning_content or self.reasoning or ""

    @property
    def num_chars(self) -> int:
        """The number of characters in the text and in the arguments of tool calls."""
        arguments = (call.function.arguments for call in self.tool_calls or ())
        return len(self.text) + sum(len(each) for each in arguments if isinstance(each, str))

    def unread_by(self, words: Collection[str]) -> Iterator[str]:
        """Yield the given fields that a chat template does not read. `words`: the words in its source."""
        for name, value in (self.model_extra or {}).items():
            if value not in (None, "", [], {}) and name not in LINKS and name not in words:
                yield name
        if self.thought and not any(name in words for name in THOUGHT_NAMES):
            yield "reasoning" if self.reasoning else "reasoning_content"

    def for_template(self) -> dict[str, Any]:
        """Return the message for a chat template: `content` is one string, arguments are objects.

        Parsing the arguments of tool calls takes up to 2 us per character.
        """
        message = {**(self.model_extra or {}), "role": self.role, "content": self.text}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if thought := self.thought:
            message |= dict.fromkeys(THOUGHT_NAMES, thought)
        return message


def _text_of(part: TextPart | RefusalPart) -> str:
    return part.text if isinstance(part, TextPart) else part.refusal


def arguments_object(arguments: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a tool call's arguments as an object. OpenAI's clients send a JSON string, maybe truncated."""
    return arguments_in_history(arguments or "") if isinstance(arguments, str | None) else dict(arguments)


class FunctionSpec(Body):
    READS_EXTRAS = True

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    READS_EXTRAS = True

    type: Literal["function"]
    function: FunctionSpec

    def for_template(self) -> dict[str, Any]:
        """Return the tool for a chat template, without `strict`."""
        return self.model_dump(exclude_none=True, exclude={"function": {"strict"}})


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    """`tool_choice` that names the function to call."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, fail_fast=True)]


def choice_tag(choice: object) -> str:
    """Return the union tag of a tool choice. An unknown type counts as a named tool, whose error names it."""
    return "allowed tool" if type_of(choice) == "allowed_tools" else "named tool"


class AllowedToolChoice(Body):
    """`tool_choice` that lists the functions that the model may call."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = (
    Literal["none", "auto", "required"]
    | Annotated[
        Annotated[NamedTool, Tag("named tool")] | Annotated[AllowedToolChoice, Tag("allowed tool")],
        Discriminator(choice_tag),
    ]
)
Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class ChatBody(OpenAIBody):
    """Body of `POST /v1/chat/completions`."""

    REFUSED = CHAT_REFUSED
    INERT = CHAT_INERT
    INSTEAD = CHAT_INSTEAD

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    reasoning_effort: str | None = None


class TokenizeBody(Body):
    """Body of `POST /tokenize`: exactly one of `prompt` and `messages`."""

    REFUSED = TOKENIZE_REFUSED
    INERT = TOKENIZE_INERT

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] | None = None
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_source(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give exactly one of `prompt` and `messages`")
        return self


class DetokenizeBody(Body):
    """Body of `POST /detokenize`."""

    REFUSED = DETOKENIZE_REFUSED

    model: str | None = None
    tokens: TokenIds
