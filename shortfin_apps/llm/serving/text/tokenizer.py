"""Converts text to token ids and back, and chat messages to text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import tokenizers

from shortfin_apps.llm.contract.errors import ArtifactError, InvalidRequestError, is_library_error
from shortfin_apps.llm.contract.tokenizer_config import NAMED_TOKENS
from shortfin_apps.llm.lone_surrogates import encodable
from shortfin_apps.llm.serving.text.chat_template import pick_template
from shortfin_apps.llm.serving.text.content_escape import ContentEscape
from shortfin_apps.llm.serving.text.message_roles import MessageRoles
from shortfin_apps.llm.serving.text.rendering import BoundedTemplate, TemplateLimitError
from shortfin_apps.llm.serving.text.token_length import TokenLength

LONG_TEXT = 2048  # characters to encode or tokens to decode; such a text takes 1 to 2 ms
REPLACEMENT = "\ufffd"  # a decoder's output for invalid or incomplete UTF-8
NOT_GIVEN = {"tools": None, "documents": None}  # variables that default to None, as in transformers

# Tools for trial renderings of the tool template.
TRIAL_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {"name": "f", "description": "f", "parameters": {"type": "object", "properties": {}}},
}
BARE_TOOL: Mapping[str, Any] = {"type": "function", "function": {"name": "f"}}
NOTHING_SAID: Mapping[str, Any] = {"description": "", "parameters": {"type": "object", "properties": {}}}


class Tokenizer:
    """A `tokenizers` backend with its special tokens and chat template.

    `settings`: content of a Hugging Face `tokenizer_config.json`; `generation`: content of a
    `generation_config.json`, of which only `eos_token_id` is used. Without `special_in_content`, special
    tokens written in message contents are tokenised as plain text. Immutable and thread-safe.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        settings: Mapping[str, Any] | None = None,
        generation: Mapping[str, Any] | None = None,
        *,
        special_in_content: bool = True,
    ) -> None:
        settings, generation = settings or {}, generation or {}
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        named = {name: _token_text(settings.get(name)) for name in NAMED_TOKENS}
        self.bos_token, self.eos_token = named["bos_token"], named["eos_token"]
        given = {name: text for name, text in named.items() if text is not None}
        self._token_names = {"bos_token": "", "eos_token": ""} | given
        self.eos_token_ids = self._find_eos(generation.get("eos_token_id"))
        source = pick_template(settings.get("chat_template"))
        self.tool_template_source = pick_template(settings.get("chat_template"), "tool_use")
        self._template = self._tool_template = None if source is None else BoundedTemplate(source)
        if self.tool_template_source is not None and self.tool_template_source != source:
            self._tool_template = BoundedTemplate(self.tool_template_source)
        self._roles = MessageRoles(self._trial(self._template, None))
        self._tool_roles = MessageRoles(self._trial(self._tool_template, [TRIAL_TOOL]))
        self._escape = None if special_in_content else ContentEscape(backend)
        self._rendered_backend = backend if self._escape is None else self._escape.unescaping_backend(backend)
        self._token_texts: dict[int, str] = {}
        self._lone_texts: dict[int, str] = {}
        self._token_length = TokenLength(backend)

    @classmethod
    def load(
        cls,
        tokenizer_json: Path,
        tokenizer_config_json: Path | None = None,
        *,
        special_in_content: bool = True,
    ) -> Tokenizer:
        """Read the files of a Hugging Face tokenizer. Raises ArtifactError.

        `tokenizer_config_json` defaults to `<stem>_config.json` next to `tokenizer_json`, if that file
        exists. Its directory may also have `generation_config.json`, `chat_template.jinja`,
        `additional_chat_templates/`, and `special_tokens_map.json` for tokens missing from the config.
        """
        path = tokenizer_config_json or tokenizer_json.with_name(f"{tokenizer_json.stem}_config.json")
        if tokenizer_config_json is not None and not path.exists():
            raise ArtifactError(f"{path}: no such file; it should be the tokenizer's `tokenizer_config.json`")
        settings = read_json_object(path)
        if (template := _read_template(path.with_name("chat_template.jinja"))) is not None:
            settings["chat_template"] = template
        settings = _with_templates_of(path.parent, settings)
        named = read_json_object(path.with_name("special_tokens_map.json"))
        for name in NAMED_TOKENS:
            if settings.get(name) is None:
                settings[name] = named.get(name)
        generation = read_json_object(path.with_name("generation_config.json"))
        backend = _load_backend(tokenizer_json)
        try:
            return cls(backend, settings, generation, special_in_content=special_in_content)
        except BaseException as error:
            if is_library_error(error):
                raise ArtifactError(f"{tokenizer_json}: not usable ({error})") from error
            raise

    @cached_property
    def vocab_size(self) -> int:
        """The highest token id plus one."""
        return max(self.token_ids, default=-1) + 1

    @cached_property
    def token_ids(self) -> frozenset[int]:
        """Every token id of the vocabulary, which may have gaps."""
        return frozenset(self._backend.get_vocab(with_added_tokens=True).values())

    def has_the_tokens_of(self, other: Tokenizer) -> bool:
        """Return True if both vocabularies map the same token strings to the same ids."""
        vocabularies = (each._backend.get_vocab(with_added_tokens=True) for each in (self, other))
        return next(vocabularies) == next(vocabularies)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens, which `skip_special_tokens` omits."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """Ids of special tokens by token string."""
        added = self._backend.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items() if token.special}

    @cached_property
    def tag_tokens(self) -> Mapping[str, int]:
        """Ids by token string of the tokens that never match as text in a grammar.

        llguidance counts every added token of the form `<...>` among the special ones. Qwen 3 has `</think>`
        and `<tool_call>` as such tokens, which `skip_special_tokens` keeps.
        """
        added = self._backend.get_added_tokens_decoder()
        return {
            token.content: token_id
            for token_id, token in added.items()
            if token.special or (token.content.startswith("<") and token.content.endswith(">"))
        }

    @cached_property
    def split_names(self) -> frozenset[str]:
        """Strings of the added tokens, at which every text is split before it is tokenised."""
        return frozenset(token.content for token in self._backend.get_added_tokens_decoder().values())

    @cached_property
    def template_words(self) -> frozenset[str]:
        """Words in the source of the tool template, among them the field names that the template reads."""
        return frozenset(re.findall(r"\w+", self.tool_template_source or ""))

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True, rendered: bool = False) -> list[int]:
        """Return the token ids of `text`. Callers must set `rendered` for output of `apply_chat_template`.

        Lone surrogates become U+FFFD. If `text` already begins with BOS, `add_special_tokens` adds no second
        BOS. A long text is encoded as a batch of one, because the library releases the GIL only for batches;
        a short text is not, because a batch goes through the library's thread pool. Raises
        InvalidRequestError when the library fails, e.g. on a regular expression that takes too long.
        """
        text = encodable(text)
        backend = self._rendered_backend if rendered else self._backend
        try:
            token_ids = _encode(backend, text, add_special_tokens)
            doubled = add_special_tokens and token_ids[:2] == [self._added_first] * 2
        except BaseException as error:
            if is_library_error(error):
                raise InvalidRequestError(f"the tokenizer cannot encode this text: {error}") from error
            raise
        return token_ids[1:] if doubled else token_ids

    @cached_property
    def _added_first(self) -> int | None:
        """Id of the token that `add_special_tokens` puts first, usually BOS; None if there is none."""
        plain = _encode(self._backend, "a", add_special_tokens=False)
        framed = _encode(self._backend, "a", add_special_tokens=True)
        return framed[0] if framed[:1] != plain[:1] else None

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`, skipping unknown ids. Raises ArtifactError when the library fails.

        A long list is decoded as a batch of one, for the same reason as in `encode`.
        """
        try:
            return _decode(self._backend, token_ids, skip_special_tokens)
        except BaseException as error:
            if is_library_error(error):
                raise ArtifactError(f"the tokenizer cannot decode these tokens: {error}") from error
            raise

    def to_json(self) -> str:
        """Return the content of a `tokenizer.json` for this tokenizer."""
        text: str = self._backend.to_str()
        return text

    def fewest_tokens(self, text: str) -> int:
        """Return a lower bound of the number of tokens of `text`, without tokenising it."""
        return self._token_length.fewest_tokens(text)

    def token_text(self, token_id: int) -> str:
        """Return the text of a token (also a special one) as it is in the middle of a text.

        SentencePiece's leading space is kept. A token with part of a character gives U+FFFD. Cached, because
        log-probabilities need the texts of many tokens.
        """
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self._text_after_anchor(token_id)
        return text

    def lone_text(self, token_id: int) -> str:
        """Return the text of one token decoded alone. Cached, because detokenizers need it often."""
        text = self._lone_texts.get(token_id)
        if text is None:
            text = self._lone_texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return text

    def _text_after_anchor(self, token_id: int) -> str:
        before = self.decode(self._anchor, skip_special_tokens=False)
        text = self.decode([*self._anchor, token_id], skip_special_tokens=False)
        if text.startswith(before):
            return text[len(before) :]
        return self.decode([token_id], skip_special_tokens=False)

    @cached_property
    def _anchor(self) -> list[int]:
        """A token to decode before another token: decoders treat the first token of a text differently."""
        return self.encode("a", add_special_tokens=False)[-1:]

    def names(self, token_ids: Sequence[int]) -> list[str | None]:
        """Return the token string of each id, or None for an unknown id."""
        return [self.id_to_token(token_id) for token_id in token_ids]

    def id_to_token(self, token_id: int) -> str | None:
        """Return the token string of an id, or None for an unknown id."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def prepare_templates(self) -> None:
        """Start workers that render the chat templates. Raises ArtifactError if one does not compile."""
        for template in dict.fromkeys((self._template, self._tool_template)):
            if template is not None:
                template.prepare()

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Render messages (`role`, `content`, ...) with the chat template; with `tools`, the tool template.

        Messages are adapted to the roles that the template knows (`serving/text/message_roles.py`). Callers
        must encode the result with `rendered=True` and `add_special_tokens=False`, because the template adds
        special tokens itself. Blocks while another process renders, for a second or more with a bad template.
        Raises InvalidRequestError if the model has no template or the template fails, and OverloadedError if
        the process cannot be reached.
        """
        template, roles = (self._tool_template, self._tool_roles) if tools else (self._template, self._roles)
        if template is None:
            raise InvalidRequestError(
                "this model has no chat template; use /v1/completions or /generate", "messages"
            )
        variables = {**NOT_GIVEN, **(variables or {}), **({"tools": self._told(tools)} if tools else {})}
        refusal: InvalidRequestError | None = None
        for adapted in roles.adapted(messages):
            try:
                return self._rendered(template, adapted, add_generation_prompt, variables)
            except TemplateLimitError:  # other forms of the messages would reach the limit, too
                raise
            except InvalidRequestError as error:
                refusal = error
        assert refusal is not None
        raise refusal

    def _told(self, tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return `tools`, with empty values for missing function fields if the template needs the fields."""
        functions = [tool.get("function") or {} for tool in tools]
        if all(function.keys() >= NOTHING_SAID.keys() for function in functions) or self._takes_bare_tools:
            return list(tools)
        whole = ({**NOTHING_SAID, **function} for function in functions)
        return [{**tool, "function": function} for tool, function in zip(tools, whole, strict=True)]

    @cached_property
    def _takes_bare_tools(self) -> bool:
        try:
            self._trial(self._tool_template, [BARE_TOOL])([{"role": "user", "content": "hi"}])
        except TemplateLimitError:
            raise
        except InvalidRequestError:
            return False
        return True

    def _rendered(
        self,
        template: BoundedTemplate,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        if self._escape is not None:
            messages, variables = self._escape.escape(list(messages)), self._escape.escape(variables)
        return template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            variables={**self._token_names, **variables},
        )

    def _trial(
        self, template: BoundedTemplate | None, tools: Sequence[Mapping[str, Any]] | None
    ) -> Callable[[Sequence[Mapping[str, Any]]], str]:
        """Return a function that renders messages, to try what the template supports.

        Without tools, callers must pass None, not an empty list.
        """

        def render(messages: Sequence[Mapping[str, Any]]) -> str:
            assert template is not None, "`apply_chat_template` checks it"
            variables = {**self._token_names, "tools": tools, "documents": None}
            return template.render(messages, add_generation_prompt=False, variables=variables)

        return render

    def _find_eos(self, generation_eos: object) -> frozenset[int]:
        token_ids = generation_eos if isinstance(generation_eos, list) else [generation_eos]
        # Some configs say -1 for "no EOS token"; with this id, the grammar library refuses every grammar.
        found = {i for i in token_ids if isinstance(i, int) and not isinstance(i, bool) and i >= 0}
        if self.eos_token is not None:
            token_id = self._backend.token_to_id(self.eos_token)
            if token_id is None:
                raise ArtifactError(f"`eos_token` {self.eos_token!r} is not in the tokenizer's vocabulary")
            found.add(token_id)
        return frozenset(found)


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`, empty if the file does not exist. Raises ArtifactError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(value, dict):
        raise ArtifactError(f"{path}: must hold a JSON object")
    return value


def _with_templates_of(directory: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Return `settings` with the templates in `additional_chat_templates/`. Raises ArtifactError."""
    files = sorted((directory / "additional_chat_templates").glob("*.jinja"))
    if not files:
        return settings
    try:
        named = [{"name": file.stem, "template": file.read_text(encoding="utf-8")} for file in files]
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{files[0].parent}: a template cannot be read ({error})") from error
    template = settings.get("chat_template")
    default = [{"name": "default", "template": template}] if isinstance(template, str) else []
    listed = template if isinstance(template, list) else default
    return settings | {"chat_template": [*listed, *named]}


def _load_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.exists():
        raise ArtifactError(f"{path}: no such file; `shortfin-llm build` makes one")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except BaseException as error:
        if is_library_error(error):
            raise ArtifactError(f"{path}: not a `tokenizers` file ({error})") from error
        raise


def _read_template(path: Path) -> str | None:
    """Return the text of a `chat_template.jinja`, or None if there is none. Raises ArtifactError."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path}: cannot be read as a chat template ({error})") from error


def _encode(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    if len(text) < LONG_TEXT:
        token_ids: list[int] = backend.encode(text, add_special_tokens=add_special_tokens).ids
        return token_ids
    [encoding] = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return list(encoding.ids)


def _decode(backend: tokenizers.Tokenizer, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
    if len(token_ids) < LONG_TEXT:
        return str(backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))
    [text] = backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
    return str(text)


def _token_text(token: object) -> str | None:
    """Return the token string of a value in `tokenizer_config.json`, or None: the value or its `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def first_out_of_range(token_ids: Sequence[int], vocab_size: int) -> int | None:
    """Return the first of `token_ids` that is not in [0, vocab_size), or None."""
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):  # much faster than searching
        return None
    return next((i for i in token_ids if not 0 <= i < vocab_size), None)


@lru_cache(maxsize=64)
def bad_word_ids(tokenizer: Tokenizer, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of all words: each at the start of a text, and after a space.

    As in vLLM, the sequence after a space is omitted if the space is a separate token, because banning the
    word's last token after the space would ban the same token elsewhere. Cached, because all prompts of a
    batch may share words.
    """
    return tuple(dict.fromkeys(ids for word in words for ids in _sequences(tokenizer, word) if ids))


def _sequences(tokenizer: Tokenizer, word: str) -> list[tuple[int, ...]]:
    plain = tuple(tokenizer.encode(word, add_special_tokens=False))
    spaced = tuple(tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
    is_another_token = len(spaced) == len(plain) and spaced[:1] != plain[:1]
    return [plain, spaced] if is_another_token else [plain]
