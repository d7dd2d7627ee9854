"""The report as a page: one file without scripts, images or links to load, to be attached to an issue."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from shortfin_apps.llm.tools.qualify.outcome import Status

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --good: #2a8a4a; --bad: #c8372d; --dim: #888; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .25rem 0; } .dim { color: var(--dim); }
.verdict { border-left: .4rem solid var(--good); padding: .25rem 1rem; margin: 1rem 0; font-size: 1.1rem; }
.verdict.fail { border-color: var(--bad); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .3rem .8rem .3rem 0;
  border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
th { white-space: nowrap; font-weight: 600; overflow-wrap: normal; }
td.number { width: 7rem; text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.status { font-weight: 600; white-space: nowrap; } .pass { color: var(--good); }
.status.fail { color: var(--bad); } .skipped { color: var(--dim); }
.fault { color: var(--bad); font-weight: 600; }
.bar { display: inline-block; height: .7rem; background: #4a7fd0; vertical-align: middle; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: .8rem; max-height: 30rem; overflow: auto; }
summary { cursor: pointer; }
"""
_BAR_REM = 12  # width of the longest bar


def page(doc: Mapping[str, Any]) -> str:
    """Return the page of a report (report.py)."""
    parts = [
        _head(doc),
        _checks(doc),
        _entries(doc),
        _section("Machine", _table(_machine_rows(doc["machine"]))),
        _section("All figures", _details(doc)),
    ]
    title = escape(f"shortfin-llm qualify: {doc['device']}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{_STYLE}</style></head>\n<body>\n{''.join(parts)}</body></html>\n"
    )


def verdict(doc: Mapping[str, Any]) -> str:
    """Return the result in one line."""
    counts = doc["counts"]
    of = f"{counts[Status.PASSED]} passed, {counts[Status.SKIPPED]} skipped"
    if doc["passed"]:
        return f"passed: {of}"
    if doc["interrupted"] and not counts[Status.FAILED]:
        return f"interrupted: {of}"
    faults = f": {', '.join(doc['faults'])}" if doc["faults"] else ""
    how = "interrupted, and failed" if doc["interrupted"] else "failed"
    return f"{how}: {counts[Status.FAILED]} of {sum(counts.values())} checks{faults} ({of})"


def _head(doc: Mapping[str, Any]) -> str:
    machine = doc["machine"]
    about = [
        f"{doc['subject']} on {doc['device']}",
        machine.get("cpu", {}).get("model", ""),
        f"shortfin-llm {machine.get('versions', {}).get('shortfin-llm', '')}",
        f"{doc['finished']}, {doc['seconds']:.0f} s",
    ]
    kind = "" if doc["passed"] else " fail"
    return (
        f"<h1>Qualification of {escape(doc['device'])}</h1>\n"
        f'<p class="dim">{escape(" · ".join(filter(None, about)))}</p>\n'
        f'<p class="verdict{kind}">{escape(verdict(doc))}</p>\n'
    )


def _checks(doc: Mapping[str, Any]) -> str:
    rows = []
    for check in doc["checks"]:
        fault = f'<span class="fault">{escape(check["fault"])}</span>: ' if check["fault"] else ""
        rows.append(
            f'<tr><th title="{escape(check["about"])}">{escape(check["name"])}</th>'
            f'<td class="status {check["status"]}">{escape(check["status"])}</td>'
            f"<td>{fault}{escape(check['text'])}<br>"
            f'<span class="dim">{escape(check["about"])}</span></td>'
            f'<td class="number">{check["seconds"]:.1f} s</td></tr>\n'
        )
    return _section("Checks", f'<div class="scroll"><table>\n{"".join(rows)}</table></div>')


def _entries(doc: Mapping[str, Any]) -> str:
    """Return the roofline as bars; empty if it was not measured."""
    found = next(
        (each["figures"].get("entries") for each in doc["checks"] if each["name"] == "roofline"), None
    )
    if not found:
        return ""
    longest = max(entry["ratio"] for entry in found)
    rows = "".join(_entry(entry, _BAR_REM * entry["ratio"] / longest) for entry in found)
    names = ("entry", "rows x tokens", "time", "floor", "time / floor", "")
    head = "".join(f"<th>{name}</th>" for name in names)
    table = f'<div class="scroll"><table>\n<tr>{head}</tr>\n{rows}</table></div>'
    note = "The floor is the time that the probes of this run need for as many bytes and FLOPs."
    return _section("Entries", f'<p class="dim">{note}</p>{table}')


def _entry(entry: Mapping[str, Any], bar_rem: float) -> str:
    numbers = (
        f"{entry['time_s_median'] * 1e3:,.3f} ms",
        f"{entry['floor_s'] * 1e3:,.3f} ms",
        f"{entry['ratio']:.1f}",
    )
    return (
        f"<tr><th>{escape(entry['entry'])}</th>"
        f"<td>{entry['rows']} x {entry['new_tokens']}, context {entry['context']}</td>"
        + "".join(f'<td class="number">{number}</td>' for number in numbers)
        + f'<td><span class="bar" style="width:{bar_rem:.2f}rem"></span></td></tr>\n'
    )


def _machine_rows(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield a row for each known value of nested facts."""
    match value:
        case Mapping():
            for key, each in value.items():
                yield from _machine_rows(each, f"{name} {key}".strip())
        case list() if value and all(isinstance(each, Mapping) for each in value):
            for number, each in enumerate(value):
                yield from _machine_rows(each, f"{name} {number}")
        case list():
            if value:
                yield name, ", ".join(map(str, value))
        case None:
            pass
        case _:
            yield name, str(value)


def _table(rows: Iterator[tuple[str, str]]) -> str:
    cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>\n" for name, text in rows)
    return f'<div class="scroll"><table>\n{cells}</table></div>'


def _details(doc: Mapping[str, Any]) -> str:
    found = []
    for check in doc["checks"]:
        if check["figures"]:
            figures = {name: value for name, value in check["figures"].items() if name != "log"}
            text = json.dumps(figures, indent=1) if figures else ""
            log = check["figures"].get("log", "")
            summary = escape(f"{check['name']}: {check['status']}")
            is_open = " open" if check["status"] == Status.FAILED else ""
            pre = f"<pre>{escape(text + log)}</pre>"
            found.append(f"<details{is_open}><summary>{summary}</summary>{pre}</details>\n")
    return "".join(found)


def _section(title: str, content: str) -> str:
    return f"<h2>{title}</h2>\n{content}\n"
