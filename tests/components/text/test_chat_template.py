from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from shortfin_apps.llm.components.text.chat_template import ChatTemplate, pick_template
from shortfin_apps.llm.errors import ArtifactError, InvalidRequestError

MESSAGES = [{"role": "user", "content": "hello"}]


def render(source: str, messages: Sequence[dict[str, Any]] = MESSAGES, **variables: Any) -> str:
    template = ChatTemplate(source)
    return template.render(messages, add_generation_prompt=True, variables=variables)


def shown(source: str) -> str:
    """The error message that a client gets."""
    try:
        return render(source)
    except InvalidRequestError:
        return ""


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id') }}",
        "{{ raise_exception.__globals__ }}",
        "{{ _tick.__closure__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{% include '/etc/passwd' %}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ 'a' * 10**10 }}",
        "{{ 10**10 * 'a' }}",
        "{{ ([0] * 10**6) * 10**6 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ undefined.attribute }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(source: str) -> None:
    assert shown(source) == ""


LOOPS = {
    "silent": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "recursion": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(99) }}",
    "recursive loop": "{% for m in [messages] recursive %}{{ loop([m]) }}{{ loop([m]) }}{% endfor %}",
    "doubling": "{% set n = namespace(x='aa') %}{% for i in range(99) %}{{ n.x }}"
    "{% set n.x = n.x ~ n.x %}{% endfor %}",
}


@pytest.mark.parametrize("source", LOOPS.values(), ids=LOOPS.keys())
def test_an_endless_template_is_stopped(source: str) -> None:
    ticks = itertools.count()
    template = ChatTemplate(source, clock=lambda: next(ticks) / 1000)
    with pytest.raises(InvalidRequestError, match="refused"):
        template.render(MESSAGES, add_generation_prompt=True, variables={})


def test_clock_checks_do_not_change_the_text() -> None:
    source = (
        "{% macro line(m) %}\n[{{ m.role }}]{{ m.content }}\n{% endmacro %}\n"
        "{% for m in messages %}\n{{ line(m) }}{% if loop.last %}{% break %}{% endif %}\n{% endfor %}"
    )
    assert render(source, MESSAGES * 2) == "[user]hello\n[user]hello\n"


def test_a_thousand_messages_are_rendered() -> None:
    source = "{% for m in messages %}{{ m.content }}{% for i in range(20) %}.{% endfor %}{% endfor %}"
    assert len(render(source, MESSAGES * 1000)) == 25_000


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "_tick", "self", "context"])
def test_variables_cannot_override_the_servers(name: str) -> None:
    template = ChatTemplate("{{ messages[0].content }}{{ add_generation_prompt }}")
    assert template.render(MESSAGES, add_generation_prompt=True, variables={name: "x"}) == "helloTrue"


@pytest.mark.parametrize("source", ["{% if %}", "{{", "{" * 3 + "(" * 5000, "{% for a in b %}" * 200])
def test_a_template_that_does_not_compile_is_an_artefact_error(source: str) -> None:
    with pytest.raises(ArtifactError, match="does not compile"):
        ChatTemplate(source)


def test_the_default_of_several_templates_is_picked() -> None:
    several = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
    assert pick_template(several) == "b"
    assert pick_template(several[:1]) == "a"
    assert pick_template("c") == "c"
    odd: Any
    for odd in (None, 5, [], [5], [{"name": []}], {"default": "a"}):
        assert pick_template(odd) is None
