"""The page at `/` in headless Chromium, over servers of this package."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import axe_playwright_python
import httpx
import pytest
from playwright.sync_api import Browser, Page, Route, ViewportSize, expect, sync_playwright

from shortfin_apps.llm.artifact.artifact import Artifact
from tests.integration.server_process import PATIENCE_S, Service, start, stop
from tests.serving.api.harness import TOKENIZER
from tests.serving.api.loopback import Loopback, ready_server
from tests.serving.api.scripted_engine import forever

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
AXE = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
WIDE: ViewportSize = {"width": 1440, "height": 1000}
PHONE: ViewportSize = {"width": 390, "height": 844}
Scheme = Literal["light", "dark"]
SCHEMES: list[Scheme] = ["light", "dark"]
KEYS = {"api_key": ["user", "other"], "admin_api_key": ["root"]}

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="the page is tested in Chromium (on Debian: apt-get install chromium)"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        expect.set_options(timeout=PATIENCE_S * 1000)
        launched = playwright.chromium.launch(executable_path=CHROMIUM)
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def service(tiny_artifact: Artifact) -> Iterator[Service]:
    running = start(tiny_artifact)
    yield running
    assert stop(running) == 0


@contextmanager
def opened(
    browser: Browser, url: str, *, ready: str | None = "live", may_fail: bool = False, **context: Any
) -> Iterator[Page]:
    """The page in a context of its own; nothing may go wrong in it, and no request leave its origin."""
    with browser.new_context(**{"viewport": WIDE, **context}) as made:
        page = made.new_page()
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda r: None if r.url.startswith(url) else problems.append(r.url))
        # A refused request is written to the console by the browser itself.
        page.on("console", lambda m: None if may_fail or m.type == "log" else problems.append(m.text))
        page.goto(url)
        if ready is not None:
            expect(page.locator("#link-text")).to_have_text(ready)
        yield page
        assert problems == []


class InThread:
    """A server over a scripted engine, in an event loop in a thread; requests run until they are aborted."""

    def __init__(self, **settings: object) -> None:
        self._settings = settings
        self._server: Future[Loopback] = Future()
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self) -> InThread:
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.result(30).port}/"
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def live(self) -> set[str]:
        return {name.rpartition(".")[0] for name in self._server.result().engine.live}

    async def _serve(self) -> None:
        async with ready_server(forever(TOKENIZER, "the "), **self._settings) as server:
            server.engine.gate.clear()
            self._server.set_result(server)
            await asyncio.to_thread(self._over.wait)
            server.engine.gate.set()


@pytest.fixture
def keyed() -> Iterator[InThread]:
    with InThread(**KEYS) as server:
        yield server


@pytest.fixture
def post() -> Iterator[Callable[[InThread, str, str], None]]:
    """Sends requests that go on; they are answered when the server ends."""
    pool = ThreadPoolExecutor(8)

    def send(server: InThread, key: str, request_id: str) -> None:
        headers = {"authorization": f"Bearer {key}", "x-request-id": request_id}
        body = {"prompt": "hi", "max_tokens": 9}
        pool.submit(httpx.post, f"{server.url}v1/completions", json=body, headers=headers, timeout=60)

    yield send
    pool.shutdown(wait=False)  # the server is still there


def give_key(page: Page, key: str) -> None:
    expect(page.locator("#key-dialog")).to_be_visible()
    page.get_by_label("Key", exact=True).fill(key)
    page.get_by_role("button", name="Use it").click()


def no_sideways_scrolling(page: Page) -> bool:
    found: bool = page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    return found


def violations(page: Page) -> list[str]:
    """What axe-core finds, by rule and element."""
    page.evaluate(AXE)
    found = page.evaluate("axe.run()")["violations"]
    return [f"{each['id']}: {node['target']}" for each in found for node in each["nodes"]]


# What there is to see


@pytest.mark.slow
def test_an_idle_server_is_shown(browser: Browser, service: Service) -> None:
    with opened(browser, f"{service.url}/") as page:
        expect(page.locator("#n-running")).to_have_text("0")
        expect(page.locator("#requests-empty")).to_be_visible()
        assert page.title().endswith("shortfin-llm")
        assert page.evaluate("document.getAnimations().length") == 0


def test_a_prompt_is_streamed_and_what_it_did_is_shown(browser: Browser, service: Service) -> None:
    with opened(browser, f"{service.url}/") as page:
        page.locator("#try-prompt").fill("hello")
        page.get_by_label("Tokens at most").fill("10")
        page.get_by_role("button", name="Send").click()
        expect(page.locator("#try-text")).to_contain_text(re.compile("tokens, first after"))
        expect(page.locator("#try-answer")).not_to_be_empty()
        expect(page.locator("#try-send")).to_be_enabled()
        page.locator("#steps-details summary").click()
        row = page.locator("#steps-details tbody tr").filter(has_text="extend")
        expect(row.first).to_be_visible()
        expect(row.first).to_contain_text("dynamic")
        expect(page.locator("#steps-static")).to_contain_text("% on static entries")
        page.locator("#throughput-details summary").click()
        expect(page.locator("#throughput-details tbody tr").first).to_contain_text("now")
        page.locator("#pool-details summary").click()
        expect(page.locator("#pool-details tbody tr")).to_have_count(4)


@pytest.mark.slow
def test_a_wrong_prompt_is_answered_with_the_servers_sentence(browser: Browser, service: Service) -> None:
    with opened(browser, f"{service.url}/", may_fail=True) as page:
        page.locator("#try-prompt").fill("hello " * 5000)
        page.get_by_role("button", name="Send").click()
        expect(page.locator("#try-answer .error")).to_contain_text("context")
        expect(page.locator("#try-text")).to_have_text("No answer.")


@pytest.mark.slow
def test_a_stop_ends_the_request(browser: Browser) -> None:
    with InThread() as server, opened(browser, server.url) as page:
        page.locator("#try-prompt").press("Control+Enter")
        expect(page.locator("#requests tr")).to_have_count(1)
        page.locator("#try-prompt").press("Escape")
        expect(page.locator("#try-text")).to_contain_text("Stopped")
        expect(page.locator("#requests tr")).to_have_count(0)
        assert server.live() == set()


# Who may see it


@pytest.mark.slow
def test_a_key_is_asked_for_and_kept_by_the_tab_alone(browser: Browser, keyed: InThread) -> None:
    with opened(browser, keyed.url, ready=None, may_fail=True) as page:
        give_key(page, "wrong")
        expect(page.locator("#key-why")).to_contain_text("does not know")
        give_key(page, "user")
        expect(page.locator("#link-text")).to_have_text("live")
        page.reload()
        expect(page.locator("#link-text")).to_have_text("live")
        assert "user" not in page.evaluate("JSON.stringify(localStorage) + document.cookie")
        other = page.context.new_page()
        other.goto(keyed.url)
        expect(other.locator("#key-dialog")).to_be_visible()


@pytest.mark.slow
def test_who_declines_to_give_a_key_is_not_asked_again(browser: Browser, keyed: InThread) -> None:
    with opened(browser, keyed.url, ready=None, may_fail=True) as page:
        expect(page.locator("#key-dialog")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.locator("#link-text")).to_have_text("needs an API key")
        expect(page.locator("#key-dialog")).not_to_be_visible()


@pytest.mark.slow
def test_an_admin_key_sees_and_aborts_the_requests_of_all(
    browser: Browser, keyed: InThread, post: Callable[[InThread, str, str], None]
) -> None:
    post(keyed, "user", "of-user")
    post(keyed, "other", "of-other")
    with opened(browser, keyed.url, ready=None, may_fail=True) as page:
        give_key(page, "root")
        rows = page.locator("#requests tr")
        expect(rows).to_have_count(2)
        page.get_by_role("button", name="Abort request of-other").click()
        expect(page.locator("#abort-text")).to_have_text("Request of-other is aborted.")
        expect(rows).to_have_count(1)
        assert keyed.live() == {"of-user"}
        page.on("dialog", lambda dialog: dialog.accept())
        page.get_by_role("button", name="Abort all").click()
        expect(rows).to_have_count(0)
        assert keyed.live() == set()


@pytest.mark.slow
def test_another_key_sees_its_own_requests_and_cannot_abort_all(
    browser: Browser, keyed: InThread, post: Callable[[InThread, str, str], None]
) -> None:
    post(keyed, "user", "of-user")
    post(keyed, "other", "of-other")
    with opened(browser, keyed.url, ready=None, may_fail=True) as page:
        give_key(page, "user")
        rows = page.locator("#requests tr")
        expect(rows).to_have_count(1)
        expect(rows).to_contain_text("of-user")
        expect(page.locator("#abort-all")).to_be_hidden()
        page.locator("#abort-all").evaluate("button => { button.hidden = false; button.disabled = false; }")
        page.on("dialog", lambda dialog: dialog.accept())
        page.locator("#abort-all").click()
        expect(page.locator("#abort-text")).to_contain_text("needs an admin key")
        assert keyed.live() == {"of-user", "of-other"}


@pytest.mark.slow
def test_focus_stays_in_the_table_when_a_row_ends(
    browser: Browser, keyed: InThread, post: Callable[[InThread, str, str], None]
) -> None:
    for name in ("one", "two", "three"):
        post(keyed, "user", name)
    with opened(browser, keyed.url, ready=None, may_fail=True) as page:
        give_key(page, "root")
        rows = page.locator("#requests tr")
        expect(rows).to_have_count(3)
        names = rows.evaluate_all("rows => rows.map(row => row.dataset.id.split('.')[0])")
        page.get_by_role("button", name=f"Abort request {names[0]}", exact=True).focus()
        page.keyboard.press("Enter")
        expect(rows).to_have_count(2)
        expect(page.get_by_role("button", name=f"Abort request {names[1]}", exact=True)).to_be_focused()


# A feed as the tests want it

ABOUT = {
    "version": "0", "model": "scripted", "has_chat": True, "max_tokens": 4096, "max_requests": 512,
    "page_tokens": 16, "is_admin": True, "sees_all": True,
}  # fmt: skip
COUNTERS = ("prompt_tokens", "cached_tokens", "generation_tokens", "steps", "device_s")


def snapshot(at: float, num_running: int, num_waiting: int = 0) -> dict[str, Any]:
    """Of requests with 8 pages each, of which the first 2 are shared by all."""
    requests = [
        {
            "id": f"{index:032x}.{index}", "rid": f"{index:032x}", "tenant": f"tenant-{index % 5}",
            "state": "running" if index < num_running else "waiting", "prompt": 128, "cached": 32,
            "computed": 200, "output": 100, "max": 1000, "pages": 8, "age": at,
        }
        for index in range(num_running + num_waiting)
    ]  # fmt: skip
    runs = [2, 2, *(number for index in range(num_running) for number in (4 + index, 6)), 1, 100, 0, 200]
    return {
        "at": at, "running": num_running, "waiting": num_waiting, "requests": requests,
        "pages": {"total": 302 + 6 * num_running, "free": 200, "cached": 100, "leased": 2 + 6 * num_running},
        "window_pages": None, "window_map": None, "map": {"step": 1, "runs": runs},
        "counters": dict.fromkeys(COUNTERS, 100 * at),
        "tenants": [[f"tenant-{index}", num_running // 5, num_waiting // 5] for index in range(5)],
        "steps": [[int(100 * at) + i, at - i / 50, 0.018, "decode_bs32", "static", 0, 24, 8] for i in (1, 0)],
    }  # fmt: skip


def events(*snapshots: dict[str, Any]) -> str:
    parts = [f"event: about\ndata: {json.dumps(ABOUT)}\n\n"]
    return "".join([*parts, *(f"data: {json.dumps(each)}\n\n" for each in snapshots)])


def scripted(page: Page, url: str, body: str) -> None:
    """Shows what `body` says once; after that, the server does not answer."""
    answers = [body]

    def answer(route: Route) -> None:
        if answers:
            route.fulfill(status=200, content_type="text/event-stream", body=answers.pop())
        else:
            route.abort()

    page.route("**/page/events", answer)
    page.goto(url)


@pytest.mark.slow
@pytest.mark.parametrize("viewport", [WIDE, PHONE])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("running", [0, 40])
def test_axe_finds_nothing_and_nothing_is_wider_than_the_window(
    browser: Browser, service: Service, viewport: ViewportSize, scheme: Scheme, running: int
) -> None:
    with browser.new_context(viewport=viewport, color_scheme=scheme) as context:
        page = context.new_page()
        scripted(page, service.url, events(snapshot(1, running, running), snapshot(2, running, running)))
        expect(page.locator("#requests tr")).to_have_count(2 * running)
        assert no_sideways_scrolling(page)
        for summary in page.locator("summary").all():
            summary.click()
        assert no_sideways_scrolling(page)
        assert violations(page) == []
        page.get_by_role("button", name="API key").click()
        assert violations(page) == []


@pytest.mark.slow
def test_a_full_queue_is_shown_whole(browser: Browser, service: Service) -> None:
    with browser.new_context(viewport=WIDE) as context:
        page = context.new_page()
        scripted(page, service.url, events(snapshot(1, 256, 256), snapshot(2, 256, 256)))
        expect(page.locator("#requests tr")).to_have_count(512)
        expect(page.locator("#n-waiting")).to_have_text("256")
        expect(page.locator("#tenants tr")).to_have_count(5)
        assert "alarm" in (page.locator("dl > div", has_text="Waiting").get_attribute("class") or "")


@pytest.mark.slow
def test_the_pages_of_a_request_stand_out_when_it_is_pointed_at(browser: Browser, service: Service) -> None:
    with browser.new_context(viewport=WIDE) as context:
        page = context.new_page()
        scripted(page, service.url, events(snapshot(1, 8), snapshot(2, 8)))
        expect(page.locator("#requests tr")).to_have_count(8)
        page.wait_for_function("() => document.getElementById('pool').width > 300")
        picture = "document.getElementById('pool').toDataURL()"
        before = page.evaluate(picture)
        page.locator("#requests tr button").first.focus()
        page.wait_for_function(f"before => {picture} !== before", arg=before)
        page.locator("#theme").focus()
        page.wait_for_function(f"before => {picture} === before", arg=before)


# Without a mouse, and when something goes wrong


@pytest.mark.slow
def test_every_control_is_reached_with_the_tabulator(browser: Browser, service: Service) -> None:
    with opened(browser, f"{service.url}/") as page:
        page.keyboard.press("Tab")
        expect(page.locator(".skip")).to_be_focused()
        focused = []
        for _ in range(30):
            focused.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
            page.keyboard.press("Tab")
        names = "key-button theme SUMMARY requests-region try-prompt try-tokens try-temperature try-send"
        assert set(names.split()) <= set(focused)
        ordered = [name for name in focused if name.startswith(("key", "theme", "requests", "try"))]
        assert ordered[:4] == ["key-button", "theme", "requests-region", "try-prompt"]


@pytest.mark.slow
def test_colours_follow_the_system_until_the_button_says_otherwise(
    browser: Browser, service: Service
) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    with opened(browser, f"{service.url}/", color_scheme="dark") as page:
        dark = page.evaluate(paper)
        page.emulate_media(color_scheme="light")
        light = page.evaluate(paper)
        assert dark != light
        button = page.locator("#theme")
        for text, colour in (("Light", light), ("Dark", dark)):
            button.click()
            expect(button).to_have_text(text)
            assert page.evaluate(paper) == colour
        page.reload()
        expect(button).to_have_text("Dark")
        assert page.evaluate(paper) == dark


@pytest.mark.slow
def test_a_lost_connection_is_said_and_made_again(browser: Browser, service: Service) -> None:
    with browser.new_context() as context:
        page = context.new_page()
        scripted(page, service.url, events(snapshot(1, 1)))  # which ends at once
        expect(page.locator("#link-text")).to_contain_text("the connection was lost; trying again")
        page.unroute("**/page/events")
        expect(page.locator("#link-text")).to_have_text("live")
        expect(page.locator("#requests tr")).to_have_count(0)


@pytest.mark.slow
def test_a_tab_that_is_not_seen_lets_go_of_its_feed(browser: Browser) -> None:
    with InThread() as server, browser.new_context() as context:
        page = context.new_page()
        page.clock.install()
        page.goto(server.url)
        expect(page.locator("#link-text")).to_have_text("live")
        hide = "is => { Object.defineProperty(document, 'hidden', { get: () => is, configurable: true });"
        tell = f"{hide} document.dispatchEvent(new Event('visibilitychange')); }}"
        page.evaluate(tell, True)
        page.clock.fast_forward(6000)
        expect(page.locator("#link-text")).to_contain_text("paused")
        page.evaluate(tell, False)
        expect(page.locator("#link-text")).to_have_text("live")
