"""Imports point one way, and device libraries stay behind the runtime border; read from the syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "shortfin_apps.llm"
MAX_LINES = 500

# The rooms of the package from the lowest to the highest: each may import only rooms above it in this table,
# and of those only the ones listed. A module belongs to the longest name that it starts with. Everything may
# import the package's root, for `__version__`.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    # What everything may use: the contract of builder and engine, the process and its console.
    "contract": (),
    "limited_process": (),
    "address_space": ("contract",),
    "console": (),
    "setting": (),
    "lone_surrogates": (),
    "restart_delay": (),
    "cli": ("contract", "address_space", "console"),
    "__main__": ("cli",),
    # From a model's files to an artefact.
    "model": ("contract",),
    "artifact": ("contract", "model"),
    "builder.target": ("contract",),
    "builder.progress": ("console",),
    "builder.quantise": ("model",),
    "builder.graph": ("contract", "model"),
    "builder.sources": ("contract", "model", "builder.progress"),
    "builder.weights": (
        *("contract", "model", "builder.target", "builder.quantise", "builder.graph", "builder.sources"),
    ),
    "builder.self_test": (
        *("contract", "model", "builder.target", "builder.quantise", "builder.sources"),
        *("builder.weights",),
    ),
    "builder.kernels": ("contract", "model", "builder.weights"),
    "builder.lowering": (
        *("contract", "model", "builder.target", "builder.graph", "builder.weights", "builder.kernels"),
    ),
    "builder.program": (
        *("contract", "model", "builder.target", "builder.graph", "builder.weights", "builder.kernels"),
        "builder.lowering",
    ),
    # From an artefact to a running engine.
    "components": (),
    "components.kvcache": (),
    "components.kv_events": ("contract", "setting", "components.kvcache"),
    "components.runtime.device": (),
    "components.runtime": ("contract", "components.runtime.device"),
    "components.request": ("contract", "components.kvcache"),
    "components.grammar": ("contract", "limited_process", "components.request"),
    "components.sampling": ("contract", "components.request"),
    "components.speculation": (),
    "components.batching": ("contract", "setting", "components.kvcache", "components.request"),
    "components.recorder": ("contract", "components.request", "components.batching"),
    "components.invocation": (
        *("contract", "components.kvcache", "components.runtime.device", "components.request"),
        *("components.sampling", "components.batching", "components.recorder"),
    ),
    "components.self_test": (
        *("contract", "components.kvcache", "components.runtime.device", "components.request"),
        *("components.sampling", "components.batching", "components.invocation"),
    ),
    "components.engine": (
        *("contract", "components.kvcache", "components.request", "components.sampling"),
        *("components.speculation", "components.batching", "components.recorder"),
        *("components.invocation",),
    ),
    # From an engine to HTTP.
    "serving": (),
    "serving.receipts": ("contract", "artifact", "components.request", "components.grammar"),
    "serving.text": ("contract", "limited_process", "lone_surrogates"),
    "serving.dialects": ("contract", "lone_surrogates"),
    "serving.frontend": (
        *("contract", "components.kvcache", "components.request", "components.grammar"),
        *("components.recorder", "components.invocation", "components.engine", "serving.receipts"),
        *("serving.text",),
    ),
    "serving.engine_link": (
        *("contract", "components.request", "components.grammar", "components.recorder"),
        *("components.engine", "serving.frontend"),
    ),
    "serving.engine_settings": (
        *("contract", "setting", "components.kvcache", "components.kv_events", "components.runtime"),
        *("components.speculation", "components.batching", "serving.frontend"),
    ),
    "serving.speculative_loading": (
        *("contract", "components.kvcache", "components.runtime.device", "components.runtime"),
        *("components.speculation", "components.invocation", "components.engine"),
        *("serving.engine_settings",),
    ),
    "serving.loading": (
        *("contract", "components.kvcache", "components.kv_events", "components.runtime.device"),
        *("components.runtime", "components.batching", "components.recorder", "components.invocation"),
        *("components.self_test", "components.engine", "serving.frontend", "serving.engine_settings"),
        *("serving.speculative_loading",),
    ),
    "serving.http": ("contract", "lone_surrogates", "components.request", "serving.frontend"),
    "serving.api": (
        *("contract", "lone_surrogates", "components.request", "components.grammar", "components.engine"),
        *("serving.receipts", "serving.text", "serving.dialects", "serving.frontend"),
        *("serving.engine_link", "serving.http"),
    ),
    "serving.server": (
        *("contract", "address_space", "console", "setting", "restart_delay", "cli", "model", "artifact"),
        *("builder.sources", "components.runtime.device", "components.runtime", "components.grammar"),
        *("components.recorder", "serving.receipts", "serving.text", "serving.dialects"),
        *("serving.frontend", "serving.engine_link", "serving.engine_settings"),
        *("serving.speculative_loading", "serving.loading", "serving.http", "serving.api"),
    ),
    "server": ("serving.server",),
    # On the other side of HTTP, and tools that read or measure what was built.
    "client": ("contract", "lone_surrogates"),
    "terminal": ("contract", "console", "lone_surrogates", "cli", "client"),
    "offline": (
        *("contract", "console", "setting", "lone_surrogates", "components.engine", "serving.frontend"),
        *("serving.http", "serving.api", "serving.server", "client", "terminal"),
    ),
    "tools": (),
    "tools.bench.console": ("contract", "console"),
    "tools.bench.roofline": (
        *("contract", "model", "artifact", "builder.target", "builder.graph", "builder.weights"),
        *("builder.lowering", "builder.program", "components.runtime.device", "components.runtime"),
        *("components.request", "components.batching", "components.invocation", "tools.bench.console"),
    ),
    "tools.inspection": (
        *("contract", "console", "artifact", "builder.target", "builder.weights"),
        *(
            "components.invocation",
            "components.runtime.device",
            "components.runtime",
            "tools.bench.console",
        ),
    ),
    "builder": (
        *("contract", "console", "model", "artifact", "builder.target", "builder.progress"),
        *("builder.sources", "builder.weights", "builder.self_test", "builder.program"),
    ),
    "tools.verify": (
        *("contract", "artifact", "components.runtime"),
        *("components.invocation", "components.self_test", "tools.bench.console"),
    ),
    "tools.replay": (
        *("contract", "artifact", "components.kvcache", "components.runtime.device"),
        *("components.runtime", "components.request", "components.grammar", "components.batching"),
        *("components.engine", "serving.receipts", "serving.text", "serving.engine_settings"),
        *("serving.loading", "client", "terminal", "tools.bench.console"),
    ),
    "tools.dump_replay": (
        *("contract", "artifact", "components.kvcache", "components.runtime.device"),
        *("components.runtime", "components.request", "components.sampling", "components.batching"),
        *("components.recorder", "components.invocation", "tools.bench.console", "tools.bench.roofline"),
    ),
    "tools.bench": ("contract", "client", "terminal", "tools.bench.console", "tools.bench.roofline"),
    "tools.qualify": (
        *("contract", "console", "model", "artifact", "builder.progress", "components.kvcache"),
        *("components.runtime.device", "components.runtime", "components.request", "components.batching"),
        *("components.invocation", "components.self_test", "serving.receipts", "serving.engine_settings"),
        *("serving.loading", "offline", "builder", "tools.bench.roofline", "tools.verify", "tools.replay"),
        *("tools.bench",),
    ),
    "tools.cluster": (
        *("contract", "console", "restart_delay", "serving.server"),
        *("tools.bench.console",),
    ),
}

# Which parts may import each of these libraries.
ONLY_IN = {
    "shortfin": ("components.runtime", "builder"),
    "iree": ("components.runtime", "builder"),
    "llguidance": ("components.grammar",),
    "opentelemetry": (
        "serving.api.service",
        "serving.http.tracing",
        "serving.server.span_export",
        "serving.server.tracing",
    ),
    "msgspec": (
        *("serving.engine_link", "components.kv_events", "components.recorder"),
        "offline.batch",
    ),
    "elftools": ("tools.bench.roofline.profile",),
    "emulated_gpu": (
        "tools.bench.roofline",
        "contract.gpu_code",
        "tools.inspection.kernels",
        "tools.qualify.emulator",
    ),
    "markdown_it": ("terminal",),
    "fastapi": ("serving.api", "serving.http", "serving.server"),
    "fastapi_offline": ("serving.api",),
    "prompt_toolkit": ("terminal",),
    "shtab": ("terminal",),
    "starlette": ("serving.api", "serving.http", "serving.server"),
    "uvicorn": ("serving.server",),
    "zmq": ("components.kv_events",),
    "cryptography": ("serving.receipts",),
}
# The pure parts, whose tests run in milliseconds because they import nothing heavy.
PURE = ("components.kvcache", "components.request", "components.speculation", "components.batching")
NOT_IN_PURE = ("numpy", "ml_dtypes", "tokenizers", "asyncio", "threading")


def module_name(file: Path) -> str:
    """`shortfin_apps/llm/serving/api/__init__.py` is `shortfin_apps.llm.serving.api`."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(file): file for file in sorted((ROOT / "shortfin_apps" / "llm").rglob("*.py"))}
SOURCES = {module: file.read_text(encoding="utf-8") for module, file in FILES.items()}


@cache
def imported(source: str) -> frozenset[str]:
    """Every module that `source` imports anywhere, by absolute name."""
    return frozenset(_imported(source))


def _imported(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute in this package"
            module = node.module or ""
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                yield inner if inner in FILES else module


def is_in(name: str, parts: tuple[str, ...]) -> bool:
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def part_of(name: str) -> str:
    """The entry of MAY_IMPORT that a module (named below the package) falls under."""
    parts = [part for part in MAY_IMPORT if is_in(name, (part,))]
    assert parts, f"say in MAY_IMPORT what {name} may import"
    return max(parts, key=len)


def may_import(name: str, target: str) -> bool:
    part, other = part_of(name), part_of(target)
    return other == part or other in MAY_IMPORT[part]


def violations(module: str, source: str) -> list[str]:
    """One sentence for each import in `source`, the text of `module`, that the tables above forbid."""
    name = module.removeprefix(PACKAGE).removeprefix(".")
    if not name:
        return [f"{module} must import nothing, but imports {found}" for found in imported(source)]
    part = part_of(name)
    sentences = []
    for found in sorted(imported(source)):
        library = found.partition(".")[0]
        if found.startswith(f"{PACKAGE}."):
            target = found.removeprefix(f"{PACKAGE}.")
            if not may_import(name, target):
                sentences.append(f"{module} imports {found}, but `{part}` may not import `{target}`")
        elif library in ONLY_IN and not is_in(name, ONLY_IN[library]):
            sentences.append(f"{module} imports {found}, which is for {' and '.join(ONLY_IN[library])} only")
        elif library in NOT_IN_PURE and is_in(name, PURE):
            sentences.append(f"{module} imports {found}, but `{part}` is pure Python")
    return sentences


def test_imports_point_one_way() -> None:
    assert [each for module, source in SOURCES.items() for each in violations(module, source)] == []


def test_rooms_stand_in_one_order() -> None:
    """No room imports one below it in the table, so there are no cycles."""
    order = {part: index for index, part in enumerate(MAY_IMPORT)}
    upward = [
        (part, other) for part in MAY_IMPORT for other in MAY_IMPORT[part] if order[other] >= order[part]
    ]
    assert upward == []


def test_modules_have_no_circle() -> None:
    graph = {
        module: {found for found in imported(source) if found in FILES} - {module}
        for module, source in SOURCES.items()
    }
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules of a circle


def test_the_tables_name_what_exists() -> None:
    named = {*MAY_IMPORT, *PURE, *(part for parts in ONLY_IN.values() for part in parts)}
    existing = {module.removeprefix(f"{PACKAGE}.") for module in FILES}
    existing |= {each.rpartition(".")[0] for each in existing}
    assert {part for part in named if part not in existing} == set()


def test_every_arrow_is_used() -> None:
    used: dict[str, set[str]] = {part: set() for part in MAY_IMPORT}
    for module, source in SOURCES.items():
        if name := module.removeprefix(PACKAGE).removeprefix("."):
            inner = (found for found in imported(source) if found.startswith(f"{PACKAGE}."))
            used[part_of(name)] |= {part_of(found.removeprefix(f"{PACKAGE}.")) for found in inner}
    unused = {part: set(others) - used[part] for part, others in MAY_IMPORT.items()}
    assert {part: others for part, others in unused.items() if others} == {}


def test_files_are_short_enough_to_read() -> None:
    lines = {module: len(source.splitlines()) for module, source in SOURCES.items()}
    too_long = {module: count for module, count in lines.items() if count > MAX_LINES}
    assert too_long == {}, "split what changes for different reasons"


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("components.kvcache.trie_cache", "import numpy as np"),
        ("components.kvcache.cache", f"from {PACKAGE}.components.request.request import Request"),
        (
            "components.batching.scheduler",
            f"from {PACKAGE}.components.invocation.batch_runner import Invocation",
        ),
        ("components.batching.scheduler", f"from {PACKAGE}.components.runtime.device import Device"),
        ("components.runtime.open", f"from {PACKAGE}.components.request.request import Request"),
        ("components.engine.engine", f"from {PACKAGE}.serving.api import app"),
        ("components.engine.engine", f"from {PACKAGE}.components.runtime.open import open_device"),
        ("components.engine.engine", f"def later():\n    from {PACKAGE}.builder import builder"),
        ("components.invocation.batch_runner", "import iree.runtime as rt"),
        ("serving.api.native", "import shortfin as sf"),
        ("serving.api.native", f"from {PACKAGE}.components.runtime import device"),
        ("builder.graph.rotary", f"from {PACKAGE}.components.invocation import buckets"),
        ("client.client", f"from {PACKAGE}.components.request.messages import Delta"),
        ("client.client", "from fastapi import FastAPI"),
        ("contract.errors", f"from {PACKAGE}.artifact.artifact import Artifact"),
    ],
)
def test_a_wrong_import_is_named(module: str, source: str) -> None:
    (sentence,) = violations(f"{PACKAGE}.{module}", source)
    assert sentence.startswith(f"{PACKAGE}.{module} imports ")
