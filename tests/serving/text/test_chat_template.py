from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from shortfin_apps.llm.contract.errors import ArtifactError, InvalidRequestError
from shortfin_apps.llm.serving.text.chat_template import ChatTemplate, check_syntax, pick_template

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
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{% include '/etc/passwd' %}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ undefined.attribute }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(source: str) -> None:
    assert shown(source) == ""


def test_a_thousand_messages_are_rendered() -> None:
    source = "{% for m in messages %}{{ m.content }}{% for i in range(20) %}.{% endfor %}{% endfor %}"
    assert len(render(source, MESSAGES * 1000)) == 25_000


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "self", "context"])
def test_variables_cannot_override_the_servers(name: str) -> None:
    template = ChatTemplate("{{ messages[0].content }}{{ add_generation_prompt }}")
    assert template.render(MESSAGES, add_generation_prompt=True, variables={name: "x"}) == "helloTrue"


@pytest.mark.parametrize("source", ["{% if %}", "{{", "{" * 3 + "(" * 5000, "{% for a in b %}" * 200])
def test_a_template_that_does_not_compile_is_an_artefact_error(source: str) -> None:
    for read in (ChatTemplate, check_syntax):
        with pytest.raises(ArtifactError, match="does not compile"):
            read(source)


def test_a_template_that_writes_without_end_is_stopped() -> None:
    source = "{% for i in range(9999) %}{{ messages[0].content }}{% endfor %}"
    with pytest.raises(InvalidRequestError, match="wrote more than 16777216 characters"):
        render(source, [{"role": "user", "content": "x" * 1_000_000}])


def test_the_default_of_several_templates_is_picked() -> None:
    several = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
    assert pick_template(several) == "b"
    assert pick_template(several[:1]) == "a"
    assert pick_template("c") == "c"
    odd: Any
    for odd in (None, 5, [], [5], [{"name": []}], {"default": "a"}):
        assert pick_template(odd) is None
