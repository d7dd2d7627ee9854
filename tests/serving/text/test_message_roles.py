from __future__ import annotations

import logging
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.serving.text.message_roles import MAX_OTHER_ROLES, UNKNOWN
from shortfin_apps.llm.serving.text.rendering import TemplateLimitError
from shortfin_apps.llm.serving.text.strict_turns import turns_joined
from shortfin_apps.llm.serving.text.tokenizer import Tokenizer
from tests.serving.text.tiny_tokenizers import byte_level_backend, byte_level_tokenizer

# How templates of these families treat roles, with [role] for their marks.
CHATML = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"  # also Llama 3's
RAISES_LATE = (  # Qwen 3.5
    "{% for m in messages %}{% if m.role == 'system' %}"
    "{% if not loop.first %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "[system]{{ m.content | trim }}"
    "{% elif m.role in ['user', 'assistant', 'tool'] %}[{{ m.role }}]{{ m.content | trim }}"
    "{% else %}{{ raise_exception('Unexpected message role.') }}{% endif %}{% endfor %}"
)
DROPS_LATE = (  # gpt-oss
    "{% if messages[0].role in ['developer', 'system'] %}[developer]{{ messages[0].content }}"
    "{% set loop_messages = messages[1:] %}{% else %}{% set loop_messages = messages %}{% endif %}"
    "{% for m in loop_messages %}"
    "{% if m.role in ['user', 'assistant', 'tool'] %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
)
ALTERNATES = (  # Mistral; results of calls do not count
    "{% if messages[0].role == 'system' %}[system]{{ messages[0].content }}"
    "{% set loop_messages = messages[1:] %}{% else %}{% set loop_messages = messages %}{% endif %}"
    "{% set ns = namespace(index=0) %}{% for m in loop_messages %}"
    "{% if not (m.role == 'tool' or m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
    "{% set ns.index = ns.index + 1 %}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
NO_SYSTEM = (  # Gemma 2
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content | trim }}{% endfor %}"
)
IN_FIRST_USER = (  # Gemma 3
    "{% if messages[0].role == 'system' %}{% set prefix = messages[0].content + '\\n\\n' %}"
    "{% set loop_messages = messages[1:] %}{% else %}{% set prefix = '' %}{% set loop_messages = messages %}"
    "{% endif %}{% for m in loop_messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "[{{ m.role }}]{{ prefix if loop.first else '' }}{{ m.content | trim }}{% endfor %}"
)
NEEDS_USER = RAISES_LATE + (  # Qwen 3.5, too
    "{% if not messages | selectattr('role', 'equalto', 'user') | list %}"
    "{{ raise_exception('No user query found') }}{% endif %}"
)
GATHERS = (  # DeepSeek
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}[{{ m.role }}]{{ m.content }}{% endif %}"
    "{% endfor %}"
)
OWN_DEVELOPER = (
    "{% for m in messages %}{% if m.role == 'developer' %}[instructions]{{ m.content }}"
    "{% else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
)
SHOWS_CALLS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for call in m.tool_calls or () %}"
    "{{ call.function | tojson }}{% endfor %}{% endfor %}"
)
FAMILIES = [
    CHATML,
    RAISES_LATE,
    DROPS_LATE,
    ALTERNATES,
    NO_SYSTEM,
    IN_FIRST_USER,
    NEEDS_USER,
    GATHERS,
    OWN_DEVELOPER,
]
IN_LAST_USER = (  # Mistral 7B v0.3
    ALTERNATES.replace("[system]{{ messages[0].content }}", "{% set system = messages[0].content %}").replace(
        "[{{ m.role }}]", "[{{ m.role }}]{{ system + '\\n\\n' if loop.last and m.role == 'user' and system }}"
    )
)
NO_TEXT = ALTERNATES.replace("{{ m.content }}", "{{ '' if m.tool_calls else m.content }}")  # Mistral Small 3
FIRST_CALL = (  # gpt-oss
    "{% for m in messages %}{% if m.tool_calls and m.content and m.thinking %}"
    "{{ raise_exception('Cannot pass both content and thinking') }}{% endif %}"
    "[{{ m.role }}]{{ m.thinking }}{{ m.content }}{{ m.tool_calls[0].function.name if m.tool_calls }}"
    "{% endfor %}"
)
ONE_CALL = (  # Llama 3
    "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% for call in m.tool_calls or () %}{{ call.function.name }}{% endfor %}"
    "{% endfor %}"
)
CALLED = {"tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}]}


def messages_of(text: str) -> list[dict[str, Any]]:
    """`[role]content` as messages; a role `calls` is an assistant's with a call."""
    pairs = [part.split("]") for part in text.split("[")[1:]]
    return [
        {"role": "assistant" if role == "calls" else role, "content": content}
        | (CALLED if role == "calls" else {})
        for role, content in pairs
    ]


@cache
def tokenizer_of(template: str) -> Tokenizer:
    return byte_level_tokenizer(chat_template=template)


def rendered(template: str, text: str) -> str:
    tokenizer = tokenizer_of(template)
    return tokenizer.apply_chat_template(messages_of(text), add_generation_prompt=False).replace("\n\n", "+")


@pytest.mark.parametrize(
    ("template", "given", "shown"),
    [
        # a developer's message
        (CHATML, "[developer]d[user]u", "[system]d[user]u"),
        (RAISES_LATE, "[developer]d[user]u", "[system]d[user]u"),
        (DROPS_LATE, "[developer]d[user]u", "[developer]d[user]u"),
        (ALTERNATES, "[developer]d[user]u", "[system]d[user]u"),
        (NO_SYSTEM, "[developer]d[user]u", "[user]d+u"),
        (GATHERS, "[developer]d[user]u", "d[user]u"),
        (OWN_DEVELOPER, "[developer]d[user]u", "[instructions]d[user]u"),
        (CHATML.replace("m.role", "m.role | title"), "[developer]d[user]u", "[System]d[User]u"),
        # as Codex has it
        (CHATML, "[system]s[developer]d[user]u", "[system]s[system]d[user]u"),
        (RAISES_LATE, "[system]s[developer]d[user]u", "[system]s+d[user]u"),
        (DROPS_LATE, "[system]s[developer]d[user]u", "[developer]s+d[user]u"),
        (ALTERNATES, "[system]s[developer]d[user]u", "[system]s+d[user]u"),
        (NO_SYSTEM, "[system]s[developer]d[user]u", "[user]s+d+u"),
        (GATHERS, "[system]s[developer]d[user]u", "sd[user]u"),
        (OWN_DEVELOPER, "[system]s[developer]d[user]u", "[system]s[instructions]d[user]u"),
        # as Claude Code has it
        (CHATML, "[system]s[user]u[system]t", "[system]s[user]u[system]t"),
        (RAISES_LATE, "[system]s[user]u[system]t", "[system]s[user]u+t"),
        (DROPS_LATE, "[system]s[user]u[system]t", "[developer]s[user]u+t"),
        (ALTERNATES, "[system]s[user]u[system]t", "[system]s[user]u+t"),
        (NO_SYSTEM, "[system]s[user]u[system]t", "[user]s+u+t"),
        (GATHERS, "[system]s[user]u[system]t", "st[user]u"),
        # late, and after the result of a call
        (RAISES_LATE, "[user]u[assistant]a[system]s", "[user]u[assistant]a[user]s"),
        (RAISES_LATE, "[user]u[calls]c[tool]r[system]s", "[user]u[assistant]c[tool]r[user]s"),
        (ALTERNATES, "[user]u[calls]c[tool]r[system]s", "[system]s[user]u[assistant]c[tool]r"),
        (ALTERNATES, "[system]s[user]u[calls]c[tool]r[system]t", "[system]s+t[user]u[assistant]c[tool]r"),
        # nothing but a system message
        (NO_SYSTEM, "[system]s", "[user]s"),
        (IN_FIRST_USER, "[system]s", "[user]s"),
        (IN_FIRST_USER, "[developer]d", "[user]d"),
        (IN_FIRST_USER, "[system]s[developer]d", "[user]s+d"),
        (IN_FIRST_USER, "[system]s[assistant]a", "[user]s[assistant]a"),
        (IN_FIRST_USER, "[system]s[assistant]a[system]t", "[user]s+t[assistant]a"),
        (IN_FIRST_USER, "[system]s[user]u", "[user]s+u"),
        (NEEDS_USER, "[system]s", "[user]s"),
        (NEEDS_USER, "[system]s[system]t", "[user]s+t"),
        (NEEDS_USER, "[system]s[user]u", "[system]s[user]u"),
        (CHATML, "[system]s", "[system]s"),
        (CHATML, "[system]s[system]t", "[system]s[system]t"),
        (RAISES_LATE, "[system]s[system]t", "[system]s+t"),
        (GATHERS, "[system]s", "s"),
        (NO_SYSTEM, "[user]u[assistant]a[system]s[user]v", "[user]u[assistant]a[user]s+v"),
    ],
)
def test_roles_become_those_of_the_template(template: str, given: str, shown: str) -> None:
    assert rendered(template, given) == shown


@pytest.mark.parametrize(
    ("template", "given", "shown"),
    [
        # as Codex has it
        (ALTERNATES, "[developer]d[user]u[user]v", "[system]d[user]u+v"),
        (IN_FIRST_USER, "[system]s[developer]d[user]u[user]v", "[user]s+d+u+v"),
        (IN_FIRST_USER, "[user]u[user]v[assistant]a[user]w", "[user]u+v[assistant]a[user]w"),
        (ALTERNATES, "[user]u[user]v[assistant]a[system]s[user]w", "[user]u+v[assistant]a[user]s+w"),
        # as Claude Code has it
        (ALTERNATES, "[user]u[calls]c[tool]r[user]v", "[user]u[assistant]c[tool]r+v"),
        (ALTERNATES, "[user]u[user]v[calls]c[tool]r[user]w", "[user]u+v[assistant]c[tool]r+w"),
        (IN_LAST_USER, "[system]s[user]u[calls]c[tool]r[user]v", "[user]s+u[assistant]c[tool]r+v"),
        (IN_LAST_USER, "[system]s[user]u[calls]c[tool]r", "[user]s+u[assistant]c[tool]r"),
        (
            IN_LAST_USER,
            "[system]s[user]u[calls]c[tool]r[assistant]a[user]v",
            "[user]u[assistant]c[tool]r[assistant]a[user]s+v",
        ),
        # as others have it
        (ALTERNATES, "[user]u[assistant]a[assistant]b[user]v", "[user]u[assistant]a+b[user]v"),
        (NO_SYSTEM, "[user]u[user]v[assistant]a[assistant]b[user]w", "[user]u+v[assistant]a+b[user]w"),
        (
            ALTERNATES,
            "[user]u[assistant]a[calls]c[tool]r[assistant]b",
            "[user]u[assistant]a+c[tool]r[assistant]b",
        ),
        # text and calls stay apart if they can: the template shows no text beside calls
        (NO_TEXT, "[user]u[user]v[assistant]a[calls]c", "[user]u+v[assistant]a[assistant]"),
        (
            NO_TEXT,
            "[user]u[user]v[assistant]a[calls]c[tool]r[user]w",
            "[user]u+v[assistant]a[assistant][tool]r[user]w",
        ),
        (CHATML, "[user]u[assistant]a[assistant]b", "[user]u[assistant]a[assistant]b"),
        (CHATML, "[user]u[user]v[calls]c[tool]r[user]w", "[user]u[user]v[assistant]c[tool]r[user]w"),
    ],
)
def test_a_template_that_wants_turns_has_them(template: str, given: str, shown: str) -> None:
    assert rendered(template, given) == shown


@pytest.mark.parametrize("template", [ONE_CALL, FIRST_CALL])
def test_an_answer_with_several_calls_can_be_sent_back_to_a_template_of_one(template: str) -> None:
    calls = [{"id": name, "type": "function", "function": {"name": name, "arguments": {}}} for name in "fg"]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "g", "content": "of g"},
        {"role": "tool", "tool_call_id": "f", "content": "of f"},
        {"role": "tool", "tool_call_id": "h", "content": "of h"},
    ]
    text = tokenizer_of(template).apply_chat_template(messages, add_generation_prompt=False)
    assert text == "[user]u[assistant]af[tool]of f[assistant]g[tool]of g[tool]of h"


@pytest.mark.parametrize("template", [ONE_CALL, FIRST_CALL])
def test_several_calls_without_results_are_all_shown(template: str) -> None:
    calls = [{"id": name, "type": "function", "function": {"name": name, "arguments": {}}} for name in "fg"]
    cut = {"role": "assistant", "content": "a", "tool_calls": calls}
    messages = [*messages_of("[user]u"), cut, *messages_of("[user]v"), cut]
    text = tokenizer_of(template).apply_chat_template(messages, add_generation_prompt=False)
    assert text == "[user]u[assistant]af[assistant]g[user]v[assistant]af[assistant]g"


@pytest.mark.parametrize("template", [NO_SYSTEM, IN_FIRST_USER])
def test_several_calls_stay_as_they_are_in_a_template_without_calls(template: str) -> None:
    cut = {"role": "assistant", "content": "a", "tool_calls": CALLED["tool_calls"] * 2}
    messages = [*messages_of("[user]u"), cut, *messages_of("[user]v")]
    text = tokenizer_of(template).apply_chat_template(messages, add_generation_prompt=False)
    assert text == "[user]u[assistant]a[user]v"


@pytest.mark.parametrize("same", [{}, {"id": ""}])
def test_results_of_calls_that_ids_do_not_tell_apart_follow_in_order(same: dict[str, str]) -> None:
    calls = [{**same, "type": "function", "function": {"name": name, "arguments": {}}} for name in "fg"]
    named = {"tool_call_id": same["id"]} if same else {}
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": "a", "tool_calls": calls},
        *({"role": "tool", "content": f"of {name}", **named} for name in "fg"),
    ]
    text = tokenizer_of(ONE_CALL).apply_chat_template(messages, add_generation_prompt=False)
    assert text == "[assistant]af[tool]of f[assistant]g[tool]of g"


def test_several_results_of_a_call_follow_it() -> None:
    calls = [{"id": name, "type": "function", "function": {"name": name, "arguments": {}}} for name in "ffg"]
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": "a", "tool_calls": calls},
        *({"role": "tool", "content": f"{name}{n}", "tool_call_id": name} for n in range(3) for name in "gf"),
    ]
    text = tokenizer_of(ONE_CALL).apply_chat_template(messages, add_generation_prompt=False)
    first, second, other = text.split("[assistant]")[1:]
    assert (first, second) == ("af[tool]f0", "f[tool]f1[tool]f2")
    assert other == "g[tool]g0[tool]g1[tool]g2"


@pytest.mark.parametrize("given", [["f"], {"f": "g"}, 1, None])
def test_a_result_may_have_anything_as_the_id_of_its_call(given: object) -> None:
    calls = [{"id": name, "type": "function", "function": {"name": name, "arguments": {}}} for name in "fg"]
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": "a", "tool_calls": calls},
        {"role": "tool", "content": "r", "tool_call_id": given},
    ]
    text = tokenizer_of(ONE_CALL).apply_chat_template(messages, add_generation_prompt=False)
    assert text == "[assistant]af[assistant]g[tool]r"


def test_the_assistants_messages_in_a_row_become_one_with_thoughts_and_calls() -> None:
    thoughts: list[dict[str, Any]] = [
        {"role": "assistant", "content": "a", "thinking": 1},  # a field of a client's own
        {"role": "assistant", "content": "b"},
        {"role": "assistant", "content": "", "thinking": "t", **CALLED},
    ]
    result = {"role": "tool", "content": "r"}
    turn = {"role": "assistant", "content": "a\n\nb", "thinking": "1\n\nt", **CALLED}
    assert turns_joined([*thoughts, result, *thoughts])[-1] == [turn, result, turn]


def test_text_beside_a_thought_and_a_call_can_be_sent_back() -> None:
    answer = {"role": "assistant", "content": "text", "thinking": "hm", "reasoning": "hm", **CALLED}
    messages = [*messages_of("[user]u"), answer, *messages_of("[tool]r")]
    text = tokenizer_of(FIRST_CALL).apply_chat_template(messages, add_generation_prompt=False)
    assert text == "[user]u[assistant]hm\n\ntextf[tool]r"


def test_a_rendering_that_hit_a_limit_is_not_tried_again() -> None:
    tokenizer, calls = byte_level_tokenizer(chat_template=ALTERNATES), []
    assert tokenizer._template is not None

    def limited(*args: Any, **named: Any) -> str:
        calls.append(args)
        raise TemplateLimitError("takes too long", "messages")

    tokenizer._template.render = limited  # type: ignore[method-assign]
    with pytest.raises(TemplateLimitError):
        tokenizer.apply_chat_template(messages_of("[user]u[user]v"))
    assert len(calls) == 1


@pytest.mark.parametrize("template", FAMILIES)
@given(st.lists(st.sampled_from(["system", "developer", "user"]), max_size=5))
def test_no_system_message_is_ever_lost(template: str, roles: list[str]) -> None:
    """Of conversations in which users and assistants alternate, wherever system messages are."""
    turns, num_users = "", 0
    for place, role in enumerate(roles):
        turns += f"[{role}]text{place}"
        if role == "user":
            turns += f"[assistant]answer{num_users}"
            num_users += 1
    shown = rendered(template, turns + "[user]last")
    assert all(f"text{place}" in shown for place in range(len(roles)))
    assert "last" in shown


def test_the_text_before_a_late_system_message_stays() -> None:
    """So that cached pages of the conversation are used."""
    before = "[system]s[user]u[assistant]a[user]v"
    for template in (RAISES_LATE, DROPS_LATE, ALTERNATES):
        assert rendered(template, f"{before}[system]t").startswith(rendered(template, before))


@pytest.mark.parametrize("template", FAMILIES)
def test_other_conversations_stay_as_they_are(template: str) -> None:
    assert rendered(template, "[user]u[assistant]a[user]v").endswith("[user]u[assistant]a[user]v")


def test_a_role_that_the_template_drops_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="drops messages of the role `critic`; use `system`"):
        rendered(DROPS_LATE, "[user]u[critic]c")
    assert rendered(CHATML, "[user]u[critic]c") == "[user]u[critic]c"
    with pytest.raises(InvalidRequestError, match="refused these messages: Unexpected message role"):
        rendered(RAISES_LATE, "[user]u[critic]c")


def test_a_template_may_know_a_role_of_its_own() -> None:
    knows = DROPS_LATE.replace("'tool']", "'critic']")
    assert rendered(knows, "[user]u[critic]c") == "[user]u[critic]c"


def test_a_conversation_has_few_roles_of_its_own() -> None:
    """Each takes a trial."""
    roles = "".join(f"[{UNKNOWN}{place}]c" for place in range(MAX_OTHER_ROLES))
    assert rendered(CHATML, roles)
    with pytest.raises(InvalidRequestError, match=f"at most {MAX_OTHER_ROLES}"):
        rendered(CHATML, roles + "[one more]c")


def warnings_of(caplog: pytest.LogCaptureFixture, template: str, *conversations: str) -> list[str]:
    tokenizer = byte_level_tokenizer(chat_template=template)
    with caplog.at_level(logging.WARNING):
        for text in conversations * 2:
            tokenizer.apply_chat_template(messages_of(text))
    return [record.message for record in caplog.records]


@pytest.mark.parametrize(
    ("template", "conversations", "expected"),
    [
        (CHATML, ["[system]s[user]u", "[user]u"], []),
        (CHATML, ["[developer]s[user]u"], ["does not know the role `developer`"]),
        (RAISES_LATE, ["[user]u[system]s", "[user]v[system]t"], ["it becomes a part of the user message"]),
        (RAISES_LATE, ["[system]s[user]u[system]s"], ["has one system message"]),
        (NO_SYSTEM, ["[system]s[user]u"], ["it becomes a part of the user message"]),
        (
            ALTERNATES,
            ["[system]s[user]u[calls]c[tool]r[system]t"],
            ["drops calls of tools", "has one system message", "refused"],
        ),
        (ALTERNATES, ["[user]u[user]v"], ["refused messages of a user or of the assistant in a row"]),
        (
            ALTERNATES,
            ["[user]u[calls]c[tool]r[user]v"],
            ["drops calls of tools", "refused a user message right after"],
        ),
        (GATHERS, ["[user]u[calls]c[tool]r"], ["drops calls of tools", "drops results of tools"]),
        (CHATML, ["[user]u[calls]c[tool]r"], ["drops calls of tools"]),
        (SHOWS_CALLS, ["[user]u[calls]c[tool]r"], []),
    ],
)
def test_the_log_says_once_what_was_changed(
    caplog: pytest.LogCaptureFixture, template: str, conversations: list[str], expected: list[str]
) -> None:
    logged = warnings_of(caplog, template, *conversations)
    assert len(logged) == len(expected)
    assert all(part in message for part, message in zip(expected, logged, strict=True))


def test_special_tokens_in_system_messages_stay_plain_text() -> None:
    settings = {"eos_token": "<|end|>", "chat_template": RAISES_LATE}
    tokenizer = Tokenizer(byte_level_backend(), settings, special_in_content=False)
    text = tokenizer.apply_chat_template(messages_of("[system]a<|end|>[developer]b<|end|>[user]u"))
    assert tokenizer.special_tokens["<|end|>"] not in tokenizer.encode(text, rendered=True)


def test_the_template_for_tools_is_tried_with_tools() -> None:
    needs_tools = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}" + RAISES_LATE
    named = [
        {"name": "default", "template": CHATML},
        {"name": "tool_use", "template": needs_tools},
    ]
    tokenizer = byte_level_tokenizer(chat_template=named)
    messages = messages_of("[system]s[developer]d[user]u")
    tools = [{"type": "function", "function": {"name": "g"}}]
    assert tokenizer.apply_chat_template(messages) == "[system]s[system]d[user]u"
    assert tokenizer.apply_chat_template(messages, tools=tools) == "g[system]s\n\nd[user]u"


def test_the_error_is_that_of_the_last_try() -> None:
    raises_for_tools = ALTERNATES.replace("[{{ m.role }}]", "{% if m.role == 'tool' %}{{ no.id }}{% endif %}")
    with pytest.raises(InvalidRequestError, match="'no' is undefined"):
        rendered(raises_for_tools, "[system]s[user]u[calls]c[tool]r[system]t")


def test_a_trial_that_hit_a_limit_is_not_remembered() -> None:
    """The machine may have been busy."""
    tokenizer = byte_level_tokenizer(chat_template=RAISES_LATE)
    assert tokenizer._template is not None
    render, calls = tokenizer._template.render, []

    def once_limited(*args: Any, **named: Any) -> str:
        calls.append(args)
        if len(calls) == 1:
            raise TemplateLimitError("takes too long", "messages")
        return render(*args, **named)

    tokenizer._template.render = once_limited  # type: ignore[method-assign]
    messages = messages_of("[user]u[system]s")
    with pytest.raises(TemplateLimitError):
        tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    assert text == byte_level_tokenizer(chat_template=RAISES_LATE).apply_chat_template(
        messages, add_generation_prompt=False
    )
