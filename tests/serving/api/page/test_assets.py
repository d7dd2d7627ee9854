from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from shortfin_apps.llm.serving.api.page.assets import ASSETS, INDEX, PATHS
from tests.serving.api.harness import Harness


@pytest.mark.parametrize("path", sorted(PATHS))
async def test_a_file_is_sent_whole_and_then_not_again(path: str, harness: Harness) -> None:
    first = await harness.client.get(path)
    assert first.status_code == 200
    assert first.content == ASSETS[path.rpartition("/")[2] or INDEX].content
    tag = first.headers["etag"]
    for known in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        again = await harness.client.get(path, headers={"if-none-match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    other = await harness.client.get(path, headers={"if-none-match": '"other"'})
    assert other.status_code == 200


@pytest.mark.parametrize("path", sorted(PATHS))
async def test_head_has_the_headers_alone(path: str, harness: Harness) -> None:
    head, got = await harness.client.head(path), await harness.client.get(path)
    assert head.status_code == 200
    assert head.content == b""
    unlike = ("x-request-id",)
    assert {k: v for k, v in head.headers.items() if k not in unlike} == {
        k: v for k, v in got.headers.items() if k not in unlike
    }


@pytest.mark.parametrize("path", sorted(PATHS))
async def test_headers_confine_the_page_to_its_origin(path: str, harness: Harness) -> None:
    headers = (await harness.client.get(path)).headers
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["form-action"] == policy["base-uri"] == "'none'"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-cache"


async def test_a_post_to_the_page_is_refused(harness: Harness) -> None:
    assert (await harness.client.post("/")).status_code == 405


async def test_unknown_files_are_not_found(harness: Harness) -> None:
    for path in ("/page/", "/page/none.js", "/page/../app.py", "/page/%2e%2e/app.py", "/page/index.html"):
        assert (await harness.client.get(f"http://test{path}")).status_code == 404


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))


def test_the_page_has_nothing_inline_and_only_relative_addresses() -> None:
    parser = Elements()
    parser.feed(ASSETS[INDEX].content.decode())
    for tag, attributes in parser.elements:
        assert tag != "style"
        assert tag != "script" or attributes["src"], "no script is inline"
        assert not [name for name in attributes if name == "style" or name.startswith("on")]
        for name in ("src", "href"):
            address = attributes.get(name)
            assert address is None or not re.match(r"/|[a-z]+:", address), address


@pytest.mark.parametrize("name", sorted(name for name in ASSETS if name.endswith(".js")))
def test_scripts_ask_for_relative_addresses_alone(name: str) -> None:
    text = ASSETS[name].content.decode()
    assert not re.search(r"https?:|innerHTML|insertAdjacentHTML|\beval\b|new Function", text)
    for asked in re.findall(r'fetch\((["`][^"`]*)', text):
        assert not asked[1:].startswith("/")
    for imported in re.findall(r'from "([^"]+)"', text):
        assert imported.removeprefix("./") in ASSETS


def test_all_of_it_is_small() -> None:
    assert sum(len(asset.content) for asset in ASSETS.values()) < 100_000
