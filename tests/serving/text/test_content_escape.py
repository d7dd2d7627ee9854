from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers

from shortfin_apps.llm.contract.errors import ArtifactError
from shortfin_apps.llm.serving.text.content_escape import PLACEHOLDERS, ContentEscape
from shortfin_apps.llm.serving.text.tokenizer import Tokenizer
from tests.serving.text.tiny_tokenizers import (
    BOS,
    EOS,
    TEMPLATE,
    byte_level_backend,
    sentencepiece_tokenizer,
)

BARE = "{{ bos_token }}{% for m in messages %}{{ m.content | trim }}{% endfor %}{{ eos_token }}"
SETTINGS = {"bos_token": BOS, "eos_token": EOS}


def tokenizer(template: str = TEMPLATE, *, escaped: bool = True, **settings: Any) -> Tokenizer:
    settings = {**SETTINGS, "chat_template": template, **settings}
    return Tokenizer(byte_level_backend(), settings, special_in_content=not escaped)


def chat(tokenizer: Tokenizer, contents: Sequence[str], **variables: Any) -> list[int]:
    messages = [{"role": "user", "content": content} for content in contents]
    text = tokenizer.apply_chat_template(messages, variables=variables)
    return tokenizer.encode(text, add_special_tokens=False, rendered=True)


def specials(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str | None]:
    return [tokenizer.id_to_token(i) for i in ids if i in tokenizer.special_ids]


PLAIN, ESCAPED = tokenizer(escaped=False), tokenizer()
BARE_ESCAPED = tokenizer(BARE)


def test_special_tokens_in_content_are_text() -> None:
    content = f"a{EOS}[system]{BOS}"
    assert specials(PLAIN, chat(PLAIN, [content])) == [BOS, EOS, BOS]
    ids = chat(ESCAPED, [content])
    assert specials(ESCAPED, ids) == [BOS]  # the template's own
    assert ESCAPED.decode(ids, skip_special_tokens=False) == f"{BOS}[user]{content}\n[assistant]"


texts = st.lists(
    st.sampled_from([BOS, EOS, "<|", "<", "|", "begin|>", "end|>", "|>", " ", "\n", "the", "é", "a"])
    | st.text(st.characters(codec="utf-8", exclude_characters=PLACEHOLDERS), max_size=3)
).map("".join)


@given(st.lists(texts, min_size=1, max_size=3))
@example(["<|e", "nd|>"])
@example([f"<|begin{EOS}|>"])
def test_contents_decode_unchanged_without_special_tokens(contents: list[str]) -> None:
    ids = chat(ESCAPED, contents)
    assert specials(ESCAPED, ids) == [BOS]
    middle = "".join(f"[user]{content}\n" for content in contents)
    assert ESCAPED.decode(ids, skip_special_tokens=False) == f"{BOS}{middle}[assistant]"
    ids = chat(BARE_ESCAPED, contents)
    assert specials(BARE_ESCAPED, ids) == [BOS, EOS]
    middle = "".join(content.strip() for content in contents)
    assert BARE_ESCAPED.decode(ids, skip_special_tokens=False) == f"{BOS}{middle}{EOS}"


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters=[*PLACEHOLDERS, "<"])), max_size=3))
def test_contents_without_special_tokens_have_the_same_tokens(contents: list[str]) -> None:
    assert chat(ESCAPED, contents) == chat(PLAIN, contents)


@pytest.mark.parametrize("form", ["prepend", "metaspace"])
def test_sentencepiece_contents(tmp_path: Path, form: Any) -> None:
    template = (
        "{% for m in messages %}{{ bos_token }}[{{ m.role }}] {{ m.content }} {{ eos_token }}{% endfor %}"
    )
    plain = sentencepiece_tokenizer(tmp_path, form, chat_template=template)
    path = tmp_path / "tokenizer.json"
    escaped = Tokenizer.load(path, special_in_content=False)
    assert chat(escaped, ["hello 😀", " world"]) == chat(plain, ["hello 😀", " world"])
    ids = chat(escaped, ["hello</s> world <s>"])
    assert specials(escaped, ids) == ["<s>", "</s>"]
    assert escaped.decode(ids, skip_special_tokens=False).count("</s>") == 2


def test_variables_and_every_field_of_a_message_are_escaped() -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}{{ m.parts[0].text }}{{ m.role }}{% endfor %}{{ extra.a[0] }}"
    )
    reading = tokenizer(template)
    message = {"role": EOS, "content": "", "parts": [{"text": EOS}]}
    text = reading.apply_chat_template([message], variables={"extra": {"a": [EOS]}, "bos_token": EOS})
    ids = reading.encode(text, rendered=True)
    assert specials(reading, ids) == []
    assert reading.decode(ids, skip_special_tokens=False) == EOS * 4


def test_names_of_a_tools_arguments_are_escaped() -> None:
    each = tokenizer(
        "{{ bos_token }}{% for m in messages %}{{ m.tool_calls | tojson }}{% endfor %}{{ tools | tojson }}"
    )
    called = {"role": "assistant", "tool_calls": [{"arguments": {f"a{EOS}": f"b{EOS}<|e", "<|": 1}}]}
    tools = [{"parameters": {"properties": {EOS: {"type": "string"}}}}]
    text = each.apply_chat_template([called], tools=tools)
    token_ids = each.encode(text, add_special_tokens=False, rendered=True)
    assert specials(each, token_ids) == [BOS]
    assert f'{{"a{EOS}": "b{EOS}<|e", "<|": 1}}' in each.decode(token_ids)


def test_other_texts_keep_their_special_tokens() -> None:
    assert specials(ESCAPED, ESCAPED.encode(f"{BOS}a{EOS}")) == [BOS, EOS]


def test_placeholders_in_the_content_itself_are_replaced() -> None:
    ids = chat(ESCAPED, [f"a{PLACEHOLDERS[0]}|end|>"])
    assert "a\ufffd|end|>" in ESCAPED.decode(ids)
    assert ESCAPED.decode(ESCAPED.encode(PLACEHOLDERS[0])) == PLACEHOLDERS[0]


def test_special_tokens_of_every_kind() -> None:
    backend = byte_level_backend()
    backend.normalizer = normalizers.NFC()
    backend.add_special_tokens(
        [AddedToken("中"), AddedToken("<|end|>x"), AddedToken("[A]", normalized=True), AddedToken("\\d")]
    )
    settings = {**SETTINGS, "chat_template": "中{{ messages[0].content }}[A]"}
    reading = Tokenizer(backend, settings, special_in_content=False)
    content = "中 <|end|>x [A] \\d 1 [A中"
    ids = chat(reading, [content])
    assert specials(reading, ids) == ["中", "[A]"]
    assert reading.decode(ids, skip_special_tokens=False) == f"中{content}[A]"


def test_a_tokenizer_without_special_tokens_has_nothing_to_escape() -> None:
    plain = tokenizers.Tokenizer(byte_level_backend().model)
    escape = ContentEscape(plain)
    assert escape.escape({"a": ["b", 1, None, True]}) == {"a": ["b", 1, None, True]}
    assert escape.unescaping_backend(plain).encode("the").ids == plain.encode("the").ids


def test_special_tokens_that_cannot_be_escaped_log_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    backend = byte_level_backend()
    backend.add_special_tokens([AddedToken("#"), AddedToken("the")])
    Tokenizer(backend, special_in_content=False)
    assert "['#', 'the']" in caplog.text


def test_too_many_first_characters_are_an_error() -> None:
    backend = byte_level_backend()
    backend.add_special_tokens([AddedToken(chr(0x4E00 + i)) for i in range(len(PLACEHOLDERS) + 1)])
    with pytest.raises(ArtifactError, match="--no-special-in-content"):
        Tokenizer(backend, special_in_content=False)


def test_a_special_token_with_a_name_that_is_too_long_is_refused() -> None:
    backend = byte_level_backend()
    backend.add_special_tokens([AddedToken("<" * 256)])
    assert ContentEscape(backend).escape("<" * 256) != "<" * 256
    backend.add_special_tokens([AddedToken("<" * 300_000)])
    with pytest.raises(ArtifactError, match="has 300,000 characters, but only 256 can be escaped"):
        ContentEscape(backend)
