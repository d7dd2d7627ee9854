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
    "errors": (),
    "host_cpu": (),
    "iree_release": (),
    "lone_surrogates": (),
    "restart_delay": (),
    "standard_streams": (),
    "extras": (),
    "visible": (),
    "plain_console": ("visible",),
    "address_space": ("errors",),
    "limited_process": (),
    "abi": (),
    "sampling_rule": (),
    "irpa": (),
    "gpu_code": ("errors",),
    "config": ("errors",),
    "self_test_file": ("errors",),
    "cli": ("address_space", "errors", "extras", "standard_streams", "visible"),
    "__main__": ("cli",),
    # From a model's files to an artefact.
    "builder.blocks": (),
    "builder.model": ("builder.blocks", "config", "errors"),
    "builder.target": ("errors", "host_cpu", "iree_release"),
    "builder.progress": ("plain_console", "visible"),
    "builder.quantise": ("builder.blocks",),
    "builder.graph": ("builder.model",),
    "builder.reference": ("builder.model",),
    "builder.sources": ("builder.blocks", "builder.model", "builder.progress", "errors"),
    "builder.weights": (
        *("abi", "builder.blocks", "builder.graph", "builder.model", "builder.quantise"),
        *("builder.sources", "builder.target", "irpa"),
    ),
    "builder.self_test": (
        *("builder.blocks", "builder.model", "builder.quantise", "builder.reference", "builder.sources"),
        *("builder.target", "builder.weights", "errors", "self_test_file"),
    ),
    "builder.kernels": (
        *(
            "abi",
            "builder.blocks",
            "builder.model",
            "builder.weights",
            "config",
            "errors",
            "iree_release",
            "sampling_rule",
        ),
    ),
    "builder.lowering": (
        *("abi", "sampling_rule"),
        *("builder.blocks", "builder.graph", "builder.kernels", "builder.model", "builder.target"),
        *("builder.weights", "config", "errors"),
    ),
    "builder.program": (
        *(
            "abi",
            "builder.graph",
            "builder.lowering",
            "builder.model",
            "builder.target",
            "builder.weights",
            "errors",
        ),
    ),
    "artifact": ("builder.model", "builder.sources", "config", "errors", "host_cpu", "iree_release"),
    # From an artefact to a running engine.
    "components": (),
    "components.kvcache": (),
    "components.kv_events": ("components.kvcache", "errors"),
    "components.runtime.device": (),  # the interface; the rest of `runtime` is behind it
    "components.runtime.names": (),
    "components.runtime": (
        *("abi", "components.runtime.device", "components.runtime.names", "config", "errors"),
        *("gpu_code", "host_cpu", "iree_release", "irpa"),
    ),
    "components.request": ("components.kvcache", "errors"),
    "components.grammar": ("components.request", "errors", "limited_process"),
    "receipts": ("artifact", "components.grammar", "components.request", "errors"),
    "components.sampling": ("abi", "components.request", "errors", "sampling_rule"),
    "components.speculation": ("components.request",),
    "components.batching": ("abi", "components.kvcache", "components.request", "config", "errors"),
    "components.recorder": ("components.batching", "components.request", "errors"),
    "components.invocation": (
        *("components.batching", "components.kvcache", "components.recorder", "components.request"),
        *("components.runtime.device", "components.sampling", "abi", "config", "errors"),
    ),
    "components.self_test": (
        *("abi", "components.batching", "components.invocation", "components.kvcache", "components.request"),
        *("components.runtime.device", "components.sampling", "config", "errors", "iree_release"),
        "self_test_file",
    ),
    "components.engine": (
        "abi",
        *("components.batching", "components.invocation", "components.kvcache", "components.recorder"),
        *("components.request", "components.sampling", "components.speculation", "errors"),
    ),
    "components.text": ("errors", "limited_process", "lone_surrogates"),
    "components.dialects": ("errors", "lone_surrogates"),
    "components.frontend": (
        *(
            "components.engine",
            "components.grammar",
            "components.invocation",
            "components.kvcache",
            "components.request",
        ),
        *("components.recorder", "components.text", "errors", "receipts"),
    ),
    "components.engine_link": (  # between the process of the engine and those that answer requests
        *("components.engine", "components.frontend", "components.grammar", "components.recorder"),
        *("components.request", "errors"),
    ),
    "components.speculative_loading": (
        *("components.engine", "components.invocation", "components.kvcache", "components.runtime"),
        *("components.runtime.device", "components.speculation", "config", "errors"),
    ),
    "components.loading": (  # where the parts are put together
        *("components.batching", "components.engine", "components.frontend", "components.invocation"),
        *("components.kv_events", "components.kvcache", "components.runtime", "components.runtime.device"),
        *("components.recorder", "components.runtime.names", "components.self_test"),
        "components.speculation",
        *("components.speculative_loading", "config", "errors"),
    ),
    # Tools that read an artefact's program, and the command that makes one.
    "bench.console": ("errors", "plain_console"),
    "inspection": (
        *("abi", "artifact", "bench.console", "builder.target", "builder.weights", "cli"),
        *("components.runtime", "components.runtime.device", "config", "errors", "extras", "gpu_code"),
    ),
    "builder": (
        *("artifact", "builder.model", "builder.progress", "builder.program", "builder.sources"),
        *("builder.self_test", "builder.target", "builder.weights", "cli", "config", "errors", "host_cpu"),
        *("inspection", "visible"),
    ),
    "verify": (
        *("artifact", "bench.console", "cli", "components.invocation", "components.runtime"),
        *("components.runtime.names", "components.self_test", "config", "errors", "host_cpu"),
        "self_test_file",
    ),
    # Over HTTP.
    "api": (
        "components.dialects",
        "components.engine",
        "components.engine_link",
        "components.frontend",
        "components.grammar",
        "components.request",
        "components.text",
        "errors",
        "iree_release",
        "lone_surrogates",
        "receipts",
    ),
    "server": (
        *("address_space", "api", "artifact", "builder.model", "builder.sources"),
        "components.batching",
        "components.dialects",
        *("components.engine_link", "components.frontend", "components.grammar"),
        *("components.kv_events", "components.kvcache", "components.loading", "components.recorder"),
        "components.runtime",
        *("components.runtime.names", "components.self_test", "components.speculation"),
        *("components.speculative_loading", "components.text", "errors", "extras", "iree_release"),
        "receipts",
        *("plain_console", "restart_delay", "self_test_file", "standard_streams", "visible"),
    ),
    "cluster": ("components.runtime.names", "errors", "restart_delay", "server", "visible"),
    # On the other side of HTTP.
    "client": ("errors", "lone_surrogates"),
    "terminal": ("cli", "client", "errors", "lone_surrogates", "plain_console", "visible"),
    "offline": (  # instead of HTTP
        *("cli", "client", "components.frontend", "errors", "plain_console", "server", "terminal", "api"),
        *("lone_surrogates", "visible"),
    ),
    "replay": (  # computes answers again, here or on a server
        *("artifact", "bench.console", "cli", "client", "components.batching", "components.engine"),
        *("components.grammar", "components.kvcache", "components.loading", "components.request"),
        *("components.runtime", "components.runtime.device", "components.text", "config", "errors"),
        *("receipts", "terminal"),
    ),
    "bench.roofline": (  # the one tool that measures a compiled model and no server
        *("abi", "artifact", "bench.console", "builder.graph", "builder.lowering", "builder.model"),
        *("builder.program", "builder.target", "builder.weights", "cli", "components.batching"),
        *("components.invocation", "components.request", "components.runtime"),
        *("components.runtime.device", "config", "errors", "gpu_code", "irpa"),
    ),
    "dump_replay": (
        *("abi", "artifact", "bench.console", "bench.roofline", "cli", "components.batching"),
        *("components.invocation", "components.kvcache", "components.recorder", "components.request"),
        *("components.runtime", "components.runtime.device", "components.sampling", "config", "errors"),
    ),
    "bench": ("bench.console", "bench.roofline", "cli", "client", "errors", "terminal"),
}

# Which parts may import each of these libraries.
ONLY_IN = {
    "shortfin": ("components.runtime", "builder"),
    "iree": ("components.runtime", "builder"),
    "llguidance": ("components.grammar",),
    "opentelemetry": (
        "api.sequence_spans",
        "api.service",
        "api.tracing",
        "server.span_export",
        "server.tracing",
    ),
    "msgspec": (
        *("components.engine_link", "components.kv_events", "components.recorder"),
        *("gpu_code.reading", "offline.batch"),
    ),
    "elftools": ("bench.roofline.profile", "gpu_code.reading"),
    "tinygrad": ("gpu_code.formats",),
    "markdown_it": ("terminal",),
    "fastapi": ("api", "server"),
    "fastapi_offline": ("api",),
    "prompt_toolkit": ("terminal",),
    "shtab": ("terminal",),
    "starlette": ("api", "server"),
    "uvicorn": ("server",),
    "zmq": ("components.kv_events",),
    "cryptography": ("receipts",),
}
# The pure parts, whose tests run in milliseconds because they import nothing heavy.
PURE = ("components.kvcache", "components.request", "components.speculation", "components.batching")
NOT_IN_PURE = ("numpy", "ml_dtypes", "tokenizers", "asyncio", "threading")


def module_name(file: Path) -> str:
    """`shortfin_apps/llm/api/__init__.py` is `shortfin_apps.llm.api`."""
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
        # `LLM` is imported when it is asked for, by name, so that everything may import the root.
        return [
            f"{module} must import nothing, but imports {f}" for f in imported(source) if f != "importlib"
        ]
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
        ("components.kvcache.base", f"from {PACKAGE}.components.request.request import Request"),
        (
            "components.batching.scheduler",
            f"from {PACKAGE}.components.invocation.batch_runner import Invocation",
        ),
        ("components.batching.scheduler", f"from {PACKAGE}.components.runtime.device import Device"),
        ("components.runtime.open", f"from {PACKAGE}.components.request.request import Request"),
        ("components.engine.engine", f"from {PACKAGE}.api import app"),
        ("components.engine.engine", f"from {PACKAGE}.components.runtime.open import open_device"),
        ("components.engine.engine", f"def later():\n    from {PACKAGE}.builder import builder"),
        ("components.invocation.batch_runner", "import iree.runtime as rt"),
        ("api.native", "import shortfin as sf"),
        ("api.native", f"from {PACKAGE}.components.runtime import device"),
        ("builder.graph.rotary", f"from {PACKAGE}.components.invocation import buckets"),
        ("client.client", f"from {PACKAGE}.components.request.messages import Delta"),
        ("client.client", "from fastapi import FastAPI"),
        ("errors", f"from {PACKAGE}.config import ModelConfig"),
    ],
)
def test_a_wrong_import_is_named(module: str, source: str) -> None:
    (sentence,) = violations(f"{PACKAGE}.{module}", source)
    assert sentence.startswith(f"{PACKAGE}.{module} imports ")
