// The connection to the server's feed. Reconnects after failures; disconnects while the tab is hidden.

import { hasKey, headers } from "./key.js";
import { errorMessage, events } from "./sse.js";

const FIRST_WAIT_S = 0.5;
const LONGEST_WAIT_S = 15;
const SILENCE_S = 5; // without events for so long, the page shows a warning
const HIDDEN_S = 5; // a tab that is hidden for so long disconnects

export class Feed {
  /** `on`: an object with the callbacks `about(object)`, `snapshot(object)`, `state(name, text)`, `needsKey(why)`. */
  constructor(on) {
    this.on = on;
    this.wait = FIRST_WAIT_S;
    this.abort = null;
    this.timer = 0;
    this.heard = 0;
    this.needsKey = false;
    setInterval(() => this.watch(), 1000);
    document.addEventListener("visibilitychange", () => this.look());
    addEventListener("online", () => this.now());
  }

  /** Connects immediately: ends the current connection or wait, if any. */
  now() {
    clearTimeout(this.timer);
    this.abort?.abort();
    this.needsKey = false;
    this.connect();
  }

  look() {
    clearTimeout(this.hiding);
    if (!document.hidden) {
      if (!this.abort && !this.needsKey) this.now();
      return;
    }
    this.hiding = setTimeout(() => {
      clearTimeout(this.timer);
      this.abort?.abort();
      this.abort = null;
      this.on.state("waiting", "paused while this tab is hidden");
    }, 1000 * HIDDEN_S);
  }

  async connect() {
    const abort = (this.abort = new AbortController());
    this.on.state("waiting", "connecting");
    let why = "the connection was lost";
    let least = 0;
    try {
      const response = await fetch("page/events", { headers: headers(), signal: abort.signal, cache: "no-store" });
      if (response.status === 401) {
        this.needsKey = true;
        this.abort = null;
        this.on.state("trouble", "needs an API key");
        this.on.needsKey(hasKey() ? "The server does not know that key." : "This server needs a key.");
        return;
      }
      if (response.ok) why = await this.read(response, why);
      else {
        least = Number(response.headers.get("Retry-After")) || 0;
        why = await errorMessage(response);
      }
    } catch (error) {
      if (abort.signal.aborted) return;
      if (!(error instanceof TypeError)) console.error(error);
      why = "the server does not answer";
    }
    if (!abort.signal.aborted) this.again(why, least);
  }

  async read(response, why) {
    this.heard = performance.now();
    for await (const { name, data } of events(response)) {
      if (name) this.heard = performance.now(); // not for comments: the server sends them while a step takes long
      if (name === "about") {
        this.on.about(JSON.parse(data));
      } else if (name === "message") {
        this.wait = FIRST_WAIT_S;
        this.on.state("live", "live");
        this.on.snapshot(JSON.parse(data));
      } else if (name === "end") {
        why = JSON.parse(data).message;
      }
    }
    this.heard = 0;
    return why;
  }

  again(why, least) {
    this.abort = null;
    this.heard = 0;
    const wait = Math.max(least, this.wait * (0.75 + Math.random() / 2));
    this.wait = Math.min(2 * this.wait, LONGEST_WAIT_S);
    this.on.state("trouble", `${why}; trying again in ${wait < 1 ? "a moment" : `${Math.round(wait)} s`}`);
    this.timer = setTimeout(() => this.connect(), 1000 * wait);
  }

  watch() {
    if (!this.abort || !this.heard) return;
    const silent = (performance.now() - this.heard) / 1000;
    if (silent > SILENCE_S) this.on.state("trouble", `no news for ${Math.round(silent)} s: a long step, or a stuck one`);
  }
}
