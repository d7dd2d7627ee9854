// The snapshots of the last two minutes, the rates between them, and the engine's last steps.

export const SPAN_S = 120;
export const STEPS_S = 10;
const RATE_S = 1; // rates are means over this time

export class History {
  constructor() {
    this.clear();
  }

  clear() {
    this.samples = [];
    this.steps = [];
  }

  /** Adds a snapshot. Clears the history if the server has restarted: its time or step counter is lower. */
  add(snapshot) {
    const last = this.samples.at(-1);
    if (last && (snapshot.at < last.at || snapshot.counters.steps < last.counters.steps)) this.clear();
    const { at, counters, running, waiting } = snapshot;
    const sample = { at, counters, running, waiting, generated: 0, prompt: 0, device: 0 };
    const before = this.since(at - RATE_S);
    if (before && before.at < at) {
      const elapsed = at - before.at;
      sample.generated = (counters.generation_tokens - before.counters.generation_tokens) / elapsed;
      sample.prompt = (counters.prompt_tokens - before.counters.prompt_tokens) / elapsed;
      sample.device = (counters.device_s - before.counters.device_s) / elapsed;
    }
    this.samples.push(sample);
    while (this.samples[0].at < at - SPAN_S) this.samples.shift();
    this.addSteps(snapshot.steps, at);
  }

  /** Adds the steps of a snapshot: one object per step, which sums its invocations. Drops old steps. */
  addSteps(rows, now) {
    for (const [serial, at, duration, entry, kind, prefill, decode, padding] of rows) {
      let step = this.steps.at(-1);
      if (step?.serial !== serial) {
        step = { serial, at, duration, entries: [], classes: [], prefill: 0, decode: 0, padding: 0 };
        this.steps.push(step);
      }
      step.entries.push(`${entry}`);
      step.classes.push(`${kind}`);
      step.prefill += prefill;
      step.decode += decode;
      step.padding += padding;
    }
    let old = 0;
    while (old < this.steps.length && this.steps[old].at < now - STEPS_S - 1) old += 1;
    if (old) this.steps.splice(0, old);
  }

  /** Returns the newest sample at or before `at`, or the oldest sample if there is none. */
  since(at) {
    for (let i = this.samples.length - 1; i >= 0; i -= 1) if (this.samples[i].at <= at) return this.samples[i];
    return this.samples[0];
  }

  get last() {
    return this.samples.at(-1);
  }

  /** Returns the growth of the counter `name` in the last `seconds`. */
  growth(seconds, name) {
    const last = this.last;
    return last ? last.counters[name] - this.since(last.at - seconds).counters[name] : 0;
  }
}
