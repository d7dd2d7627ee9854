// Plots over time: throughput and queue, latency, and the mix of each invocation.

import { count, durationText, rate } from "./format.js";
import { SPAN_S, STEPS_S } from "./history.js";
import { COLUMNS } from "./metrics.js";
import { label, palette } from "./surface.js";

const GUTTER = 62; // width of the vertical axis' labels

const ROWS = [
  { name: "generated", title: "Generated", unit: "tokens/s", colour: "decode", format: rate },
  { name: "prompt", title: "Prompts computed", unit: "tokens/s", colour: "prefill", format: rate },
  { name: "waiting", title: "Waiting above running", unit: "requests", colour: "soft", format: count },
];

/** Draws three plots below each other, each with its own scale from 0. */
export function drawThroughput(context, width, height, history) {
  const colours = palette();
  const each = height / ROWS.length;
  ROWS.forEach((row, index) => {
    const bottom = Math.round((index + 1) * each) - 2;
    const room = each - 20;
    const value = row.name === "waiting" ? (s) => s.waiting + s.running : (s) => s[row.name];
    const most = niceCeiling(Math.max(...history.samples.map(value), 1));
    const y = (v) => bottom - (room * v) / most;
    context.fillStyle = colours.line;
    context.fillRect(0, bottom, width, 1);
    label(context, row.title, 0, bottom - room - 6, colours.soft);
    label(context, `${row.format(most)} ${row.unit}`, width, bottom - room - 6, colours.soft, "right");
    if (row.name === "waiting") {
      area(context, width, history, value, y, bottom, colours.padding);
      area(context, width, history, (s) => s.running, y, bottom, colours.decode);
    } else {
      context.globalAlpha = 0.18;
      area(context, width, history, value, y, bottom, colours[row.colour]);
      context.globalAlpha = 1;
      line(context, width, history, value, y, colours[row.colour]);
    }
  });
}

function trace(context, width, history, value, y) {
  const end = history.last.at;
  let open = false;
  let before = -Infinity;
  const pieces = [];
  for (const sample of history.samples) {
    const x = width * (1 - (end - sample.at) / SPAN_S);
    if (!open || sample.at - before > 3) pieces.push([]); // a gap: the tab was hidden
    open = true;
    before = sample.at;
    pieces.at(-1).push([x, y(value(sample))]);
  }
  return pieces;
}

function line(context, width, history, value, y, colour) {
  if (!history.last) return;
  context.strokeStyle = colour;
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  context.beginPath();
  for (const piece of trace(context, width, history, value, y)) {
    piece.forEach(([x, v], i) => (i ? context.lineTo(x, v) : context.moveTo(x, v)));
  }
  context.stroke();
}

function area(context, width, history, value, y, bottom, colour) {
  if (!history.last) return;
  context.fillStyle = colour;
  context.beginPath();
  for (const piece of trace(context, width, history, value, y)) {
    context.moveTo(piece[0][0], bottom);
    for (const [x, v] of piece) context.lineTo(x, v);
    context.lineTo(piece.at(-1)[0], bottom);
  }
  context.fill();
}

/** Returns the next round number at or above `value` (0.1 % tolerance). */
function niceCeiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((step) => step * power >= value * 0.999);
}

/** Draws two heat maps: a column per poll of /metrics, a row per bucket, the opacity by the count. */
export function drawLatency(context, width, height, latency) {
  const half = Math.round(height / 2);
  heat(context, "ttft", "First token", latency, width, 0, half - 8, palette().prefill);
  heat(context, "itl", "Between tokens", latency, width, half + 4, half - 4, palette().decode);
}

function heat(context, kind, title, latency, width, top, height, colour) {
  const colours = palette();
  const gutter = GUTTER;
  const head = 16;
  const bottom = top + height;
  const bounds = latency.bounds[kind];
  label(context, title, 0, top + 11, colours.soft);
  const [p50, p95] = [0.5, 0.95].map((q) => durationText(latency.quantile(kind, q, 60)));
  label(context, p50 === "–" ? "none in a minute" : `p50 ${p50}, p95 ${p95}`, width, top + 11, colours.soft, "right");
  context.fillStyle = colours.line;
  context.fillRect(gutter, bottom - 1, width - gutter, 1);
  if (!bounds.length) return;
  const [low, high] = range(latency, kind);
  const row = (height - head - 2) / (high - low + 1);
  const column = (width - gutter) / COLUMNS;
  const most = Math.max(1, ...latency.columns.flatMap((each) => each[kind]));
  const every = Math.max(1, Math.ceil(14 / row));
  for (let i = low; i <= high; i += 1) {
    const y = bottom - 1 - (i - low + 1) * row;
    if ((i - low) % every === 0 && Number.isFinite(bounds[i])) {
      label(context, `≤ ${shortBound(bounds[i])}`, gutter - 6, y + row / 2 + 4, colours.soft, "right");
    }
  }
  context.fillStyle = colour;
  latency.columns.forEach((each, index) => {
    const x = width - (latency.columns.length - index) * column;
    each[kind].forEach((n, i) => {
      if (!n || i < low || i > high) return;
      context.globalAlpha = 0.2 + 0.8 * Math.sqrt(n / most);
      context.fillRect(x, bottom - 1 - (i - low + 1) * row, Math.max(1, column - 1), Math.max(1, row - 1));
    });
  });
  context.globalAlpha = 1;
}

/** Returns the first and the last bucket to show: all buckets with values, and some around these. */
function range(latency, kind) {
  const last = latency.bounds[kind].length - 1;
  const used = latency.bounds[kind].map((_, i) => i).filter((i) => latency.columns.some((each) => each[kind][i]));
  let low = used.length ? Math.max(0, used[0] - 1) : 3;
  let high = used.length ? Math.min(last, used.at(-1) + 1) : Math.min(last, 8);
  while (high - low < 4 && (low > 0 || high < last)) {
    if (low > 0) low -= 1;
    if (high < last) high += 1;
  }
  return [low, high];
}

function shortBound(seconds) {
  return seconds < 1 ? `${+(1000 * seconds).toPrecision(3)} ms` : `${seconds} s`;
}

/** Draws a bar per step: the width is the step's duration, the height the square root of its token rows. */
export function drawSteps(context, width, height, history) {
  const colours = palette();
  const steps = history.steps;
  const end = history.last ? history.last.at : 0;
  const most = Math.max(8, ...steps.map((s) => s.prefill + s.decode + s.padding));
  const room = height - 18;
  const scale = (rows) => room * Math.sqrt(rows / most);
  for (const tick of ticks(most, scale)) {
    const y = Math.round(height - scale(tick)) + 0.5;
    context.fillStyle = colours.line;
    context.fillRect(GUTTER, y, width - GUTTER, 0.75);
    label(context, `${count(tick)} rows`, GUTTER - 6, y + 4, colours.soft, "right");
  }
  const x = (at) => GUTTER + (width - GUTTER) * (1 - (end - at) / STEPS_S);
  for (const step of steps) {
    const right = x(step.at);
    if (right < GUTTER) continue;
    const left = Math.max(GUTTER, x(step.at - step.duration));
    const wide = Math.max(0.75, right - left - (right - left > 3 ? 0.75 : 0));
    const rows = step.prefill + step.decode + step.padding;
    let y = height;
    for (const kind of ["decode", "prefill", "padding"]) {
      const high = (scale(rows) * step[kind]) / rows;
      context.fillStyle = colours[kind];
      context.fillRect(left, y - high, wide, high);
      y -= high;
    }
  }
  if (!steps.length) label(context, "no step in the last 10 seconds", width / 2, height / 2, colours.soft, "center");
}

/** Returns the row counts to label on the axis, so that labels do not overlap. */
function ticks(most, scale) {
  const chosen = [];
  for (const rows of [32768, 8192, 2048, 512, 128, 32, 8]) {
    if (rows <= most && (!chosen.length || scale(chosen.at(-1)) - scale(rows) > 15)) chosen.push(rows);
  }
  return chosen;
}
