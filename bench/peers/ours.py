"""This project's server."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from bench.peers.cache import Cache
from bench.peers.kinds import WeightKind
from bench.peers.requirements import Needs, program
from bench.peers.server import Launch
from bench.peers.subject import Subject

DISK_BYTES = 400_000_000  # for an artefact and its source


class Ours:
    """One server for all workloads. `artefact` None: build one; `arguments` are added to `serve`."""

    def __init__(
        self,
        cache: Cache,
        threads: int,
        subject: Subject,
        artefact: Path | None,
        arguments: Sequence[str],
        label: str = "ours",
    ) -> None:
        self.label = label
        self._cache = cache
        self._threads = threads
        self._subject = subject
        self._artefact = artefact
        self._arguments = arguments

    def needs(self, weights: WeightKind) -> Needs:
        del weights
        if self._artefact is not None:
            return Needs()
        return Needs(tuple(program("nice", "coreutils")), DISK_BYTES)

    def set_up(self, weights: WeightKind) -> None:
        if self._artefact is None:
            # Not `once`: the program may have changed, and `build` has its own cache.
            self._artefact = self._cache.root / f"ours-{self._subject.name}-{weights.ours}"
            source, device = self._subject.source, self._subject.device
            command: list[str | Path] = [sys.executable, "-m", "shortfin_apps.llm", "build", source]
            command += ["-o", self._artefact, "--device", device, "--weights", weights.ours]
            self._cache.say(f"ours: build {source} for {device}")
            self._cache.run("ours", command)

    def launch(self, port: int, clients: int) -> Launch:
        del clients
        command = [sys.executable, "-m", "shortfin_apps.llm", "serve", str(self._artefact)]
        command += ["--port", str(port), "--threads", str(self._threads), *self._arguments]
        return Launch(tuple(command), ready_path="/ready")  # `/health` already answers 200 while it loads
