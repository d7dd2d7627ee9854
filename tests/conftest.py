"""Fixtures shared by several folders of tests."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import settings

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.builder.cache import user_cache
from shortfin_apps.llm.model.spec import BuildOptions
from tests import hip, kernel_families
from tests.hip import EmulatedGpus

TINY_OPTIONS = BuildOptions()
# Of a draft model: its program draws tokens.
DRAFT_OPTIONS = replace(TINY_OPTIONS, decode_batch_sizes=(1, 4), decode_loop_sizes=(1, 4))
LONGEST = (
    "tests/test_checks.py",
    "tests/integration/test_hip_sample.py",
    "tests/integration/test_smollm2.py",
)

BuildTiny = Callable[[BuildOptions], Artifact]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fault-seed", type=int, help="the one fault schedule to run")
    parser.addoption("--fault-schedules", type=int, help="how many to run on emulated GPUs")


def pytest_configure() -> None:
    # A shell starts background jobs with SIGINT ignored, and children inherit that: tests that press Ctrl-C
    # would wait forever.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Hypothesis limits the time of each example by default, which fails at random on a busy machine.
    settings.register_profile(
        "unhurried", settings.get_profile("ci" if "CI" in os.environ else "default"), deadline=None
    )
    settings.load_profile("unhurried")
    os.environ.setdefault("TRITON_CACHE_DIR", str(user_cache() / "triton"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Has a worker of pytest-xdist send the families of kernels that it saw; others bound the cache."""
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["kernels"] = kernel_families.noted()
    elif not session.config.option.collectonly:
        from tests.compiled_programs import bound_cache  # imports the compiler

        bound_cache()


@pytest.hookimpl(trylast=True)  # after they were shuffled
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begins with what takes longest, so that no process is left with it at the end."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Prepares the process for the tests that it will run.

    The emulated GPU is that of hip.SETTINGS, whichever test loads it first. Imported modules and collected
    tests stay to the end, so no search for garbage looks at them again: with them such searches are so long
    that Python makes few, and memory of devices that were closed stays.
    """
    if any(item.get_closest_marker("emulated") for item in session.items):
        os.environ.update(hip.SETTINGS.environment())
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Adds what a worker of pytest-xdist sent; one that crashed sent nothing."""
    kernel_families.add(getattr(node, "workeroutput", {}).get("kernels", ([], [])))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None]:
    """Reports which families of kernels ran, those that were only compiled, and the AMD GPUs emulated."""
    yield
    for line in filter(None, (kernel_families.summary(), hip.summary())):
        terminalreporter.write_line(line)


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer() -> Generator[None, object, object]:
    """Makes a test that times out print its asyncio tasks' stacks before those of its threads."""
    result = yield
    fail = signal.getsignal(signal.SIGALRM)
    if callable(fail):

        def print_and_fail(signum: int, frame: FrameType | None) -> None:
            _print_tasks()
            fail(signum, frame)

        signal.signal(signal.SIGALRM, print_and_fail)
    return result


def _print_tasks() -> None:
    loop = asyncio._get_running_loop()
    for task in asyncio.all_tasks(loop) if loop else ():
        print(f"\n~~~ {task!r}", file=sys.stderr)
        task.print_stack(file=sys.stderr)


@pytest.fixture(scope="session")
def fault_seed(request: pytest.FixtureRequest) -> int | None:
    seed: int | None = request.config.getoption("--fault-seed")
    return seed


@pytest.fixture(scope="session")
def build_tiny(tmp_path_factory: pytest.TempPathFactory) -> BuildTiny:
    """Builds `random:tiny` with the given options, once a session each.

    Weights and programs come from the user's build cache when they are there.
    """
    from shortfin_apps.llm.builder.builder import build
    from shortfin_apps.llm.builder.progress import QuietProgress

    made: dict[BuildOptions, Artifact] = {}

    def get(options: BuildOptions) -> Artifact:
        if options not in made:
            folder: Path = tmp_path_factory.mktemp("random-tiny") / "artefact"
            made[options] = build("random:tiny", folder, options, QuietProgress())
        return made[options]

    return get


@pytest.fixture(scope="session")
def tiny_artifact(build_tiny: BuildTiny) -> Artifact:
    """`random:tiny` for this CPU, bf16, with the default buckets. Read only."""
    return build_tiny(TINY_OPTIONS)


@pytest.fixture(autouse=True)
def same_chip_between_tests(emulated_gpus: EmulatedGpus) -> Generator[None]:
    """The devices belong to the process, and its next test may be any other one, of `emulated_gpu` too."""
    yield
    emulated_gpus.restore_chip()


@pytest.fixture(scope="session")
def emulated_gpus() -> EmulatedGpus:
    """The emulated AMD GPUs; the library is compiled when it is first used."""
    return EmulatedGpus()
