"""Starts a server in each batching mode with the same model, for scripts that compare the modes."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families
from running_server import running_server

MODES = {"default": "default", "extend": "extend-attention"}  # label: --batch-mode


@contextmanager
def mode_servers(artifact: Path, flags: Sequence[str] = ()) -> Iterator[dict[str, str]]:
    """Yield URLs by label. An idle server takes no noticeable CPU time from the other."""
    with ExitStack() as stack:
        yield {
            label: stack.enter_context(running_server([str(artifact), "--batch-mode", mode, *flags])).url
            for label, mode in MODES.items()
        }


def counters(url: str) -> dict[str, float]:
    """Return samples of `/metrics` by name, summed over entries; computed rows by their `kind`."""
    exposition = httpx.get(f"{url}/metrics", trust_env=False).raise_for_status().text
    found: defaultdict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            found[sample.labels.get("kind", sample.name)] += sample.value
    return found


def counted_since(before: Mapping[str, float], url: str) -> dict[str, float]:
    """Return the increase of the server's counters since `before`."""
    return {name: value - before.get(name, 0) for name, value in counters(url).items()}


def bench(servers: Mapping[str, str], *options: str) -> None:
    """Run `shortfin-llm bench` on the servers alternately; exit if it fails."""
    urls = [f"--url={label}={url}" for label, url in servers.items()]
    command = [sys.executable, "-m", "shortfin_apps.llm", "bench", *urls, *options]
    if status := subprocess.run(command, check=False).returncode:
        raise SystemExit(status)
