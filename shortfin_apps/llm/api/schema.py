"""The bodies that routes accept. Types are strict; ranges are SamplingParams' matter, sizes api/limits.py's.

Fields that nobody here knows are ignored, unless a `REFUSED` table names them: those would change
the answer, so they are refused, unless they hold a value that changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from shortfin_apps.llm.errors import InvalidRequestError

Number = Annotated[float, Field(allow_inf_nan=False)]
# One wrong entry is enough to refuse a list; to collect millions would take seconds.
TokenIds = Annotated[list[int], Field(fail_fast=True)]
Strings = Annotated[list[str], Field(fail_fast=True)]
TokenIdLists = Annotated[list[TokenIds], Field(fail_fast=True)]


class Body(BaseModel):
    """Base of all bodies."""

    model_config = ConfigDict(strict=True, extra="allow")

    REFUSED: ClassVar[Mapping[str, tuple[object, ...]]] = {}  # field: values that change nothing

    def refuse_unsupported(self, prefix: str = "") -> None:
        """Raises InvalidRequestError for a field of `REFUSED` that asks for something."""
        for name, harmless in self.REFUSED.items():
            value = (self.model_extra or {}).get(name)
            if value is not None and value not in harmless:
                raise InvalidRequestError(
                    f"`{prefix}{name}` is not supported by this server; leave it out", prefix + name
                )


class SamplingBody(Body):
    """`sampling_params` of `/generate`: upstream's names and SGLang's."""

    REFUSED = {
        "frequency_penalty": (0,),
        "presence_penalty": (0,),
        "repetition_penalty": (1,),
        "logit_bias": ({},),
        "regex": ("",),
        "json_schema": ("",),
        "ebnf": ("",),
        "structural_tag": ("",),
        "stop_regex": ([], ""),
        "custom_params": ({},),
        "beam_search": (False,),
        "use_beam_search": (False,),
        "best_of": (1,),
    }

    max_completion_tokens: int | None = None
    max_new_tokens: int | None = None
    max_tokens: int | None = None
    min_new_tokens: int | None = None
    min_tokens: int | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: int | None = None
    min_p: Number | None = None
    n: int | None = None
    num_beams: int | None = None
    seed: int | None = None
    sampling_seed: int | None = None
    stop: str | Strings | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None


class GenerateBody(Body):
    """`POST /generate`: one of `text` and `input_ids`, each a single prompt or a batch."""

    REFUSED = {
        "image_data": ([],),
        "video_data": ([],),
        "audio_data": ([],),
        "input_embeds": (),
        "lora_path": (),
        "token_ids_logprob": ([],),
        "custom_logit_processor": (),
        "return_hidden_states": (False,),
        "session_params": (),
    }

    text: str | Strings | None = None
    input_ids: TokenIds | TokenIdLists | None = None
    sampling_params: SamplingBody | list[SamplingBody] | None = None
    rid: str | Strings | None = None
    return_input_ids: bool | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    return_text_in_logprobs: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    user: str | None = None
    timeout_s: Number | None = None
    stream: bool | None = None


class AbortBody(Body):
    """`POST /abort`: the id of a request, or several."""

    rid: str | list[str]


class StreamOptions(Body):
    include_usage: bool | None = None


class OpenAIBody(Body):
    """What `/v1/completions` and `/v1/chat/completions` share, vLLM's extra fields included."""

    REFUSED = {
        "frequency_penalty": (0,),
        "presence_penalty": (0,),
        "repetition_penalty": (1,),
        "logit_bias": ({},),
        "best_of": (1,),
        "suffix": ("",),
        "use_beam_search": (False,),
        "prompt_logprobs": (),
        "allowed_token_ids": ([],),
        "bad_words": ([],),
        "guided_json": (),
        "guided_regex": (),
        "guided_choice": (),
        "guided_grammar": (),
        "structured_outputs": (),
        "truncate_prompt_tokens": (),
    }

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: int | None = None
    min_p: Number | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | Strings | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    user: str | None = None
    timeout_s: Number | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class CompletionBody(OpenAIBody):
    """`POST /v1/completions`."""

    prompt: str | TokenIds | Strings | TokenIdLists
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None


class TextPart(Body):
    type: Literal["text"]
    text: str


class ChatMessage(Body):
    """One message; fields beyond these reach the chat template as they are."""

    role: str
    content: str | list[TextPart] | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it: `content` is one string."""
        content = self.content
        text = "\n".join(part.text for part in content) if isinstance(content, list) else content
        return {**(self.model_extra or {}), "role": self.role, "content": text or ""}


class ChatBody(OpenAIBody):
    """`POST /v1/chat/completions`."""

    REFUSED = {
        **OpenAIBody.REFUSED,
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "web_search_options": (),
        "continue_final_message": (False,),
    }

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeBody(Body):
    """`POST /tokenize`: one of `prompt` and `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_source(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give exactly one of `prompt` and `messages`")
        return self


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: TokenIds


BODIES: tuple[type[Body], ...] = (
    SamplingBody,
    GenerateBody,
    AbortBody,
    StreamOptions,
    CompletionBody,
    TextPart,
    ChatMessage,
    ChatBody,
    TokenizeBody,
    DetokenizeBody,
)
FIELD_NAMES = frozenset(name for body in BODIES for name in body.model_fields)
