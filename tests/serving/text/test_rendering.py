from __future__ import annotations

import os
import selectors
import signal
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm import limited_process
from shortfin_apps.llm.contract.errors import ArtifactError, InvalidRequestError, OverloadedError
from shortfin_apps.llm.limited_process import LimitedProcess, Limits
from shortfin_apps.llm.serving.text import rendering
from shortfin_apps.llm.serving.text.chat_template import MAX_REASON_CHARS, ChatTemplate
from shortfin_apps.llm.serving.text.rendering import BoundedTemplate

pytestmark = pytest.mark.timeout(60)

MESSAGES = [{"role": "user", "content": "hello"}]
QUICK = Limits(cpu_s=0.2, wall_s=1e3, memory_bytes=64 << 20)
ECHO = "{{ messages | tojson }}{{ add_generation_prompt }}{{ given | tojson }}"


def render(template: BoundedTemplate | ChatTemplate, given: Any = None) -> str:
    return template.render(MESSAGES, add_generation_prompt=True, variables={"given": given})


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ELSEWHERE, HERE = BoundedTemplate(ECHO), ChatTemplate(ECHO)


@given(given=VALUES)
def test_a_text_is_that_of_a_template_in_this_process(given: Any) -> None:
    assert render(ELSEWHERE, given) == render(HERE, given)


def test_lone_surrogates_and_long_texts_come_back() -> None:
    for text in ("\ud800", "\n" * 1_000_000, "\u2028é😀" * 100_000):
        assert render(BoundedTemplate("{{ given }}"), text) == text


HOSTILE = {
    "slice": "{{ 'a'|slice(900000000)|list }}",
    "center": "{{ 'a'.center(2000000000) }}",
    "center, computed as it compiles": "{{ 'a'|center(2000000000) }}",
    "product": "{{ 'a' * 10**10 }}",
    "list": "{{ ([0] * 10**6) * 10**6 }}",
    "power": "{{ messages|length + 9 ** (9 ** 9) }}",
    "format": "{{ '%2000000000d'|format(1) }}",
    "silent": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "recursion": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(99) }}",
    "doubling": "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "replace": "{% set x = 'aa' * 9999 %}{{ x|replace('a', x)|replace('a', x)|length }}",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_template_that_takes_too_much_is_ended(source: str) -> None:
    template = BoundedTemplate(source, QUICK)
    with pytest.raises(
        InvalidRequestError, match=r"takes more than 0\.2 s of a processor, .* or 64 MiB"
    ) as caught:
        render(template)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("source", ["{{ raise_exception('no' * 5000) }}", "{% " + "x" * 9999 + " %}"])
def test_the_reason_of_a_refusal_is_short(source: str) -> None:
    """A template may write the messages in it, which then went through the process and into the answer."""
    with pytest.raises((InvalidRequestError, ArtifactError)) as caught:
        render(BoundedTemplate(source))
    assert len(str(caught.value)) < MAX_REASON_CHARS + 100


def test_after_a_hostile_message_the_next_one_is_rendered() -> None:
    """As where a caller's variables decide how much a template does."""
    template = BoundedTemplate("{{ 'a'.center(given) }}", QUICK)
    with pytest.raises(InvalidRequestError, match="takes more than"):
        render(template, 2_000_000_000)
    assert render(template, 3) == " a "


def test_a_suspension_is_not_blamed_on_the_messages() -> None:
    """For the clock it lasts an hour between a worker's two answers."""
    hours = count(step=3600)
    template = BoundedTemplate(HOSTILE["silent"], QUICK, lambda: float(next(hours)))
    with pytest.raises(OverloadedError, match="try again"):
        render(template)


def test_a_refusal_keeps_its_words_and_its_worker() -> None:
    template = BoundedTemplate("{% if given %}{{ raise_exception('no ' ~ given) }}{% endif %}ok", QUICK)
    with pytest.raises(InvalidRequestError, match="refused these messages: no tools"):
        render(template, "tools")
    [worker] = template._workers.idle
    assert render(template) == "ok"
    assert template._workers.idle == [worker]


def test_a_template_that_does_not_compile_is_an_error_of_the_artefact() -> None:
    with pytest.raises(ArtifactError, match="does not compile"):
        BoundedTemplate("{% if %}")
    with pytest.raises(ArtifactError, match="does not compile: No filter named 'nope'"):
        BoundedTemplate("{{ 1|nope }}").prepare()
    prepared = BoundedTemplate("ok")
    prepared.prepare()
    assert len(prepared._workers.idle) == 1


def test_threads_render_at_once() -> None:
    template = BoundedTemplate("{{ given }}")
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda n: render(template, n), range(200))) == [str(n) for n in range(200)]
    assert 1 <= len(template._workers.idle) <= 4


def workers_of(process: LimitedProcess) -> list[int]:
    pid = process.process.pid
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def end(pid: int) -> None:
    """Kills a process and returns when it has ended."""
    fd = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        selector.select()
    os.close(fd)


def own_process(cpu_s: float) -> tuple[BoundedTemplate, LimitedProcess]:
    """A template with a process that no other has, as no other has its limits."""
    template = BoundedTemplate("{{ given }}", Limits(cpu_s=cpu_s, wall_s=1e3))
    template.prepare()
    assert template._process is not None
    return template, template._process


def test_a_worker_that_was_killed_is_replaced() -> None:
    template, process = own_process(101)
    [worker] = workers_of(process)
    end(worker)
    assert render(template, 1) == "1"


def test_a_process_that_was_killed_is_replaced() -> None:
    template, process = own_process(102)
    [worker] = workers_of(process)
    end(process.process.pid)
    end(worker)
    assert process.is_over
    assert render(template, 1) == "1"


def test_where_no_process_can_be_started_a_request_may_be_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: object) -> None:
        raise BlockingIOError

    monkeypatch.setattr(rendering, "LimitedProcess", refuse)
    with pytest.raises(OverloadedError, match="try again"):
        render(BoundedTemplate("a", Limits(cpu_s=103, wall_s=1e3)))


def test_templates_share_a_process_which_ends_with_them() -> None:
    first, process = own_process(104)
    second, same = own_process(104)
    assert process is same
    popen = process.process
    del process, same, first
    assert render(second, 1) == "1"
    assert popen.poll() is None
    del second
    assert popen.poll() is not None


def test_a_process_that_is_stopped_makes_no_request_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited_process, "SLACK_S", 0.0)
    template = BoundedTemplate("{{ given }}", Limits(cpu_s=103, wall_s=0.2))
    process = rendering._process(Limits(cpu_s=103, wall_s=0.2))
    os.kill(process.process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(OverloadedError, match="try again"):
            render(template, 1)
    finally:
        os.kill(process.process.pid, signal.SIGCONT)
