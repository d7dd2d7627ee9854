"""Formats results as a Markdown document with a table per part, and a plot per model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.gpu.plot import Line, write_plot

DOCUMENT = "results.md"
# Name prefixes of the entries that the engine calls for a decode, by its pipeline depth.
DECODES = {0: "decode_bs", 1: "decode_loop_bs"}

PLAIN = "whole vocabulary"  # the sampling that the others of mixed traffic are compared with

Record = dict[str, Any]


def write_report(results: Path, out: Path) -> None:
    """Write the document and the plots of the results so far."""
    records = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    (out / DOCUMENT).write_text("\n".join(document(records)) + "\n", encoding="utf-8")
    for model in _models(records):
        if lines := throughput(records, model):
            title = f"{model}: tokens/s of decodes by batch size"
            write_plot(out / f"{model}.svg", title, lines)


def document(records: Sequence[Record]) -> Iterator[str]:
    """Yield the lines of the document."""
    for record in _part(records, "machine"):
        yield f"{', '.join(record['gpus']) or record['device']}; IREE {record['iree']}; {record['at']}; "
        yield f"commit {record['pack']['commit']}"
    for name, rows in (
        ("Tokens", _tokens(records)),
        ("Rows adjusted on the device", _adjusted(records)),
        ("Entries", _entries(records)),
        ("Engine, steady decode", _engine(records)),
        ("Engine, mixed traffic", _mixed(records)),
        ("Engine, drafts of the model's own layer", _drafts(records)),
        ("HTTP server", _http(records)),
        ("Transformers", _transformers(records)),
        ("Failed or left out", _failures(records)),
    ):
        table = list(rows)
        if len(table) > 1:
            yield from ("", f"## {name}", "", *_markdown(table))


def throughput(records: Sequence[Record], model: str) -> list[Line]:
    """Return tokens per second by batch size: of the entries alone, the engine, and transformers."""
    found = [record for record in records if record.get("model") == model]
    lines = []
    for depth, family in DECODES.items():
        entries = [each for each in _part(found, "entries") if each["entry"].startswith(family)]
        points = [(each["rows"], each["tokens_per_s"]) for each in entries]
        lines.append(Line(f"{family}*, queued", points))
        asked = (depth, "greedy")
        chosen = [e for e in _part(found, "engine") if (e["depth"], e["sampling"]) == asked]
        points = [(each["requests"], each["tokens_per_s"]) for each in chosen]
        lines.append(Line(f"engine, depth {depth}", points))
    static = [each for each in _part(found, "transformers") if each["kind"] == "static"]
    lines.append(Line("transformers", [(each["rows"], each["tokens_per_s"]) for each in static]))
    return [line for line in lines if line.points]


def _tokens(records: Sequence[Record]) -> Iterator[tuple[str, ...]]:
    columns = "model", "mode", "depth", "speculative", "preemptions", "proposed", "of them right"
    yield *columns, "tokens as the CPU's", "of"
    for each in _part(records, "tokens"):
        agreed = ", ".join(map(str, each["agreed"]))
        counts = ("-" if each[name] is None else str(each[name]) for name in ("proposed", "accepted"))
        settings = each["mode"], str(each["depth"]), each["speculative"], str(each["preemptions"]), *counts
        yield each["model"], *settings, agreed, str(each["of"])


def _adjusted(records: Sequence[Record]) -> Iterator[tuple[str, ...]]:
    yield "model", "mode", "depth", "invocations that adjusted rows", "tokens as the host's", "of"
    for each in _part(records, "adjusted"):
        agreed = ", ".join(map(str, each["agreed"]))
        settings = each["mode"], str(each["depth"]), str(each["invocations"])
        yield each["model"], *settings, agreed, str(each["of"])


def _entries(records: Sequence[Record]) -> Iterator[tuple[str, ...]]:
    yield "model", "entry", "rows", "tokens", "context", "sync ms", "queued ms", "run ms", "tokens/s"
    for each in _part(records, "entries"):
        sizes = (each[name] for name in ("rows", "new_tokens", "context"))
        times = (each[name] for name in ("sync_ms", "queued_ms", "run_ms"))
        yield (
            each["model"],
            each["entry"],
            *(f"{size:,}" for size in sizes),
            *(f"{ms:.2f}" for ms in times),
            f"{each['tokens_per_s']:,.0f}",
        )


def _engine(records: Sequence[Record]) -> Iterator[tuple[str, ...]]:
    """Yield rows with a step's time relative to its entry's, and its excess over the queued entry's."""
    yield (
        *("model", "requests", "depth", "sampling", "step ms", "of them on the host", "tokens/s"),
        *("step / entry, sync", "step / entry, queued", "device idle ms"),
    )
    for each in _part(records, "engine"):
        entry = _decode_entry(records, each)
        yield (
            *(each["model"], f"{each['requests']:,}", str(each["depth"]), each["sampling"]),
            *(f"{each['step_ms']:.2f}", f"{each['host_ms']:.2f}", f"{each['tokens_per_s']:,.0f}"),
            f"{each['step_ms'] / entry['sync_ms']:.2f}" if entry else "",
            f"{each['step_ms'] / entry['queued_ms']:.2f}" if entry else "",
            f"{max(0.0, each['step_ms'] - entry['queued_ms']):.2f}" if entry else "",
        )


def _decode_entry(records: Sequence[Record], steps: Record) -> Record | None:
    """Return the record of the entry that the engine calls in these steps."""
    asked = (steps["model"], steps["requests"])
    for each in _part(records, "entries"):
        if (each["model"], each["rows"]) == asked and each["entry"].startswith(DECODES[steps["depth"]]):
            return each
    return None


def _mixed(records: Sequence[Record]) -> Iterator[tuple[str, ...]]:
    """Yield rows with the tokens per second also relative to plain requests at the same depth."""
    yield (
        *("model", "requests", "mode", "depth", "sampling", "step ms p50 / p99", "of them on the host"),
        *("steps ahead", "discarded tokens", "requests/s", "tokens/s", "of plain", "device busy"),
    )
    plain: dict[tuple[str, str, int], float] = {}
    for each in _part(records, "mixed"):
        key = each["model"], each["mode"], each["depth"]
        if each["sampling"] == PLAIN:
            plain[key] = each["tokens_per_s"]
        yield (
            *(each["model"], str(each["requests"]), each["mode"], str(each["depth"]), each["sampling"]),
            *(f"{each['step_ms']:.2f} / {each['step_ms_p99']:.2f}", f"{each['host_ms']:.2f}"),
            *(f"{each['ahead']:.0%}", f"{each['discarded_tokens']:,}", f"{each['requests_per_s']:.1f}"),
            f"{each['tokens_per_s']:,.0f}",
            f"{each['tokens_per_s'] / plain[key]:.2f}" if key in plain else "",
            "" if each["busy"] is None else f"{each['busy']:.0%}",
        )


def _drafts(records: Sequence[Record]) -> Iterator[tuple[str, ...]]:
    """Yield rows with the speed relative to decodes without drafts."""
    yield "model", "rounds", "requests", "step ms", "drafts a step", "of them right", "tokens/s", "ratio"
    found = list(_part(records, "drafts"))
    plain = {(each["model"], each["requests"]): each for each in found if each["rounds"] == "off"}
    for each in found:
        without = plain.get((each["model"], each["requests"]))
        proposed = each.get("proposed")
        yield (
            *(each["model"], each["rounds"], f"{each['requests']:,}", f"{each['step_ms']:.2f}"),
            f"{proposed / each['steps'] / each['requests']:.1f}" if proposed else "",
            f"{each['accepted'] / proposed:.0%}" if proposed else "",
            f"{each['tokens_per_s']:,.0f}",
            f"{each['tokens_per_s'] / without['tokens_per_s']:.2f}" if without else "",
        )


def _http(records: Sequence[Record]) -> Iterator[tuple[str, ...]]:
    yield (
        *("model", "workload", "mode", "depth", "API processes", "output tok/s", "TTFT p50 / p99 ms"),
        *("ITL p50 / p99 ms", "errors", "client CPU"),
    )
    for each in _part(records, "http"):
        yield (
            *(each["model"], each["about"], each["mode"], str(each["depth"]), str(each["api_processes"])),
            f"{each['output_tokens_per_s']:,.0f}",
            f"{_ms(each['ttft_ms_p50'])} / {_ms(each['ttft_ms_p99'])}",
            f"{_ms(each['itl_ms_p50'])} / {_ms(each['itl_ms_p99'])}",
            str(each["errors"]),
            f"{each['client_cpu_share']:.2f}",
        )


def _transformers(records: Sequence[Record]) -> Iterator[tuple[str, ...]]:
    yield "model", "what", "rows", "in, out", "step ms", "tokens/s"
    for each in _part(records, "transformers"):
        sizes = f"{each['prompt_tokens']}, {each['output_tokens']}"
        step = _ms(each.get("step_ms"))
        yield each["model"], each["kind"], str(each["rows"]), sizes, step, f"{each['tokens_per_s']:,.0f}"


def _failures(records: Sequence[Record]) -> Iterator[tuple[str, ...]]:
    yield "model", "parts", "why"
    for each in records:
        if each["part"] in ("failed", "skipped"):
            yield each["model"], ", ".join(each["parts"]), each.get("why", "the time was over before it")


def _part(records: Iterable[Record], part: str) -> list[Record]:
    return [record for record in records if record["part"] == part]


def _models(records: Iterable[Record]) -> list[str]:
    return list(dict.fromkeys(record["model"] for record in records if "model" in record))


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _markdown(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    yield head
    yield "|---" * len(rows[0]) + "|"
    yield from body
