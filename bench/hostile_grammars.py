"""Schemas with 10,000 branches and deep recursion: how servers answer, and what other streams notice.

    python bench/hostile_grammars.py ours=http://127.0.0.1:8000 llama=http://127.0.0.1:8001 --repeat 5

For servers with OpenAI's chat completions and `response_format`. First each schema is sent alone: the
status, and the seconds until it came. Then eight streams, 128 tokens in and 128 out, are measured alone and
beside a client that sends one of these schemas after another, in turns: 99th percentile of the gaps between
their chunks, medians over the turns and ratios of the same turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Mapping, Sequence

import httpx
from structured_output import Pass, streams, with_range

from shortfin_apps.llm.tools.bench.target import http_client

PATIENCE_S = 60.0
BRANCHES = 10_000


def nested(depth: int) -> str:
    """Return nested arrays as text, as Python's own encoder recurses."""
    return '{"type": "array", "items": ' * depth + "{}" + "}" * depth


def objects(count: int) -> str:
    """Return objects that differ only in the last of 40 keys."""
    keys = {f"k{i}": {"type": "integer"} for i in range(39)}
    branches = [{"type": "object", "properties": keys | {"z": {"const": i}}} for i in range(count)]
    return json.dumps({"oneOf": branches})


def chain(length: int) -> str:
    """Return definitions that each contain the next one twice: 2 ** `length` paths."""
    definitions: dict[str, object] = {
        f"n{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/n{i + 1}"}] * 2} for i in range(length)
    }
    definitions[f"n{length}"] = {"type": "integer"}
    return json.dumps({"$ref": "#/$defs/n0", "$defs": definitions})


REFERRED = {
    "anyOf": [{"$ref": "#/$defs/n"}, {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1}]
}
SCHEMAS: Mapping[str, str] = {
    "oneOf of 10,000 numbers": json.dumps({"oneOf": [{"const": i} for i in range(BRANCHES)]}),
    "oneOf of 10,000 empty schemas": json.dumps({"oneOf": [{}] * BRANCHES}),
    "anyOf of 10,000 strings": json.dumps({"anyOf": [{"enum": [f"{i:x}"]} for i in range(BRANCHES)]}),
    "oneOf of 60 objects of 40 keys": objects(60),
    "2,000 nested arrays": nested(2_000),
    "300 definitions, each with the next one twice": chain(300),
    "a definition that is itself": json.dumps({"$ref": "#/$defs/n", "$defs": {"n": REFERRED}}),
    "intersection of 20 patterns": json.dumps(
        {"allOf": [{"type": "string", "pattern": f".*a.{{{i}}}b.*"} for i in range(20)]}
    ),
}


def body(schema: str, seed: str) -> bytes:
    """Return a request with a new schema, made unique by a description, so that nothing is cached."""
    described = f'{{"description": "{seed}", {schema[1:]}'
    return (
        '{"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "response_format": {"type": '
        f'"json_schema", "json_schema": {{"name": "s", "strict": true, "schema": {described}}}}}}}'
    ).encode()


async def answer(http: httpx.AsyncClient, schema: str, seed: str) -> str:
    """Return the status, its time in seconds and the start of the message, or why there is none."""
    began_s = time.perf_counter()
    try:
        headers = {"Content-Type": "application/json"}
        sent = http.post("/v1/chat/completions", content=body(schema, seed), headers=headers)
        response = await asyncio.wait_for(sent, PATIENCE_S)
    except TimeoutError:
        return f"none in {PATIENCE_S:.0f} s"
    except httpx.HTTPError as error:
        return f"{type(error).__name__} after {time.perf_counter() - began_s:.1f} s"
    message = "" if response.status_code == 200 else f": {_message(response)[:120]}"
    return f"{response.status_code} in {time.perf_counter() - began_s:.2f} s{message}"


def _message(response: httpx.Response) -> str:
    try:
        error = response.json()["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return response.text


async def attack(http: httpx.AsyncClient, seed: str) -> None:
    number = 0
    while True:
        schema = list(SCHEMAS.values())[number % len(SCHEMAS)]
        await answer(http, schema, f"{seed}/{number}")
        number += 1


async def beside(http: httpx.AsyncClient, seed: str) -> Pass:
    attacker = asyncio.create_task(attack(http, seed))
    try:
        return await streams(http, seed, {})
    finally:
        attacker.cancel()
        await asyncio.gather(attacker, return_exceptions=True)


async def measure(name: str, url: str, repeats: int) -> None:
    async with http_client(url, timeout_s=600) as http:
        for title, schema in SCHEMAS.items():
            print(f"| {name} | {title} | {await answer(http, schema, title)} |", flush=True)
        alone: list[Pass] = []
        disturbed: list[Pass] = []
        for turn in range(-1, repeats):  # the first warms up
            before = await streams(http, f"{turn}/alone", {})
            after = await beside(http, f"{turn}/beside")
            if turn >= 0:
                alone.append(before)
                disturbed.append(after)
    ratios = [after.p99_ms / before.p99_ms for after, before in zip(disturbed, alone, strict=True)]
    figures = f"{_p99_ms(alone)}; {_p99_ms(disturbed)}; {with_range(ratios)}"
    print(f"| {name} | p99 between tokens in ms: alone; beside; ratio | {figures} |", flush=True)


def _p99_ms(passes: Sequence[Pass]) -> str:
    return f"{statistics.median(one.p99_ms for one in passes):.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("servers", nargs="+", metavar="NAME=URL", help="servers that run")
    parser.add_argument("--repeat", type=int, default=5, help="turns of the streams")
    arguments = parser.parse_args()
    print("| server | request | answer |")
    print("|---|---|---|")
    for server in arguments.servers:
        name, url = server.split("=", 1)
        asyncio.run(measure(name, url, arguments.repeat))


if __name__ == "__main__":
    main()
