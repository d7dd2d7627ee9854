// Latency histograms from /metrics, polled: the counts between two polls are a column.

import { headers } from "./key.js";

export const INTERVAL_S = 4; // not shorter, because reading /metrics costs the server milliseconds
export const COLUMNS = 45;
const NAMES = { ttft: "vllm:time_to_first_token_seconds", itl: "vllm:inter_token_latency_seconds" };

export class Latency {
  constructor() {
    this.clear();
  }

  clear() {
    this.last = null;
    this.columns = []; // each {ttft: [counts], itl: [counts]}, newest last
    this.bounds = { ttft: [], itl: [] }; // upper bounds of buckets, in seconds
  }

  /** Reads /metrics once and adds a column. Does nothing if the server fails: the feed reports that. */
  async poll() {
    let text;
    try {
      const response = await fetch("metrics", { headers: headers(), cache: "no-store" });
      if (!response.ok) return;
      text = await response.text();
    } catch {
      return;
    }
    const found = parse(text);
    if (this.last) {
      const column = {};
      for (const kind of Object.keys(NAMES)) {
        const before = this.last[kind].counts;
        column[kind] = found[kind].counts.map((count, i) => count - (before[i] ?? 0));
        if (column[kind].some((count) => count < 0)) return this.clear(); // the server has restarted
      }
      this.columns.push(column);
      if (this.columns.length > COLUMNS) this.columns.shift();
    }
    for (const kind of Object.keys(NAMES)) this.bounds[kind] = found[kind].bounds;
    this.last = found;
  }

  /** Returns the count of each bucket over the last `seconds`. */
  total(kind, seconds) {
    const columns = this.columns.slice(-Math.ceil(seconds / INTERVAL_S));
    return this.bounds[kind].map((_, i) => columns.reduce((sum, column) => sum + (column[kind][i] ?? 0), 0));
  }

  /** Returns the quantile `q` of the last `seconds`, interpolated within its bucket; null without values. */
  quantile(kind, q, seconds) {
    const counts = this.total(kind, seconds);
    const bounds = this.bounds[kind];
    const all = counts.reduce((sum, count) => sum + count, 0);
    if (!all) return null;
    let rank = q * all;
    for (let i = 0; i < counts.length; i += 1) {
      if (rank <= counts[i]) {
        const low = i ? bounds[i - 1] : 0;
        return Number.isFinite(bounds[i]) ? low + ((bounds[i] - low) * rank) / counts[i] : low;
      }
      rank -= counts[i];
    }
    return bounds.at(-2);
  }
}

function parse(text) {
  const found = {};
  for (const kind of Object.keys(NAMES)) found[kind] = { bounds: [], counts: [] };
  for (const line of text.split("\n")) {
    for (const [kind, name] of Object.entries(NAMES)) {
      if (!line.startsWith(`${name}_bucket{`)) continue;
      const bound = /le="([^"]+)"/.exec(line)[1];
      found[kind].bounds.push(bound === "+Inf" ? Infinity : Number(bound));
      found[kind].counts.push(Number(line.slice(line.lastIndexOf(" ") + 1)));
    }
  }
  for (const { counts } of Object.values(found)) {
    for (let i = counts.length - 1; i > 0; i -= 1) counts[i] -= counts[i - 1]; // Prometheus counts are cumulative
  }
  return found;
}
