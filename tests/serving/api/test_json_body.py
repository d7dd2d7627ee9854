from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.serving.api import json_body
from shortfin_apps.llm.serving.api.json_body import (
    HEADER,
    MAX_LOGGED,
    MAX_NAME_CHARS,
    MAX_NAMED,
    FieldCheck,
    header_value,
    printable,
)
from shortfin_apps.llm.serving.api.schema import Body, ChatBody, CompletionBody
from shortfin_apps.llm.serving.http.auth import KeyRing
from tests.serving.api.harness import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    MESSAGES_ROUTE,
    MODEL,
    RESPONSES,
    Harness,
    events_of,
)
from tests.serving.api.loopback import ready_server
from tests.serving.text.test_message_roles import CHATML as READS_NOTHING_MORE
from tests.serving.text.tiny_tokenizers import byte_level_tokenizer

JSON = {"content-type": "application/json"}
MALFORMED = {
    "not json": b"{",
    "empty": b"",
    "nothing but a string": b'"x"',
    "not a number": b'{"text": "a", "sampling_params": {"temperature": NaN}}',
    "infinity": b'{"text": "a", "sampling_params": {"temperature": Infinity}}',
    "huge number": b'{"text": "a", "sampling_params": {"temperature": 1e999}}',
    "invalid utf-8": b'{"text": "\xff"}',
    "bottomless": b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "trailing comma": b'{"text": "a",}',
}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED.keys())
@pytest.mark.parametrize("path", ["/generate", COMPLETIONS, CHAT, RESPONSES, MESSAGES_ROUTE, "/tokenize"])
async def test_malformed_bodies_are_400(harness: Harness, path: str, body: bytes) -> None:
    response = await harness.client.post(path, content=body, headers=JSON)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert isinstance(error, str if path == "/generate" else dict)


async def test_lone_surrogates_are_replaced_and_logged_once(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    json_body._log_surrogates.cache_clear()
    for lone in (rb"\ud83d", rb"\ude00", "\ud83d".encode("utf-8", "surrogatepass")):
        body = b'{"prompt": "a' + lone + b'b", "echo": true}'
        response = await harness.client.post(COMPLETIONS, content=body, headers=JSON)
        assert response.json()["choices"][0]["text"].startswith("a\ufffdb"), response.text
    assert sum("lone surrogates" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES_ROUTE])
async def test_a_history_with_lone_surrogates_is_answered(harness: Harness, path: str) -> None:
    history = [{"role": "user", "content": "a\ud83d"}, {"role": "assistant", "content": "\ude00"}, *MESSAGES]
    fields = {"input" if path == RESPONSES else "messages": history, "stream": True}
    if path == MESSAGES_ROUTE:
        fields["max_tokens"] = 9
    body = json.dumps(fields).encode()
    response = await harness.client.post(path, content=body, headers=JSON)
    assert response.status_code == 200, response.text


MANY = {
    "arrays": b'{"x": [' + b",".join([b"[]"] * 30_000) + b"]}",
    "objects": b'{"x": [' + b",".join([b"{}"] * 30_000) + b"]}",
    "names": b"{" + b",".join(b'"%d": 0' % i for i in range(120_000)) + b"}",
}


@pytest.mark.parametrize("body", MANY.values(), ids=MANY.keys())
async def test_a_body_is_bounded_before_it_is_parsed(
    harness: Harness, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[object] = []
    monkeypatch.setattr("shortfin_apps.llm.serving.api.json_body.orjson.loads", parsed.append)
    response = await harness.client.post(CHAT, content=body, headers=JSON)
    assert response.status_code == 400
    assert "it has more than" in response.text
    assert not parsed


async def test_the_content_type_may_have_a_charset(harness: Harness) -> None:
    headers = {"content-type": "application/json; charset=utf-8"}
    response = await harness.client.post("/generate", content=b'{"text": "a"}', headers=headers)
    assert response.status_code == 200


def operations_with_a_body() -> list[tuple[str, str]]:
    """Method and path of each operation with a body in the OpenAPI document."""
    paths = Harness(loaded=False).app.openapi()["paths"]
    return [(m, path) for path, ways in paths.items() for m, way in ways.items() if "requestBody" in way]


VALID: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "a"},
    CHAT: {"messages": MESSAGES},
    RESPONSES: {"input": "a"},
    MESSAGES_ROUTE: {"messages": MESSAGES, "max_tokens": 9},
    f"{MESSAGES_ROUTE}/count_tokens": {"messages": MESSAGES},
    "/generate": {"text": "a"},
    "/abort": {"rid": "r"},
    "/abort_request": {"rid": "r"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [4]},
    "/log_level": {"level": "warning"},
}


@pytest.mark.parametrize("strict", [False, True])
async def test_every_route_with_a_body_checks_its_fields(strict: bool) -> None:
    harness = Harness(strict_fields=strict, keys=KeyRing([], ["root"]))
    operations = operations_with_a_body()
    assert {path for _, path in operations} >= VALID.keys()
    for method, path in operations:
        required, headers = VALID[path], {"Authorization": "Bearer root"}
        response = await harness.client.request(method, path, json=required | {"mine": 1}, headers=headers)
        assert response.status_code == (400 if strict else 200), (path, response.text)
        if strict:
            assert "`mine` is an unknown field" in response.text
        else:
            assert response.headers[HEADER] == "mine"
        plain = await harness.client.request(method, path, json=required, headers=headers)
        assert HEADER not in plain.headers


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [4]})])
async def test_another_models_name_is_404(harness: Harness, path: str, body: dict[str, object]) -> None:
    assert (await harness.post(path, body | {"model": MODEL})).status_code == 200
    assert (await harness.post(path, body | {"model": "other"})).status_code == 404


async def test_a_model_has_the_name_of_its_source_too(harness: Harness) -> None:
    harness.service.source = "random:tiny"
    answer = await harness.post(COMPLETIONS, {"prompt": "a", "model": "random:tiny"})
    assert (answer.status_code, answer.json()["model"]) == (200, MODEL)
    assert (await harness.client.get("/v1/models/random:tiny")).json()["id"] == MODEL


# Fields of other servers that change the answer; earlier versions ignored them.
CHANGING: list[tuple[str, dict[str, Any], str]] = [
    *(
        (COMPLETIONS, {"prompt": "a", name: value}, name)
        for name, value in {
            "structural_tag": "<a>",
            "grammar_lazy": True,
            "guided_whitespace_pattern": " ",
            "repeat_penalty": 1.1,
            "xtc_probability": 0.9,
            "lora": [{"id": 0, "scale": 1.0}],
            "prompt_embeds": "AAAA",
            "return_progress": True,
            "stop_regex": "a+",
            "max_completion_tokens": 5,
        }.items()
    ),
    *(
        (CHAT, {"messages": MESSAGES, name: value}, name)
        for name, value in {
            "chat_template": "{{ messages }}",
            "documents": [{"title": "t", "text": "x"}],
            "structural_tag": "<a>",
            "echo": True,
        }.items()
    ),
    (CHAT, {"messages": MESSAGES, "stream_options": {"include_obfuscation": True}}, "stream_options"),
    ("/generate", {"text": "a", "temperature": 1.0}, "temperature"),
    (
        "/generate",
        {"text": "a", "sampling_params": {"xtc_probability": 0.5}},
        "sampling_params.xtc_probability",
    ),
    (
        "/generate",
        {"text": "a", "sampling_params": [{"n": 1, "xtc_probability": 0.5}]},
        "sampling_params.xtc_probability",
    ),
    ("/tokenize", {"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools"),
    ("/detokenize", {"tokens": [4], "skip_special_tokens": True}, "skip_special_tokens"),
    ("/abort", {"rid": "r", "abort_all": True}, "abort_all"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "field"), CHANGING, ids=[f"{p}-{f}" for p, _, f in CHANGING])
async def test_an_unsupported_field_that_changes_the_answer_is_refused(
    harness: Harness, path: str, body: dict[str, Any], field: str, stream: bool
) -> None:
    response = await harness.post(path, {**body, "stream": stream})
    assert response.status_code == 400, response.text
    assert f"`{field}" in response.text
    assert not harness.engine.calls


@pytest.mark.parametrize("own", [{}, {"prompt": "a", "messages": MESSAGES}], ids=["alone", "both"])
async def test_a_body_of_the_other_route_is_told_that_route(harness: Harness, own: dict[str, Any]) -> None:
    for path, other, instead in (
        (COMPLETIONS, {"messages": MESSAGES}, "use /v1/chat/completions"),
        (CHAT, {"prompt": "a"}, "use /v1/completions"),
    ):
        response = await harness.post(path, {**own, **other})
        assert response.status_code == 400, response.text
        message = response.json()["error"]["message"]
        assert message.endswith(instead)
        assert f"`{next(iter(other))}`" in message
    for path in (COMPLETIONS, CHAT):
        response = await harness.post(path, {"mine": 1})
        assert response.json()["error"]["message"].endswith("Field required")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (COMPLETIONS, {"prompt": "a", "mine": 1, "yours": [2]}, "mine, yours"),
        (CHAT, {"messages": MESSAGES, "metadata": {"a": "b"}, "mine": None}, "metadata"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]}]},
            "messages.content.cache_control",
        ),
        ("/generate", {"text": ["a", "b"], "mine": 1}, "mine"),
        ("/generate", {"text": ["a", "b"], "sampling_params": [{"x": 1}, {"x": 2, "y": 3}]},
         "sampling_params.x, sampling_params.y"),
    ],
)  # fmt: skip
async def test_the_answer_names_the_ignored_fields(
    harness: Harness, path: str, body: dict[str, Any], named: str, stream: bool
) -> None:
    response = await harness.post(path, {**body, "stream": stream})
    assert response.status_code == 200, response.text
    assert response.headers[HEADER] == named
    if stream:
        assert events_of(response)


@pytest.mark.parametrize(
    ("path", "body"), [(COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": MESSAGES})], ids=["text", "chat"]
)
async def test_options_of_a_stream_are_ignored_without_one(
    harness: Harness, path: str, body: dict[str, Any]
) -> None:
    async def named(options: object, stream: bool | None) -> str | None:
        response = await harness.post(path, {**body, "stream_options": options, "stream": stream})
        assert response.status_code == 200, response.text
        header: str | None = response.headers.get(HEADER)
        return header

    for stream in (False, None):
        assert await named({"include_usage": True}, stream) == "stream_options"
        assert await named({"mine": 1}, stream) == "stream_options, stream_options.mine"
        assert await named(None, stream) is None
    assert await named({"include_usage": True}, True) is None
    assert await named({"mine": 1}, True) == "stream_options.mine"


async def test_strict_accepts_known_fields_and_nulls() -> None:
    harness = Harness(strict_fields=True)
    inert = {"metadata": {"a": "b"}, "mine": None, "mirostat": 0, "xtc_probability": None}
    response = await harness.post(CHAT, {"messages": [{**MESSAGES[0], "name": "Ann"}], **inert})
    assert response.status_code == 200, response.text
    assert response.headers[HEADER] == "metadata, messages.name"
    response = await harness.post("/generate", {"text": "a", "sampling_params": {"mine": 1}})
    assert response.status_code == 400
    assert "`sampling_params.mine`" in response.json()["error"]


async def test_each_ignored_field_is_logged_once(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        await harness.post(COMPLETIONS, {"prompt": "a", "mine": 1, "yours": 2})
    assert [r.getMessage() for r in caplog.records] == [
        f"requests have the field `{name}`, which is ignored" for name in ("mine", "yours")
    ]


def test_clients_cannot_fill_the_log_or_the_memory(caplog: pytest.LogCaptureFixture) -> None:
    check = FieldCheck()
    for i in range(0, 50_000, 1000):
        names = [f"f{i + j}" for j in range(1000)]
        assert (
            check.ignored(CompletionBody.model_validate({"prompt": "a", **dict.fromkeys(names, 1)})) == names
        )
    assert len(caplog.records) == MAX_LOGGED + 1
    assert len(check._logged) == MAX_LOGGED
    assert caplog.records[-1].levelno == logging.WARNING


@given(st.text() | st.text(alphabet="\r\n,\x00é€\x7f \U0001f600a", max_size=200))
def test_names_are_cut_and_printable(name: str) -> None:
    shown = printable(name)
    assert len(shown) <= MAX_NAME_CHARS
    assert shown.isascii()
    assert not set(shown) & set("\r\n, \t\"`'\x00\x7f")
    assert shown.isprintable()


@given(st.lists(st.text(), max_size=40, unique=True))
def test_a_header_lists_a_limited_number_of_names(names: list[str]) -> None:
    shown = header_value(names).split(", ")
    assert shown[:MAX_NAMED] == [printable(name) for name in names[:MAX_NAMED]] or not names
    assert len(shown) <= MAX_NAMED + 1
    assert (shown[-1] == "..." and len(shown) == MAX_NAMED + 1) == (len(names) > MAX_NAMED)


@pytest.mark.parametrize("stream", [False, True])
async def test_names_cannot_inject_a_header(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    """With uvicorn writing the headers."""
    names = ["a\r\nSet-Cookie: x=1", "b\nforged line", "ü", "日本", "c" * 5000, ""]
    async with ready_server() as server:
        body = {"prompt": "a", "stream": stream, **dict.fromkeys(names, 1)}
        response = await server.client.post(COMPLETIONS, json=body)
    assert response.status_code == 200
    assert "set-cookie" not in response.headers
    assert response.headers[HEADER].startswith("a%0D%0ASet-Cookie%3A%20x%3D1, b%0Aforged%20line, %C3%BC, ")
    logged = [r.getMessage() for r in caplog.records if "which is ignored" in r.getMessage()]
    assert len(logged) == len(names)
    assert all("\n" not in line for line in logged)


ASKED = {"role": "user", "content": "hi", "name": "", "flavour": "sweet"}
ANSWERED: Any = {"role": "assistant", "content": "a", "annotations": [], "audio": None}
THOUGHT_ITEM = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": "x", "is_error": True}
FAILED = {"role": "user", "content": [RESULT]}
CALL = {"id": "1", "index": 0, "type": "function", "function": {"name": "f", "arguments": "{}"}}

VARIABLES = {"chat_template_kwargs": {"enable_thinking": False, "m": "", "documents": None}}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (CHAT, {"messages": [ASKED, ANSWERED, *MESSAGES]}, "messages.flavour"),
        (CHAT, {"messages": [{**ANSWERED, "reasoning": "hm"}, *MESSAGES]}, "messages.reasoning"),
        (CHAT, {"messages": [{**ANSWERED, "reasoning_content": "hm"}]}, "messages.reasoning_content"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [CALL]}]}, "messages.tool_calls.index"),
        (CHAT, {"messages": [*MESSAGES, {**ANSWERED, "tool_call_id": "1"}]}, None),
        ("/tokenize", {"messages": [ASKED]}, "messages.flavour"),
        ("/tokenize", {"messages": MESSAGES, **VARIABLES}, "chat_template_kwargs.enable_thinking"),
        (CHAT, {"messages": MESSAGES, **VARIABLES}, "chat_template_kwargs.enable_thinking"),
        (RESPONSES, {"input": MESSAGES, **VARIABLES}, "chat_template_kwargs.enable_thinking"),
        (RESPONSES, {"input": [*MESSAGES, THOUGHT_ITEM, *MESSAGES]}, "input.reasoning_content"),
        (MESSAGES_ROUTE, {"messages": [FAILED], "max_tokens": 9}, "messages.is_error"),
    ],
)  # fmt: skip
async def test_fields_of_messages_that_the_template_does_not_read_are_reported(
    path: str, body: dict[str, Any], named: str | None, strict: bool
) -> None:
    """Not refused, as it is the template that decides."""
    harness = Harness(tokenizer=byte_level_tokenizer(chat_template=READS_NOTHING_MORE), strict_fields=strict)
    response = await harness.post(path, body)
    assert response.status_code == 200, response.text
    assert response.headers.get(HEADER) == named


async def test_fields_of_messages_that_the_template_reads_are_not_reported() -> None:
    reading = READS_NOTHING_MORE + "{{ messages[0].flavour }}{{ messages[0].thinking }}"
    harness = Harness(tokenizer=byte_level_tokenizer(chat_template=reading))
    response = await harness.post(CHAT, {"messages": [{**ASKED, "reasoning": "hm"}]})
    assert HEADER not in response.headers
    assert harness.tokenizer.decode(harness.engine.calls[0].prompt_token_ids) == "[user]hisweethm"


def test_fields_of_long_conversations_are_not_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where messages have nothing but their own fields, as a long one's would take a tenth of a second."""
    read: list[Body] = []
    unread = Body.unread_fields

    def note(body: Body, prefix: str) -> list[str]:
        read.append(body)
        return unread(body, prefix)

    monkeypatch.setattr(Body, "unread_fields", note)
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "a"}] * 100, "mine": 1})
    assert FieldCheck().ignored(body) == ["mine"]
    assert read == [body]
