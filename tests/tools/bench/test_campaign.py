from __future__ import annotations

from contextlib import AsyncExitStack

from shortfin_apps.llm.tools.bench.campaign import PassResult, run_campaign
from shortfin_apps.llm.tools.bench.target import TargetOptions, open_target
from shortfin_apps.llm.tools.bench.workload import Workload
from tests.scripted_server import Answer, ScriptedServer, completes, says

PLAIN = Workload(name="P", about="", prompt_tokens=(40, 20, 30), output_tokens=2, concurrency=2)
SHARED = Workload(
    name="S", about="", prompt_tokens=(32, 32), output_tokens=1, concurrency=2, shared_prefix_tokens=64
)


def letters() -> Answer:
    return lambda request, body: says({"tokens": list(body["prompt"].encode())})(request, body)


async def campaign(
    server: ScriptedServer, workloads: list[Workload], labels: str = "a", repeats: int = 1
) -> tuple[list[PassResult], list[str]]:
    """The results and the order of passes; all labels are the same server."""
    server.on("/tokenize", letters())
    server.on("/v1/completions", completes(["x", "y"]))
    began: list[str] = []
    async with AsyncExitStack() as stack:
        options = TargetOptions(model="tiny")
        targets = [await stack.enter_async_context(open_target(x, server.url, options)) for x in labels]
        run = run_campaign(targets, workloads, repeats, "seed", began.append, lambda _: None)
        results = [result async for result in run]
    return results, began


async def test_a_request_warms_up_and_is_not_measured(server: ScriptedServer) -> None:
    (result,), _ = await campaign(server, [PLAIN])
    assert (result.target, result.workload, result.repeat) == ("a", "P", 0)
    assert (result.summary.requests, result.summary.output_tokens) == (3, 6)
    warm_up, *measured = [body["prompt"] for body in server.bodies()]
    assert len(warm_up) == 40
    assert sorted(map(len, measured)) == [20, 30, 40]


async def test_no_two_prompts_share_a_beginning(server: ScriptedServer) -> None:
    await campaign(server, [PLAIN], labels="ab", repeats=2)
    starts = {tuple(body["prompt"][:16]) for body in server.bodies()}
    assert len(starts) == len(server.bodies()) == 2 * 2 * 4


async def test_the_warm_pass_repeats_the_prefix_with_new_tokens(server: ScriptedServer) -> None:
    results, _ = await campaign(server, [SHARED])
    assert [result.workload for result in results] == ["Sc", "Sw"]
    warm_up, *prompts = [body["prompt"] for body in server.bodies()]
    prefix = prompts[0][:64]
    assert all(prompt[:64] == prefix for prompt in prompts)
    assert len({tuple(prompt[64:80]) for prompt in prompts}) == 4
    assert warm_up[:16] != prefix[:16], "the cold pass finds the prefix cold"


async def test_repeats_have_prefixes_of_their_own(server: ScriptedServer) -> None:
    await campaign(server, [SHARED], repeats=2)
    assert len({tuple(body["prompt"][:64]) for body in server.bodies()}) == 2 + 2  # and two warm-ups


async def test_servers_alternate_in_going_first(server: ScriptedServer) -> None:
    results, began = await campaign(server, [PLAIN], labels="ab", repeats=2)
    assert began == ["P on a", "P on b", "P on b", "P on a"]
    assert [(r.target, r.repeat) for r in results] == [("a", 0), ("b", 0), ("b", 1), ("a", 1)]
