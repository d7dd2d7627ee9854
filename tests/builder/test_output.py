"""The output folder: links, concurrent builds, and builds killed at any point. Compilers are fakes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shortfin_apps.llm.artifact import file_names
from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.artifact.file_record import wrong_files
from shortfin_apps.llm.builder import builder
from shortfin_apps.llm.builder.builder import build
from shortfin_apps.llm.builder.output import exclusive, resolve_output
from shortfin_apps.llm.builder.progress import QuietProgress
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.model.spec import BuildOptions
from tests.builder.fake_compiler import FakeCompiler

LONGEST_WAIT_S = 60

fake_compile = FakeCompiler().compile_model


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("SHORTFIN_LLM_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(builder, "compile_model", fake_compile)


def build_tiny(out: Path, top_k: int = 64) -> Artifact:
    return build("random:tiny", out, BuildOptions(top_k=top_k), QuietProgress())


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def refusal(out: Path) -> str:
    with pytest.raises(BuildError) as refused:
        build_tiny(out)
    return str(refused.value)


def test_a_linked_output_is_resolved(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("real")
    for top_k in (64, 5, 64):
        build_tiny(tmp_path / "link", top_k)
        assert names(tmp_path) == {"link", "real"}
        assert (tmp_path / "link").is_symlink()
    assert names(tmp_path / "real") == {*file_names.FILES, file_names.MANIFEST}


def test_a_loop_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert str(tmp_path / "a") in refusal(tmp_path / "a")


def test_a_link_in_the_place_of_the_lock_creates_no_other_file(tmp_path: Path) -> None:
    (tmp_path / ".out.lock").symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="symbolic links"), exclusive(tmp_path / "out", lambda: None):
        pass
    assert not (tmp_path / "other").exists()


def test_an_unknown_users_home_is_a_name_like_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_output(Path("~nobody-of-this-name/out")) == tmp_path / "~nobody-of-this-name/out"


def test_a_path_that_is_not_utf_8_is_refused_before_a_build(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="is not UTF-8"):
        resolve_output(tmp_path / "a\udcff")


def test_the_root_is_refused() -> None:
    assert (
        refusal(Path("/"))
        == "/: is the root of a file system, which cannot be replaced; name a folder inside it"
    )


@pytest.mark.parametrize("out", [".", "..", "../here"])
def test_the_current_folder_is_refused(out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert "this is the current folder" in refusal(Path(out))
    build_tiny(Path("new"))
    assert names(tmp_path / "here") == {"new"}


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("words")
    assert "exists and is a file, not an artefact" in refusal(tmp_path / "file")
    assert "is a file; choose another folder" in refusal(tmp_path / "file" / "x" / "y")
    assert (tmp_path / "file").read_text() == "words"


def test_an_unwritable_parent_is_refused_before_downloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbid(path: Path, mode: int) -> bool:  # the tests may run as root, which ignores file modes
        return path != tmp_path

    monkeypatch.setattr(os, "access", forbid)
    monkeypatch.setattr(builder, "open_source", None)
    message = f"{tmp_path}/x/y: cannot be created, as {tmp_path} is not writable; choose another folder"
    assert refusal(tmp_path / "x" / "y") == message
    monkeypatch.setenv("SHORTFIN_LLM_CACHE", str(tmp_path / "x"))
    assert refusal(tmp_path / "x" / "y").endswith("; set SHORTFIN_LLM_CACHE to another folder")


def test_a_folder_without_support_for_files_is_refused() -> None:
    assert "No such file or directory" in refusal(Path("/proc/model"))


def test_a_working_name_is_refused(tmp_path: Path) -> None:
    assert "choose another" in refusal(tmp_path / ".a.partial")


def test_a_folder_of_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    build_tiny(tmp_path / "empty")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("words")
    assert "exists and is not an artefact" in refusal(tmp_path / "thesis")
    assert names(tmp_path / "thesis") == {"thesis.tex"}


def test_an_artefact_with_a_foreign_file_is_refused(tmp_path: Path) -> None:
    """A web page has a manifest.json as well."""
    build_tiny(tmp_path / "a")
    (tmp_path / "a" / "notes.txt").write_text("words")
    assert "contains `notes.txt`" in refusal(tmp_path / "a")
    assert (tmp_path / "a" / "notes.txt").read_text() == "words"


def test_a_failed_build_removes_the_parents_it_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "compile_model", fail)
    refusal(tmp_path / "a" / "b" / "c")
    assert names(tmp_path) == set()


def fail(*args: object) -> None:
    raise BuildError("no")


# A build of {out} in its own process; its compiler prints a line when it starts and waits for one to end.
SLOW = """
import sys
from pathlib import Path
from shortfin_apps.llm.builder import builder
from shortfin_apps.llm.builder.progress import PlainProgress
from shortfin_apps.llm.builder.device_list import resolve_targets
from shortfin_apps.llm.model.spec import BuildOptions
from tests.builder.test_output import fake_compile
def compile(*args):
    print("compiling", flush=True)
    sys.stdin.readline()
    return fake_compile(*args)
builder.compile_model = compile
builder.build("random:tiny", Path({out!r}), BuildOptions(), PlainProgress())
"""


@contextmanager
def slow_build(out: Path, cache: Path) -> Iterator[subprocess.Popen[str]]:
    """A build that is killed after LONGEST_WAIT_S, so that a reader of its output does not wait for ever."""
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW.format(out=str(out))],
        env={**os.environ, "SHORTFIN_LLM_CACHE": str(cache), "PYTHONPATH": str(Path(__file__).parents[2])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    guard = threading.Timer(LONGEST_WAIT_S, process.kill)
    guard.start()
    try:
        with process:
            yield process
    finally:
        guard.cancel()
        process.kill()


def lines_until(process: subprocess.Popen[str], word: str) -> list[str]:
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if word in line:
            return lines
    raise AssertionError(f"`{word}` did not come after {lines}")


def test_builds_through_different_paths_share_a_lock(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with (
        slow_build(tmp_path / "real" / "a", tmp_path / "cache 1") as first,
        slow_build(tmp_path / "link" / "a", tmp_path / "cache 2") as second,
    ):
        runs, waits = (first, second) if _is_first(first, second) else (second, first)
        lines_until(waits, f"waiting for another build of {tmp_path}/real/a")
        runs.communicate("go\n", timeout=LONGEST_WAIT_S)
        _, said = waits.communicate("", timeout=LONGEST_WAIT_S)
    assert (runs.returncode, waits.returncode) == (0, 0)
    assert "is up to date" in said
    assert names(tmp_path / "real") == {"a"}
    assert_whole(tmp_path / "real" / "a")


def _is_first(first: subprocess.Popen[str], second: subprocess.Popen[str]) -> bool:
    """Whether the first of two builds has the lock, because it compiles."""
    assert first.stdout is not None
    assert second.stdout is not None
    poll = select.poll()  # unlike `select`, it takes descriptors above 1023
    for output in (first.stdout, second.stdout):
        poll.register(output, select.POLLIN)
    return first.stdout.fileno() in dict(poll.poll(LONGEST_WAIT_S * 1000))


def assert_whole(out: Path) -> Artifact:
    artifact = Artifact.open(out, for_this_host=False)
    assert artifact.manifest is not None
    assert wrong_files(out, artifact.manifest.files) == {}
    return artifact


# Replaces the artefact {root}/a, and dies with SIGKILL before the N-th time that it is about to touch a file
# under {root}, for each N, in a process forked for it with a copy of {root}; prints the number of deaths.
DYING = """
import os, shutil, signal, sys
from pathlib import Path
from shortfin_apps.llm.builder import builder
from shortfin_apps.llm.builder.progress import QuietProgress
from shortfin_apps.llm.builder.device_list import resolve_targets
from shortfin_apps.llm.model.spec import BuildOptions
from tests.builder.test_output import fake_compile
root = Path({root!r})
builder.compile_model = fake_compile
EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "fcntl.flock", "fcntl.ioctl")
left = None
def count(event, args):
    global left
    if left is None or event not in EVENTS or (event == "open" and not here in str(args[0])):
        return
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(count)
def build(folder, options):
    os.environ["SHORTFIN_LLM_CACHE"] = str(folder / "cache")
    builder.build("random:tiny", folder / "a", options, QuietProgress())
build(root / "start", BuildOptions(decode_batch_sizes=(1,)))
resolve_targets({device!r})  # once, for all children
for number in range(1000):
    folder = root / str(number)
    shutil.copytree(root / "start", folder)
    child = os.fork()
    if child == 0:
        here = str(folder)
        left = number
        build(folder, BuildOptions(weights="f32", device={device!r}))
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if status == 0:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL, status
print(number)
"""


@pytest.mark.slow
def test_a_build_killed_at_any_point_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = "cpu:znver4,x86-64-v4,x86-64-v3"
    script = DYING.format(root=str(tmp_path), device=device)
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
        timeout=4 * LONGEST_WAIT_S,
    )
    assert done.returncode == 0, done.stderr
    deaths = int(done.stdout)
    assert deaths > 20
    old = assert_whole(tmp_path / "start" / "a")
    new = assert_whole(tmp_path / str(deaths) / "a")
    for number in range(deaths):
        folder = tmp_path / str(number)
        monkeypatch.setenv("SHORTFIN_LLM_CACHE", str(folder / "cache"))
        left = folder / (".a.previous" if not (folder / "a").exists() else "a")
        assert assert_whole(left).manifest in (old.manifest, new.manifest)
        again = build(
            "random:tiny", folder / "a", BuildOptions(weights="f32", device=device), QuietProgress()
        )
        assert again.manifest == new.manifest
        assert_whole(folder / "a")
        assert names(folder) == {"a", "cache"}
        assert not list((folder / "cache").rglob("*.partial"))


def test_the_next_build_sweeps_leftovers(tmp_path: Path) -> None:
    with slow_build(tmp_path / "a", tmp_path / "cache") as process:
        lines_until(process, "compile")
        assert process.stdout is not None
        assert process.stdout.readline() == "compiling\n"
        process.send_signal(signal.SIGKILL)
    assert names(tmp_path) == {".a.lock", ".a.partial", "cache"}
    build_tiny(tmp_path / "a")
    assert names(tmp_path) == {"a", "cache"}


def test_an_interrupted_swap_is_undone(tmp_path: Path) -> None:
    old = build_tiny(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / ".a.previous")
    (tmp_path / ".a.partial").mkdir()
    assert build_tiny(tmp_path / "a") == old
    assert names(tmp_path) == {"a"}
