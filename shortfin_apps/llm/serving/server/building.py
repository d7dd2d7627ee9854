"""Builds the models passed to `serve`, if they are sources rather than model directories."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from shortfin_apps.llm.artifact.advice import is_gguf
from shortfin_apps.llm.artifact.artifact import fitting_host
from shortfin_apps.llm.artifact.file_names import CONFIG, MANIFEST, has_program
from shortfin_apps.llm.builder.sources.catalogue import first_look, is_eagle_head
from shortfin_apps.llm.components.runtime.device import CPU_NAMES, GPU_NAMES
from shortfin_apps.llm.components.runtime.open import (
    check_gpu,
    check_no_list,
    host_of,
    hosts_at_hand,
    is_gpu,
)
from shortfin_apps.llm.contract.device_names import CPU
from shortfin_apps.llm.contract.errors import ArtifactError, BuildError, missing_extra
from shortfin_apps.llm.contract.host_cpu import HostCpu
from shortfin_apps.llm.contract.host_gpu import AUTO, HostGpu, device_of_this_machine
from shortfin_apps.llm.contract.source_name import SCHEMES
from shortfin_apps.llm.model.spec import BuildOptions
from shortfin_apps.llm.serving.server.config import BUILD_SETTINGS, ServerConfig, flag

logger = logging.getLogger(__name__)


class BuildFailed(Exception):
    """The build failed with `status` and has already reported the reason."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the build ended with status {status}")
        self.status = status


def built(config: ServerConfig) -> ServerConfig:
    """Replace sources in the settings by their model directories, building them unless they are cached.

    The draft model is built first, because the model's build leaves only the driver in `device`, without the
    chip. Builds run in a separate process, so that the server does not keep the compiler in memory. Raises
    BuildFailed, BuildError for an unsupported model, and ArtifactError if the GPU to serve it is missing.
    """
    config = _for_this_machine(config)
    draft = config.engine.speculative_model
    if draft is not None and is_eagle_head(str(draft)):
        return _built_with_head(config, draft)
    if draft is not None and is_source(draft):
        sizes = ",".join(map(str, BuildOptions().decode_batch_sizes))
        draws = () if config.engine.is_on_gpu else ("--decode-loop-sizes", sizes)  # the default on GPUs
        config = config.changed(speculative_model=_directory_of(draft, config, (), draws))
    if config.model.artifact is None or not is_source(config.model.artifact):
        for name in BUILD_SETTINGS:
            if getattr(config.model, name) is not None:
                logger.warning(f"`{flag(name)}` has no effect: the model is built already")
        return config
    directory = _directory_of(config.model.artifact, config, BUILD_SETTINGS)
    changed = config.changed(artifact=directory, device=_served_device(config))
    return replace(changed, source=str(config.model.artifact))


def fitted(config: ServerConfig) -> ServerConfig:
    """Choose the device for a model directory by its programs; name the chip of a GPU, as in `hip:gfx942`.

    Without `--device`, or with `auto`, the device is the first GPU for which the artefact has a program, else
    the CPU. By the chip, each process of the server then opens the same program. Raises ArtifactError.
    """
    host, engine = _host(config), config.engine
    if host is None:
        return config
    if isinstance(host, HostCpu):
        return config.changed(device=CPU)
    kind = engine.driver if engine.is_on_gpu else host.kind
    device = f"{kind}:{host.chip}" if host.chip else kind
    logger.info("device: %s", device)
    ids = {} if engine.device_ids or not host.ordinal else {"device_ids": [str(host.ordinal)]}
    return config.changed(device=device, **ids)


def _host(config: ServerConfig) -> HostCpu | HostGpu | None:
    """Return the device for the model directory; None if the settings have nothing to choose from."""
    artifact, engine = config.model.artifact, config.engine
    check_no_list(engine.device)
    if artifact is None and engine.device == AUTO:
        raise ArtifactError("`--device auto` is for model directories and sources; give cpu, hip or cuda")
    if artifact is None:
        return None
    if engine.device == AUTO or not config.given.keys() & {"device", "device_ids"}:
        return fitting_host(artifact, lambda kind: _at_hand(kind, engine.device_ids))
    if not engine.is_on_gpu:
        return None
    host = host_of(engine.driver, engine.device_ids)
    if (
        isinstance(host, HostGpu)
        and host.chip
        and engine.device not in (engine.driver, f"{engine.driver}:{host.chip}")
    ):
        raise ArtifactError(f"`--device {engine.device}`: this machine has {host.chip}; leave the chip out")
    return host


def _at_hand(kind: str, device_ids: Sequence[str]) -> list[HostCpu | HostGpu]:
    """Return this machine's devices of a kind; of GPUs, only the first of `device_ids`, if there are any."""
    return [host_of(kind, device_ids)] if device_ids and is_gpu(kind) else hosts_at_hand(kind)


def _for_this_machine(config: ServerConfig) -> ServerConfig:
    """Replace `--device auto` by this machine's device, if a source is to be built for it."""
    sources = (config.model.artifact, config.engine.speculative_model)
    if config.engine.device != AUTO or not any(each and is_source(each) for each in sources):
        return config
    device, reason = device_of_this_machine()
    logger.info("--device auto: %s, %s", device, reason)
    return config.changed(device=device)


def _built_with_head(config: ServerConfig, head: Path) -> ServerConfig:
    """Build the model together with an EAGLE-3 head, with which it then drafts (`--speculative mtp`)."""
    source = config.model.artifact
    if source is None or not is_source(source):
        raise ArtifactError(
            f"{head} is an EAGLE-3 head, which is built into a model: run `shortfin-llm build MODEL "
            f"--speculative-model {head}` with the model's source, and serve the result with `--speculative "
            "mtp` instead of `--speculative-model`"
        )
    if config.engine.speculative == "ngram":
        raise ArtifactError(
            f"`--speculative ngram` drafts from text, and {head} is an EAGLE-3 head: give one of them"
        )
    directory = _directory_of(source, config, BUILD_SETTINGS, ("--speculative-model", str(head)))
    changed = config.changed(
        artifact=directory, device=_served_device(config), speculative_model=None, speculative="mtp"
    )
    return replace(changed, source=str(source))


def _directory_of(
    source: Path, config: ServerConfig, settings: Sequence[str], flags: Sequence[str] = ()
) -> Path:
    try:
        first_look(str(source))
    except ModuleNotFoundError as error:
        raise BuildError(missing_extra(error) or str(error)) from error
    check_gpu(_served_device(config))  # checked first, as a build for a GPU takes minutes
    command = [*build_command(source, config, settings), *flags]
    return Path(_run([sys.executable, "-m", "shortfin_apps.llm", *command]))


def _served_device(config: ServerConfig) -> str:
    """Return the device on which to serve what was built for the setting's device, or list of devices."""
    device = config.engine.device
    return AUTO if "," in device else device.partition(":")[0]


def is_source(path: Path) -> bool:
    """Return whether `path` must be built: a GGUF file, Hugging Face directory, or name such as `hf:...`."""
    try:
        if path.is_dir():
            is_built = (path / MANIFEST).exists() or has_program(path)
            return (path / CONFIG).is_file() and not is_built
        is_named_gguf = path.suffix == ".gguf"  # the build says what else it is, as a pointer of Git LFS
        return str(path).startswith(SCHEMES) or (path.is_file() and (is_named_gguf or is_gguf(path)))
    except OSError:  # opening it as a model directory reports the problem
        return False


def build_command(source: Path, config: ServerConfig, settings: Sequence[str] = BUILD_SETTINGS) -> list[str]:
    """Return the `build` command for a source, with flags for the given `settings`."""
    words = ["build", str(source), "--in-cache", "--device", _build_device(config.engine.device)]
    for name in settings:
        value = getattr(config.model, name)
        if value is not None:
            words += [flag(name), str(value)]
    return words


def _build_device(device: str) -> str:
    """Return the device as `build` names it."""
    name, colon, chip = device.partition(":")
    known = GPU_NAMES.get(name, "cpu" if name in CPU_NAMES else name)
    return f"{known}{colon}{chip}"


def _run(command: list[str]) -> str:
    """Run `command` and return its output. Raises BuildFailed.

    SIGTERM is passed on to the command. Ctrl-C needs not be: the terminal signals both processes.
    """
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child, _ends_with_us(child):
        printed, _ = child.communicate()
    if child.returncode:
        raise BuildFailed(child.returncode if child.returncode > 0 else 128 - child.returncode)
    return printed.strip()


@contextmanager
def _ends_with_us(child: subprocess.Popen[str]) -> Iterator[None]:
    """Pass SIGTERM on to `child` during the context, if this is the main thread, which handles signals.

    A second SIGTERM kills `child`.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked = False

    def end(*_: object) -> None:
        nonlocal asked
        child.send_signal(signal.SIGKILL if asked else signal.SIGTERM)
        child.send_signal(signal.SIGCONT)  # a stopped process (SIGSTOP) ignores SIGTERM until it continues
        asked = True

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
