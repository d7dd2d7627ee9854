"""Formats the results of a replay as tables and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

from shortfin_apps.llm.components.recorder.dump_file import Dump
from shortfin_apps.llm.components.recorder.records import Clear, Invocation, Run, Step, Turn
from shortfin_apps.llm.tools.dump_replay.replay import Outcome, Verdict
from shortfin_apps.llm.tools.dump_replay.session import Summary


def about(dump: Dump) -> dict[str, Any]:
    """Summarise the dump, without the replay, for the JSON document."""
    header, records = dump.header, dump.recording.records
    kinds = {"invocations": 0, "failed": 0, "unfinished": 0}
    for record in records:
        if not isinstance(record, Turn):
            kinds["invocations"] += 1
            kinds["failed"] += record.error is not None
            kinds["unfinished"] += record.ended_s is None
    first_s = min((record.began_s for record in records), default=header.written_s)
    return {
        "reason": header.reason,
        "model": header.model,
        "device": header.device,
        "versions": header.versions,
        "seconds": round(header.written_s - first_s, 3),
        "requests": len(dump.recording.requests),
        **kinds,
        "last_launch": None if header.last_launch is None else header.last_launch.to_dict(),
        "is_whole": dump.is_whole,
    }


def document(dump: Dump, summary: Summary | None) -> dict[str, Any]:
    """Return the JSON document with all results; `summary` is None if the dump was not replayed."""
    doc: dict[str, Any] = {"dump": about(dump), "replay": None}
    if summary is not None:
        doc["replay"] = {
            "program": summary.program,
            "is_same_program": summary.is_same_program,
            "is_as_recorded": summary.is_as_recorded,
            "records": {verdict.value: summary.counts[verdict] for verdict in Verdict},
            "first_exact_record": summary.first_exact,
            "prefilled_tokens": summary.prefilled_tokens,
            "findings": summary.findings,
            "notable": [_outcome(outcome) for outcome in summary.notable],
        }
    return doc


def _outcome(outcome: Outcome) -> dict[str, Any]:
    return {
        "record": outcome.record.number,
        "entry": entry_of(outcome.record),
        "verdict": outcome.verdict.value,
        "request": outcome.request_id,
        "position": outcome.position,
        "there": outcome.record.error,
        "here": outcome.detail,
    }


def entry_of(record: Invocation) -> str:
    if isinstance(record, Clear):
        return "clear pages"
    entry: str = getattr(record, "entry", "")
    return f"{entry} (step {record.index})" if isinstance(record, Step) else entry


def print_dump(console: Console, dump: Dump) -> None:
    facts = about(dump)
    console.print(
        f"{facts['invocations']} invocations of {facts['requests']} requests in {facts['seconds']} s on "
        f"{facts['device']}, of which {facts['failed']} failed and "
        f"{facts['unfinished']} had not ended; reason: {facts['reason']}",
        highlight=False,
    )
    if (last := dump.header.last_launch) is not None and last.state != "done":
        console.print(
            f"the device stopped at record {last.number}: {last}; {last.num_queued} were queued after it",
            highlight=False,
        )
    if not dump.is_whole:
        console.print("the dump was cut off: what follows is a part of it", highlight=False)


def print_summary(console: Console, summary: Summary) -> None:
    if summary.notable:
        console.print(_table(summary))
    for sentence in _sentences(summary):
        console.print(sentence, highlight=False)


def _table(summary: Summary) -> Table:
    table = Table("record", "entry", "came out", "request", "position", "there", "here")
    for outcome in summary.notable:
        table.add_row(
            str(outcome.record.number),
            entry_of(outcome.record),
            outcome.verdict.value,
            outcome.request_id or _requests(outcome),
            "" if outcome.position is None else str(outcome.position),
            outcome.record.error or "",
            outcome.detail,
        )
    return table


def _requests(outcome: Outcome) -> str:
    return f"{len(outcome.record.tasks)} tasks" if isinstance(outcome.record, Run) else ""


def _sentences(summary: Summary) -> Iterator[str]:
    counted = [f"{count} {verdict.value}" for verdict, count in summary.counts.items()]
    yield f"{sum(summary.counts.values())} records: {', '.join(counted) or 'none'}"
    if not summary.is_same_program:
        yield (
            "the program is not the server's: rows were compared by their best candidates, which may differ "
            "by rounding"
        )
    if summary.prefilled_tokens:
        yield f"{summary.prefilled_tokens} tokens of before the first record were computed first"
    if summary.counts[Verdict.NOT_COMPARED]:
        yield (
            "records that are not compared read states or windows of before the first record (this model's "
            "replay begins with the requests that the dump has from their start), or tokens that it lacks"
        )
    if summary.counts[Verdict.UNFINISHED]:
        yield "unfinished records had not ended when the dump was written, and did here"
    for finding in summary.findings:
        yield f"found: {finding}"
    yield "all as recorded" if summary.is_as_recorded else "not all as recorded"
