// The data of the plots as tables, which are filled only while open.

import { count, durationText, rate } from "./format.js";
import { CACHED, FREE, SHARED } from "./pool.js";

function fill(id, heads, rows) {
  const details = document.getElementById(id);
  if (!details.open) return;
  const table = document.createElement("table");
  const head = table.createTHead().insertRow();
  for (const [index, text] of heads.entries()) {
    const cell = head.appendChild(document.createElement("th"));
    cell.scope = "col";
    cell.textContent = text;
    if (index) cell.className = "n";
  }
  const body = table.createTBody();
  for (const row of rows) {
    const made = body.insertRow();
    for (const [index, text] of row.entries()) {
      const cell = made.appendChild(document.createElement(index ? "td" : "th"));
      if (index) cell.className = "n";
      else cell.scope = "row";
      cell.textContent = text;
    }
  }
  details.querySelector(".tabular").replaceChildren(table);
}

export function throughputTable(history) {
  const rows = [];
  if (history.last) {
    for (let ago = 0; ago <= 110; ago += 10) {
      const sample = history.since(history.last.at - ago);
      if (ago && sample.at > history.last.at - ago) break;
      const numbers = [rate(sample.generated), rate(sample.prompt), count(sample.running), count(sample.waiting)];
      rows.push([ago ? `${ago} s ago` : "now", ...numbers]);
    }
  }
  fill("throughput-details", ["When", "Generated, tokens/s", "Prompts, tokens/s", "Running", "Waiting"], rows);
}

export function latencyTable(latency) {
  const text = (bound) => (Number.isFinite(bound) ? `up to ${durationText(bound)}` : "more");
  const rows = [];
  for (const [kind, title] of [["ttft", "First token"], ["itl", "Between tokens"]]) {
    const counts = latency.total(kind, 60);
    latency.bounds[kind].forEach((bound, i) => counts[i] && rows.push([title, text(bound), count(counts[i])]));
  }
  fill("latency-details", ["Latency", "Time", "In the last minute"], rows);
}

export function stepsTable(history) {
  const rows = history.steps
    .slice(-20)
    .reverse()
    .map((s) => [
      ...[s.entries.join(" + "), s.classes.join(" + ")],
      ...[count(s.prefill), count(s.decode), count(s.padding), durationText(s.duration)],
    ]);
  fill("steps-details", ["Entry, newest first", "Class", "Prefill rows", "Decode rows", "Padding rows", "Took"], rows);
}

export function poolTable(snapshot) {
  const rows = kinds(snapshot).map(([name, pages]) => [name, count(pages)]);
  fill("pool-details", ["Pages", "About how many"], rows);
}

/** Returns [description, number of pages] pairs; numbers are estimates if the map samples every n-th page. */
export function kinds({ map }) {
  const sums = { [FREE]: 0, [CACHED]: 0, [SHARED]: 0, owned: 0 };
  for (let i = 0; i < map.runs.length; i += 2) {
    const kind = map.runs[i] in sums ? map.runs[i] : "owned";
    sums[kind] += map.runs[i + 1] * map.step;
  }
  return [
    ["of one request", sums.owned],
    ["shared by several", sums[SHARED]],
    ["kept for their prefix", sums[CACHED]],
    ["free", sums[FREE]],
  ];
}
