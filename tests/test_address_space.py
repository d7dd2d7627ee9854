from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator

import pytest

from shortfin_apps.llm import address_space
from shortfin_apps.llm.address_space import AddressSpaceError
from shortfin_apps.llm.artifact.artifact import Artifact
from tests.integration.server_process import PATIENCE_S, llm

ENOUGH = 1 << 50


@pytest.fixture
def limit() -> Iterator[int]:
    """Sets a limit on this process that the test does not reach."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (ENOUGH, before[1]))
    yield ENOUGH
    resource.setrlimit(resource.RLIMIT_AS, before)


def test_without_a_limit_nothing_is_refused() -> None:
    address_space.check_total(ENOUGH)
    address_space.check_more(ENOUGH)


def test_with_a_limit_larger_needs_are_refused(limit: int) -> None:
    address_space.check_total(limit)
    with pytest.raises(AddressSpaceError, match="ulimit -v"):
        address_space.check_total(limit + 1)
    address_space.check_more(limit // 2)
    with pytest.raises(AddressSpaceError, match="in use"):
        address_space.check_more(limit)  # some of it is taken already


def limited(megabytes: int, command: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs a command with limited address space, as `prlimit --as` does."""
    set_limit = (
        "import os, resource, sys;"
        f"resource.setrlimit(resource.RLIMIT_AS, ({megabytes}_000_000,) * 2);"
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    return subprocess.run(
        [sys.executable, "-c", set_limit, *command], capture_output=True, text=True, timeout=PATIENCE_S
    )


@pytest.mark.parametrize("megabytes", [100, 160, 200, 250])
def test_too_little_space_for_the_libraries_is_one_sentence(megabytes: int) -> None:
    ended = limited(megabytes, llm("serve", "no-such-directory"))
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"error: the address space of this process is limited to {megabytes} MB")
    assert ended.stderr.count("\n") == 1


def test_too_little_space_for_the_model_is_one_sentence(tiny_artifact: Artifact) -> None:
    after_imports = (
        "import resource, sys; from shortfin_apps.llm import address_space;"
        "from shortfin_apps.llm.serving.server import command, serve;"
        "limit = address_space._taken_bytes() + 16_000_000;"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit));"
        "sys.exit(command.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", after_imports, str(tiny_artifact.vmfb.parent), "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: the address space of this process is limited to")
    assert "loading this model" in ended.stderr
    assert ended.stderr.count("\n") == 1
