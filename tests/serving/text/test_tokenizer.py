from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, get_args

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from shortfin_apps.llm.contract.errors import ArtifactError, InvalidRequestError
from shortfin_apps.llm.serving.text.tokenizer import Tokenizer, first_out_of_range
from tests.serving.text.tiny_tokenizers import (
    BOS,
    EOS,
    SentencePieceForm,
    byte_level_backend,
    byte_level_tokenizer,
    sentencepiece_tokenizer,
)

TOKENIZER = byte_level_tokenizer()
PATIENCE_S = 60
MESSAGES = [{"role": "user", "content": "hé"}]


@given(st.text())
def test_text_survives_the_round_trip(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@pytest.mark.parametrize("work", ["encode", "decode"])
def test_long_texts_release_the_gil(work: str) -> None:
    text = "0123456789" * 20_000
    ids = TOKENIZER.encode(text)
    began, done = threading.Event(), threading.Event()

    def run() -> None:
        began.set()
        assert (TOKENIZER.encode(text) == ids) if work == "encode" else (TOKENIZER.decode(ids) == text)
        done.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert began.wait(PATIENCE_S)
    turns = 0
    while thread.is_alive():
        time.sleep(0)  # gives the interpreter away; what holds it is not interrupted
        turns += 1
    assert done.is_set()
    assert turns > 20, "one or two, if it is held"


@given(text=st.text(), begins=st.integers(0, 3))
def test_bos_is_not_put_before_a_text_that_begins_with_it(text: str, begins: int) -> None:
    backend = byte_level_backend()
    bos = backend.token_to_id(BOS)
    backend.post_processor = processors.TemplateProcessing(single=[BOS, "$A"], special_tokens=[(BOS, bos)])
    tokenizer = Tokenizer(backend)
    plain = TOKENIZER.encode(text)
    assert tokenizer.encode(BOS * begins + text) == [bos] * max(begins, 1) + plain
    assert tokenizer.encode(BOS * begins + text, add_special_tokens=False) == [bos] * begins + plain
    assert TOKENIZER.encode(BOS * begins + text) == [bos] * begins + plain


def test_lone_surrogates_become_the_replacement_character() -> None:
    assert TOKENIZER.decode(TOKENIZER.encode("a\ud800b")) == "a\ufffdb"
    assert TOKENIZER.decode(TOKENIZER.encode("\ud83d\ude00")) == "😀"


def test_special_tokens_are_skipped_on_request() -> None:
    ids = TOKENIZER.encode(f"a{EOS}b")
    assert TOKENIZER.decode(ids) == "ab"
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == f"a{EOS}b"


def test_unknown_ids_decode_to_nothing() -> None:
    assert TOKENIZER.decode([TOKENIZER.vocab_size + 5]) == ""
    assert TOKENIZER.id_to_token(-1) is None


@pytest.mark.parametrize("form", get_args(SentencePieceForm))
def test_a_tokens_text_is_as_inside_a_text(tmp_path: Path, form: SentencePieceForm) -> None:
    tokenizer = sentencepiece_tokenizer(tmp_path, form)
    ids = tokenizer.encode("hello world 12!")
    assert "".join(map(tokenizer.token_text, ids)) == "<s> hello world 12!"
    assert [tokenizer.token_text(i) for i in tokenizer.encode("the")] == ["<s>", " the"]


def test_a_tokens_text_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_level_tokenizer()
    [token_id] = tokenizer.encode("the")
    assert tokenizer.token_text(token_id) == "the"
    monkeypatch.setattr(tokenizer, "decode", None)
    assert tokenizer.token_text(token_id) == "the"


def test_token_texts_of_a_vocabulary_without_letters() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"1": 0, "2": 1}, unk_token="1"))
    assert Tokenizer(backend).token_text(1) == " 2"
    empty = tokenizers.Tokenizer(models.BPE())
    assert Tokenizer(empty).token_text(1) == ""


def test_truncation_and_padding_are_disabled() -> None:
    backend = byte_level_backend()
    backend.enable_truncation(max_length=2)
    backend.enable_padding(length=64)
    assert len(Tokenizer(backend).encode("xyxyxy")) == 6


def test_eos_ids_come_from_both_files() -> None:
    tokenizer = Tokenizer(byte_level_backend(), {"eos_token": EOS}, {"eos_token_id": [3, 4, -1, True, None]})
    eos = tokenizer.encode(EOS)
    assert tokenizer.eos_token_ids == {3, 4, *eos}


def test_unknown_eos_token_is_refused() -> None:
    with pytest.raises(ArtifactError, match="eos_token"):
        Tokenizer(byte_level_backend(), {"eos_token": "<nope>"})


def test_chat_template_renders_messages() -> None:
    assert TOKENIZER.apply_chat_template(MESSAGES) == f"{BOS}[user]hé\n[assistant]"
    assert TOKENIZER.apply_chat_template(MESSAGES, add_generation_prompt=False) == f"{BOS}[user]hé\n"


def test_a_failing_template_is_an_error_in_messages() -> None:
    with pytest.raises(InvalidRequestError, match="no tools here") as caught:
        TOKENIZER.apply_chat_template([{"role": "tool", "content": ""}])
    assert caught.value.param == "messages"


def test_without_a_template_the_error_names_other_routes() -> None:
    with pytest.raises(InvalidRequestError, match="/v1/completions"):
        byte_level_tokenizer(chat_template=None).apply_chat_template(MESSAGES)


@pytest.mark.parametrize(
    ("template", "rendered"),
    [
        ("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}", "hé"),
        ("{% for m in messages %}{{ m.role }}{% break %}{% endfor %}", "user"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "hé"}]'),
        ("  {% if true %}\nx\n  {% endif %}\n", "x\n"),
        ("{{ strftime_now('%%') }}", "%"),
        ([{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}], "d"),
    ],
)
def test_templates_have_the_expected_features(template: object, rendered: str) -> None:
    assert byte_level_tokenizer(chat_template=template).apply_chat_template(MESSAGES) == rendered


def test_templates_run_in_a_sandbox() -> None:
    tokenizer = byte_level_tokenizer(chat_template="{{ ''.__class__.__mro__ }}")
    with pytest.raises(InvalidRequestError, match="unsafe"):
        tokenizer.apply_chat_template(MESSAGES)


def test_a_template_that_does_not_compile_is_an_artefact_error() -> None:
    with pytest.raises(ArtifactError, match="chat template"):
        byte_level_tokenizer(chat_template="{% for %}")


def test_load_reads_the_neighbouring_files(tmp_path: Path) -> None:
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": BOS}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}!")
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    assert tokenizer.eos_token_ids == {7}
    assert tokenizer.apply_chat_template([]) == f"{BOS}!"


@pytest.mark.parametrize("content", [None, "{}", "not json"])
def test_a_bad_tokenizer_file_is_named(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ArtifactError, match=r"tokenizer\.json"):
        Tokenizer.load(path)


@pytest.mark.parametrize("content", ["[]", "{", "\xff"])
def test_a_bad_settings_file_is_named(tmp_path: Path, content: str) -> None:
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ArtifactError, match=r"tokenizer_config\.json"):
        Tokenizer.load(tmp_path / "tokenizer.json")


def make_folder(path: Path) -> None:
    path.mkdir()


def write_bytes(path: Path) -> None:
    path.write_bytes(b"{{ \xff }}")


@pytest.mark.parametrize("damage", [make_folder, write_bytes])
def test_a_template_file_that_is_no_text_is_named(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    (tmp_path / "tokenizer.json").write_text(TOKENIZER.to_json())
    damage(tmp_path / "chat_template.jinja")
    with pytest.raises(ArtifactError, match=r"chat_template\.jinja: cannot be read as a chat template"):
        Tokenizer.load(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("num_chars", [40, 4000], ids=["short", "long"])
def test_a_panic_of_a_hostile_expression_is_one_sentence(num_chars: int) -> None:
    """`pyo3_runtime.PanicException` is no Exception: a stream that waited for the text would never end."""
    backend = byte_level_backend()
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("^(a+)+$"), "isolated")
    with pytest.raises(InvalidRequestError, match=r"cannot encode this text: .*retry-limit"):
        Tokenizer(backend).encode("a" * num_chars + "!")


def test_a_panic_while_decoding_is_one_sentence() -> None:
    token = "a" * 40 + "!"
    backend = tokenizers.Tokenizer(models.WordLevel({token: 0}, unk_token=token))
    backend.decoder = decoders.Replace(tokenizers.Regex("^(a+)+$"), "b")
    tokenizer = Tokenizer(backend)
    for work in (tokenizer.lone_text, tokenizer.token_text):
        with pytest.raises(ArtifactError, match=r"cannot decode these tokens: .*retry-limit"):
            work(0)


def test_a_panic_while_loading_is_one_sentence(tmp_path: Path) -> None:
    name = "<" + "a" * 40 + "!"
    backend = byte_level_backend()
    backend.add_special_tokens([name])
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("(a+)+$"), "isolated")
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ArtifactError, match=r"tokenizer\.json: not usable .*retry-limit"):
        Tokenizer.load(tmp_path / "tokenizer.json", special_in_content=False)


def test_an_interrupt_is_no_error_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    tokenizer = byte_level_tokenizer()
    for name in ("_encode", "_decode"):
        monkeypatch.setattr(f"shortfin_apps.llm.serving.text.tokenizer.{name}", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode("a")
    with pytest.raises(KeyboardInterrupt):
        tokenizer.decode([1])


def test_first_out_of_range() -> None:
    assert first_out_of_range([0, 9], 10) is None
    assert first_out_of_range([0, 10], 10) == 10
    assert first_out_of_range([-3], 10) == -3


def test_a_lone_token_has_the_text_that_decoding_it_gives() -> None:
    for _ in range(2):  # the second time from the cache
        for token_id in range(TOKENIZER.vocab_size + 1):
            assert TOKENIZER.lone_text(token_id) == TOKENIZER.decode([token_id], skip_special_tokens=False)


def test_token_ids_are_those_that_have_a_name() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 5}, unk_token="a"))
    tokenizer = Tokenizer(backend)
    assert tokenizer.token_ids == {0, 5}
    assert {token_id for token_id in range(8) if tokenizer.id_to_token(token_id) is not None} == {0, 5}


@pytest.mark.parametrize(
    ("template", "rendered"),
    [
        ("{% if tools is not none %}TOOLS{% else %}none{% endif %}", "none"),
        ("{% if documents is not none %}DOCS{% endif %}ok", "ok"),
        ("{% if tools is not none %}{{ tools | tojson }}{% endif %}ok", "ok"),
        ("{{ tools is defined }}{{ documents is defined }}", "TrueTrue"),
    ],
)
def test_tools_and_documents_that_are_not_given_are_none_as_in_transformers(
    template: str, rendered: str
) -> None:
    tokenizer = Tokenizer(byte_level_backend(), {"chat_template": template})
    assert tokenizer.apply_chat_template(MESSAGES) == rendered


def test_a_request_may_give_documents() -> None:
    tokenizer = Tokenizer(byte_level_backend(), {"chat_template": "{{ documents }}"})
    assert tokenizer.apply_chat_template(MESSAGES, variables={"documents": [1]}) == "[1]"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", '{"é": 1, "a": 2}'),
        ("true", '{"\\u00e9": 1, "a": 2}'),
        ("false, 1", '{\n "é": 1,\n "a": 2\n}'),
        ("false, none, [',', ':']", '{"é":1,"a":2}'),
        ("false, none, none, true", '{"a": 2, "é": 1}'),
        ("indent=1, sort_keys=true", '{\n "a": 2,\n "é": 1\n}'),
    ],
)
def test_tojson_has_the_arguments_of_transformers(arguments: str, expected: str) -> None:
    template = "{{ {'é': 1, 'a': 2} | tojson(" + arguments + ") }}"
    tokenizer = Tokenizer(byte_level_backend(), {"chat_template": template})
    assert tokenizer.apply_chat_template(MESSAGES) == expected


def test_a_function_may_say_nothing_of_itself() -> None:
    """A template like that of gpt-oss, which raises for a function without a description."""
    template = "{% for t in tools %}{{ '// ' + t.function.description }}{{ t.function | length }}{% endfor %}"
    tools: list[dict[str, Any]] = [
        {"type": "function", "function": {"name": "f"}},
        {"function": {"name": "g", "description": "d"}},
    ]
    raises = Tokenizer(byte_level_backend(), {"chat_template": template})
    assert raises.apply_chat_template(MESSAGES, tools=tools) == "// 3// d3"
    takes = Tokenizer(byte_level_backend(), {"chat_template": "{{ tools }}"})
    assert takes.apply_chat_template(MESSAGES, tools=tools) == str(tools)


def test_templates_see_the_named_tokens_as_in_transformers(tmp_path: Path) -> None:
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    settings = {
        "chat_template": "{{ bos_token }}{{ cls_token }}{{ sep_token }}{{ pad_token is defined }}",
        "sep_token": {"content": "<sep>"},
        "pad_token": None,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "special_tokens_map.json").write_text('{"cls_token": "<cls>", "sep_token": "other"}')
    assert Tokenizer.load(tmp_path / "tokenizer.json").apply_chat_template(MESSAGES) == "<cls><sep>False"


def test_load_reads_named_templates_and_the_map_of_special_tokens(tmp_path: Path) -> None:
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": EOS}}))
    (tmp_path / "chat_template.jinja").write_text("plain")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    assert tokenizer.eos_token_ids == {tokenizer.special_tokens[EOS]}
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": null}')
    assert Tokenizer.load(tmp_path / "tokenizer.json").eos_token == EOS
    assert tokenizer.apply_chat_template(MESSAGES) == "plain"
    assert tokenizer.apply_chat_template(MESSAGES, tools=[{}]) == "with tools"
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_bytes(b"\xff")
    with pytest.raises(ArtifactError, match="additional_chat_templates: a template cannot be read"):
        Tokenizer.load(tmp_path / "tokenizer.json")
