// The table of requests. A row element lives as long as its request, so that it keeps the focus.

import { age, count, say } from "./format.js";
import { headers } from "./key.js";
import { colourOf } from "./pool.js";
import { errorMessage } from "./sse.js";
import { palette } from "./surface.js";

const OUT_OF_VIEW_TURNS = 8; // a row that is scrolled out of view is updated once per so many snapshots

export class Requests {
  /** `onMark(id)`: called with the id of the request that is hovered or focused, or with null. */
  constructor(onMark) {
    this.body = document.getElementById("requests");
    this.empty = document.getElementById("requests-empty");
    this.note = document.getElementById("requests-note");
    this.said = document.getElementById("abort-text");
    this.region = document.getElementById("requests-region");
    this.table = document.getElementById("requests-table");
    this.all = document.getElementById("abort-all");
    this.rows = new Map();
    this.turn = 0;
    this.inView = new IntersectionObserver((seen) => {
      for (const { target, isIntersecting } of seen) {
        const row = this.rows.get(target.dataset.id);
        if (row) row.isInView = isIntersecting;
      }
    });
    this.all.addEventListener("click", () => this.abortAll());
    const mark = (event) => onMark(event.target.closest?.("tr")?.dataset.id ?? null);
    for (const name of ["pointerover", "focusin"]) this.body.addEventListener(name, mark);
    for (const name of ["pointerleave", "focusout"]) this.body.addEventListener(name, () => onMark(null));
  }

  show(snapshot) {
    const { requests } = snapshot;
    this.drop(new Set(requests.map((request) => request.id)));
    let place = this.body.firstChild;
    this.turn += 1;
    let index = this.turn;
    for (const request of requests) {
      const row = this.rows.get(request.id) ?? this.make(request);
      if (row.element === place) place = place.nextSibling;
      else this.body.insertBefore(row.element, place);
      index += 1;
      if (row.isInView || index % OUT_OF_VIEW_TURNS === 0) update(row, request);
    }
    this.empty.hidden = requests.length > 0;
    this.table.classList.toggle("nameless", !requests.some((request) => request.tenant));
    const total = snapshot.running + snapshot.waiting;
    const others = total - requests.length;
    say(this.empty, total ? "None of yours runs or waits." : "Nothing runs and nothing waits.");
    say(this.note, others > 0 && requests.length ? `${count(requests.length)} of ${count(total)} are shown` : "");
    this.all.disabled = total === 0;
  }

  /** Removes the rows of requests that are not in `live`; a removed row's focus moves to the next row. */
  drop(live) {
    for (const [id, row] of this.rows) {
      if (live.has(id)) continue;
      if (row.element.contains(document.activeElement)) {
        const next = row.element.nextElementSibling ?? row.element.previousElementSibling;
        (next?.querySelector("button") ?? this.region).focus({ preventScroll: true });
      }
      this.inView.unobserve(row.element);
      row.element.remove();
      this.rows.delete(id);
    }
  }

  make(request) {
    const row = makeRow(request);
    row.button.addEventListener("click", () => this.abort(request, row));
    this.rows.set(request.id, row);
    this.inView.observe(row.element);
    update(row, request);
    return row;
  }

  /** Updates the rows' colours after a change of theme. */
  repaint() {
    for (const [id, row] of this.rows) row.swatch.style.background = colourOf(id, palette().isDark);
  }

  async abort(request, row) {
    if (row.button.ariaDisabled) return; // not `disabled`, with which the button would lose the focus
    row.button.ariaDisabled = "true";
    const ended = await this.post("abort", { rid: request.rid });
    if (ended === null) row.button.ariaDisabled = null;
    else say(this.said, ended ? `Request ${request.rid} is aborted.` : `Request ${request.rid} had ended.`);
  }

  async abortAll() {
    if (!confirm("Abort all requests of all callers?")) return;
    const ended = await this.post("abort_all", undefined);
    if (ended !== null) say(this.said, `${count(ended)} sequences are aborted.`);
  }

  /** Returns the number of aborted sequences; null if the server refuses, after showing the reason. */
  async post(path, body) {
    try {
      const response = await fetch(path, {
        method: "POST",
        headers: { ...headers(), ...(body && { "Content-Type": "application/json" }) },
        body: body && JSON.stringify(body),
      });
      if (response.ok) return (await response.json()).aborted;
      say(this.said, `Not aborted: ${await errorMessage(response)}`);
    } catch {
      say(this.said, "Not aborted: the server does not answer.");
    }
    return null;
  }
}

function makeRow(request) {
  const element = document.createElement("tr");
  element.dataset.id = request.id;
  const head = element.appendChild(document.createElement("th"));
  head.scope = "row";
  const swatch = head.appendChild(document.createElement("span"));
  swatch.className = "swatch";
  swatch.style.background = colourOf(request.id, palette().isDark);
  const name = head.appendChild(document.createElement("span"));
  name.className = "rid";
  name.textContent = name.title = request.rid;
  const cell = (kind) => {
    const made = element.appendChild(document.createElement("td"));
    made.className = kind;
    return made;
  };
  const tenant = cell("roomy tenant").appendChild(document.createElement("span"));
  tenant.className = "rid";
  tenant.textContent = tenant.title = request.tenant || "–";
  const state = cell("");
  const prompt = cell("n roomy");
  const outputCell = cell("n");
  const bar = outputCell.appendChild(document.createElement("span"));
  bar.className = "bar";
  const fill = bar.appendChild(document.createElement("span"));
  const told = outputCell.appendChild(document.createElement("span"));
  told.className = "told";
  const output = told.appendChild(document.createTextNode(""));
  const pages = cell("n roomy");
  const old = cell("n");
  const button = cell("").appendChild(document.createElement("button"));
  button.type = "button";
  button.textContent = "Abort";
  button.setAttribute("aria-label", `Abort request ${request.rid}`);
  return { element, swatch, state, prompt, bar, fill, output, pages, old, button, share: "", isInView: true };
}

function update(row, request) {
  const isFilling = request.state === "running" && request.output === 0;
  say(row.state, isFilling ? "prefilling" : request.state === "running" ? "decoding" : request.state);
  say(row.prompt, request.cached ? `${count(request.prompt)} (${count(request.cached)} found)` : count(request.prompt));
  const output = `${count(request.output)} of ${count(request.max)}`;
  if (row.output.data !== output) row.output.data = output;
  say(row.pages, count(request.pages));
  say(row.old, age(request.age));
  const part = isFilling ? request.computed / request.prompt : request.output / request.max;
  const share = `scaleX(${Math.min(1, part).toFixed(3)})`;
  if (row.share !== share) row.fill.style.transform = row.share = share;
  row.bar.classList.toggle("filling", isFilling);
}

export function showTenants(tenants) {
  const section = document.getElementById("tenants-section");
  section.hidden = !tenants.some(([name]) => name);
  if (section.hidden) return;
  const body = document.getElementById("tenants");
  while (body.rows.length > tenants.length) body.deleteRow(-1);
  tenants.forEach(([name, running, waiting], index) => {
    let row = body.rows[index];
    if (!row) {
      row = body.insertRow();
      const head = row.appendChild(document.createElement("th"));
      head.scope = "row";
      for (let i = 0; i < 2; i += 1) row.insertCell().className = "n";
    }
    [name || "no name", count(running), count(waiting)].forEach((text, i) => say(row.cells[i], text));
  });
}
