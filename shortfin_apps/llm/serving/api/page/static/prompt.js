// A form to try a prompt: streams the answer from the OpenAI routes, like any client.

import { count, durationText, rate, say } from "./format.js";
import { headers } from "./key.js";
import { errorMessage, events } from "./sse.js";

const field = (name) => document.getElementById(`try-${name}`);

export class Prompt {
  constructor() {
    this.about = null;
    this.abort = null;
    field("form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    field("stop").addEventListener("click", () => this.stop());
    field("form").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) field("form").requestSubmit();
      if (event.key === "Escape") this.stop();
    });
  }

  /** Adapts the form to the server's model; without a chat template, the model continues the prompt. */
  serve(about) {
    this.about = about;
    const tokens = field("tokens");
    tokens.max = about.max_tokens;
    tokens.value = Math.min(tokens.value, Math.ceil(about.max_tokens / 2));
    say(field("label"), about.has_chat ? "Message" : "Text to continue");
  }

  stop() {
    this.abort?.abort();
  }

  async send() {
    if (this.abort || !this.about) return;
    this.abort = new AbortController();
    this.busy(true);
    field("answer").replaceChildren();
    say(field("text"), "");
    const began = performance.now();
    const told = { first: null, last: began, tokens: 0, reason: null, error: null };
    try {
      await this.stream(told, this.abort.signal);
    } catch (error) {
      if (!this.abort.signal.aborted) told.error = error.message || "the connection was lost";
    }
    const stopped = this.abort.signal.aborted;
    this.abort = null;
    this.busy(false);
    this.tell(told, began, stopped);
  }

  async stream(told, signal) {
    const { about } = this;
    const text = field("prompt").value;
    const body = {
      model: about.model,
      max_tokens: Number(field("tokens").value),
      temperature: Number(field("temperature").value),
      stream: true,
      stream_options: { include_usage: true },
      ...(about.has_chat ? { messages: [{ role: "user", content: text }] } : { prompt: text }),
    };
    const response = await fetch(about.has_chat ? "v1/chat/completions" : "v1/completions", {
      method: "POST",
      headers: { ...headers(), "Content-Type": "application/json" },
      body: JSON.stringify(body),
      signal,
    });
    if (!response.ok) throw new Error(await errorMessage(response));
    for await (const { data } of events(response)) {
      if (data && data !== "[DONE]") this.take(JSON.parse(data), told);
    }
  }

  take(chunk, told) {
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.usage) told.tokens = chunk.usage.completion_tokens;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const { content, reasoning_content: thought } = choice.delta ?? { content: choice.text };
    if (thought) this.write(thought, "thought");
    if (content) this.write(content, "said-text");
    if (thought || content) {
      told.last = performance.now();
      told.first ??= told.last;
    }
    told.reason = choice.finish_reason ?? told.reason;
  }

  write(text, kind) {
    const answer = field("answer");
    const atEnd = answer.scrollHeight - answer.scrollTop - answer.clientHeight < 30;
    let last = answer.lastElementChild;
    if (last?.className !== kind) {
      last = answer.appendChild(document.createElement("span"));
      last.className = kind;
    }
    last.append(text);
    if (atEnd) answer.scrollTop = answer.scrollHeight;
  }

  /** Shows a summary at the end, which screen readers read; they do not read the growing answer. */
  tell(told, began, stopped) {
    if (told.error) {
      this.write(told.error, "error");
      say(field("text"), "No answer.");
      return;
    }
    const parts = [stopped ? "Stopped" : told.reason === "length" ? "Ended at the limit" : "Complete"];
    if (told.tokens) parts.push(`${count(told.tokens)} tokens`);
    if (told.first !== null) parts.push(`first after ${durationText((told.first - began) / 1000)}`);
    if (told.tokens > 1 && told.last > told.first) {
      parts.push(`then ${rate((1000 * (told.tokens - 1)) / (told.last - told.first))} tokens/s`);
    }
    say(field("text"), `${parts.join(", ")}.`);
  }

  busy(is) {
    field("send").disabled = is;
    field("stop").disabled = !is;
    field("answer").setAttribute("aria-busy", String(is));
    if (!is && document.activeElement === document.body) field("prompt").focus();
  }
}
