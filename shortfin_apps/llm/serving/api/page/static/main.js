// Connects the parts of the page: shows each snapshot that the feed receives.

import { Feed } from "./feed.js";
import { count, duration, durationText, percent, rate, say } from "./format.js";
import { History } from "./history.js";
import { installKeyDialog } from "./key.js";
import { INTERVAL_S, Latency } from "./metrics.js";
import { drawLatency, drawSteps, drawThroughput } from "./plots.js";
import { drawPool } from "./pool.js";
import { Prompt } from "./prompt.js";
import { Requests, showTenants } from "./requests.js";
import { repaint, Surface } from "./surface.js";
import { kinds, latencyTable, poolTable, stepsTable, throughputTable } from "./tables.js";
import { installTheme } from "./theme.js";

const at = (id) => document.getElementById(id);
const history = new History();
const latency = new Latency();
const prompt = new Prompt();
let about = null;
let snapshot = null;
let marked = null; // id of the request with highlighted pages

const surfaces = {
  throughput: new Surface(at("throughput"), (...box) => drawThroughput(...box, history)),
  latency: new Surface(at("latency"), (...box) => drawLatency(...box, latency)),
  steps: new Surface(at("steps"), (...box) => drawSteps(...box, history)),
  pool: new Surface(at("pool"), (...box) => {
    if (!snapshot) return;
    const index = snapshot.requests.findIndex((request) => request.id === marked);
    drawPool(...box, [snapshot.map, snapshot.window_map], snapshot.requests, index);
  }),
};
const requests = new Requests((id) => {
  if (marked === id) return;
  marked = id;
  surfaces.pool.change();
});

function showAbout(news) {
  about = news;
  document.title = `${about.model} – shortfin-llm`;
  say(at("model"), about.model);
  say(at("facts"), `shortfin-llm ${about.version}, context ${count(about.max_tokens)}`);
  say(at("n-limit"), `of ${count(about.max_requests)} at most`);
  at("abort-all").hidden = !about.is_admin;
  prompt.serve(about);
  setTimeout(readMetrics, 1000); // the baseline from which /metrics is counted
}

function showSnapshot(news) {
  snapshot = news;
  history.add(news);
  showNumbers();
  requests.show(news);
  showTenants(news.tenants);
  for (const name of ["throughput", "steps", "pool"]) surfaces[name].change();
  showTexts();
}

function showNumbers() {
  const { pages, window_pages: window } = snapshot;
  const { last } = history;
  say(at("n-generated"), rate(last.generated));
  say(at("n-prompt"), rate(last.prompt));
  say(at("n-running"), count(snapshot.running));
  say(at("n-waiting"), count(snapshot.waiting));
  at("n-waiting").closest("div").classList.toggle("alarm", snapshot.running + snapshot.waiting >= about.max_requests);
  const fuller = window && window.leased / window.total > pages.leased / pages.total ? window : pages;
  say(at("n-pages"), percent(fuller.leased, fuller.total));
  const [found, computed] = ["cached_tokens", "prompt_tokens"].map((name) => history.growth(60, name));
  say(at("n-hits"), percent(found, found + computed));
  const rows = history.steps.reduce((sum, s) => sum + s.prefill + s.decode + s.padding, 0);
  say(at("n-padding"), percent(history.steps.reduce((sum, s) => sum + s.padding, 0), rows));
  say(at("n-device"), percent(Math.min(1, last.device), 1));
}

function showTexts() {
  const { pages, map } = snapshot;
  const { last } = history;
  const step = map.step > 1 ? `, every ${map.step}th is drawn` : "";
  say(at("pool-note"), `${count(pages.total)} pages of ${about.page_tokens} tokens${step}`);
  throughputTable(history);
  stepsTable(history);
  poolTable(snapshot);
  // Descriptions of the plots for screen readers, which read them on request.
  say(at("throughput-text"), `Now ${rate(last.generated)} tokens per second are generated and ${rate(last.prompt)} of ` +
    `prompts computed; ${count(last.running)} requests run and ${count(last.waiting)} wait.`);
  const steps = history.steps.length;
  const classes = history.steps.flatMap((s) => s.classes);
  const fixed = classes.filter((each) => each !== "dynamic").length;
  say(at("steps-static"), steps ? `${percent(fixed, classes.length)} % on static entries, ` : "");
  say(at("steps-text"), steps ? `${count(steps)} steps in the last 10 seconds.` : "No step in the last 10 seconds.");
  say(at("pool-text"), kinds(snapshot).map(([name, number]) => `${count(number)} pages ${name}`).join(", "));
}

function showLatency() {
  for (const kind of ["ttft", "itl"]) {
    const [p50, p95] = [0.5, 0.95].map((q) => latency.quantile(kind, q, 60));
    const [number, unit] = duration(p50);
    say(at(`n-${kind}`), number);
    say(at(`n-${kind}-unit`), p50 === null ? "p50" : `${unit} p50, ${durationText(p95)} p95`);
  }
  const said = ["ttft", "itl"].map((kind) => durationText(latency.quantile(kind, 0.5, 60)));
  say(at("latency-text"), `Median of the last minute: first token ${said[0]}, between tokens ${said[1]}.`);
  latencyTable(latency);
  surfaces.latency.change();
}

const openKeyDialog = installKeyDialog(() => feed.now());
const feed = new Feed({
  about: showAbout,
  snapshot: showSnapshot,
  needsKey: openKeyDialog,
  state(name, text) {
    at("link").dataset.state = name;
    say(at("link-text"), text);
    at("retry").hidden = name !== "trouble" || feed.needsKey;
  },
});
at("retry").addEventListener("click", () => feed.now());
for (const details of document.querySelectorAll("details")) {
  details.addEventListener("toggle", () => snapshot && (showTexts(), latencyTable(latency)));
}
installTheme(() => {
  repaint(Object.values(surfaces));
  requests.repaint();
});
feed.connect();

async function readMetrics() {
  if (document.hidden || at("link").dataset.state !== "live") return;
  await latency.poll();
  showLatency();
}

setInterval(readMetrics, 1000 * INTERVAL_S);
