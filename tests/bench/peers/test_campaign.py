from __future__ import annotations

from pathlib import Path

from bench.peers.cache import Cache
from bench.peers.campaign import Stage, run_peers
from bench.peers.ours import Ours
from bench.peers.subject import Subject
from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.tools.bench.workload import Workload

WORKLOAD = Workload(
    name="tiny", about="2 clients, twice", prompt_tokens=(8,) * 4, output_tokens=3, concurrency=2
)


async def test_servers_take_turns(tiny_artifact: Artifact, tmp_path: Path) -> None:
    cache = Cache(tmp_path, lambda _: None)
    directory = tiny_artifact.vmfb.parent
    contenders = [
        Ours(cache, 1, Subject(), directory, ["--max-queue=7"]),
        Ours(cache, 1, Subject(), directory, [], "twin"),  # the same server as the peer
    ]
    started: list[str] = []
    passes: list[str] = []
    with Stage(tmp_path / "logs", started.append, idle_s=0.01) as stage:
        doc = await run_peers(contenders, [WORKLOAD], 2, "seed", stage, passes.append, lambda _: None)
    assert started == ["ours", "twin"]  # once each, though there are two repeats
    assert passes == ["tiny on ours", "tiny on twin", "tiny on twin", "tiny on ours"]
    assert [(run["target"], run["errors"], run["output_tokens"]) for run in doc["runs"]] == [
        (label, 0, 12) for label in ("ours", "twin", "twin", "ours")
    ]
    assert [ratio["target"] for ratio in doc["ratios"]] == ["twin"]
    for server in doc["servers"].values():
        assert server["peak_memory_bytes"] > 1e7
        assert server["idle_cpu"] >= 0
