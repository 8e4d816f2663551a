// What the server says of itself, twice a second, as numbers and pictures of the last minute.
//
// A page that nobody sees asks for nothing; where the server is silent, that is said.

import { percentOf } from "../conversation/tokens.js";
import { byId, element } from "../elements.js";
import { covered, coveredBoth, Lanes, Spark } from "./charts.js";

const EVERY_MS = 500;
const PATIENCE_MS = 4000;
const SPAN_MS = 60_000;
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenths = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });

const CHARTS = {
  throughput: { of: (live) => [live.tokens_per_s], show: number, unit: "" },
  requests: { of: (live) => [live.running, live.waiting], show: number, unit: "" },
  ttft: { of: (live) => [live.ttft_s.p50, live.ttft_s.p99], show: time },
  itl: { of: (live) => [live.itl_s.p50, live.itl_s.p99], show: time },
};

export class Live {
  #samples = []; // {at, live}
  #charts = {};
  #lanes = new Lanes(byId("timeline"));
  #zoom = Number(document.querySelector("#zoom :checked").value); // µs
  #timer = null;
  #onModel;

  constructor(onModel) {
    this.#onModel = onModel;
    for (const [id, { of }] of Object.entries(CHARTS)) {
      const numLines = byId(id).querySelectorAll(".value").length;
      this.#charts[id] = { of, spark: new Spark(byId(id).querySelector("svg"), numLines, SPAN_MS) };
    }
    byId("zoom").addEventListener("change", (event) => {
      this.#zoom = Number(event.target.value);
      this.#drawTimeline();
    });
    document.addEventListener("visibilitychange", () => this.#ask());
    this.#ask();
  }

  async #ask() {
    clearTimeout(this.#timer);
    if (document.hidden) return;
    try {
      const response = await fetch("/live", { signal: AbortSignal.timeout(PATIENCE_MS) });
      if (!response.ok) throw new Error(`it answered ${response.status}`);
      this.#show(await response.json());
      byId("connection").textContent = "";
      document.body.classList.remove("silent");
    } catch {
      byId("connection").textContent = "The server does not answer.";
      document.body.classList.add("silent");
    }
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#ask(), EVERY_MS);
  }

  #show(live) {
    const now = performance.now();
    this.#samples.push({ at: now, live });
    this.#samples = this.#samples.filter(({ at }) => now - at < SPAN_MS);
    this.#onModel(live.model);
    showStates("processes", Object.entries(live.processes).map(processRow), "ready");
    showStates("replicas", Object.entries(live.replicas).map(replicaRow), "serving");
    for (const [id, { of, spark }] of Object.entries(this.#charts)) {
      const { show } = CHARTS[id];
      const samples = this.#samples.map((sample) => ({ at: sample.at, values: of(sample.live) }));
      const top = spark.draw(samples, now);
      const figure = byId(id);
      of(live).forEach((value, index) => {
        figure.querySelectorAll(".value")[index].textContent = value === null ? "–" : show(value);
      });
      figure.querySelector("svg").dataset.top = show(top);
      figure.querySelector("figcaption").dataset.top = `↑ ${show(top)}`;
    }
    gauge("cache", live.cache_use);
    gauge("device", live.device_busy);
    this.#drawTimeline();
  }

  #drawTimeline() {
    const newest = this.#samples.at(-1);
    if (!newest) return;
    const { steps, work, span_us: to } = newest.live.timeline;
    const from = to - this.#zoom;
    this.#lanes.draw(steps, work, from, to);
    byId("ticks").childNodes.forEach((tick, index) => {
      tick.textContent = index === 4 ? "now" : `−${time((this.#zoom * (4 - index)) / 4e6)}`;
    });
    byId("timeline-says").textContent = saysOf(steps, work, from, to);
  }
}

function saysOf(steps, work, from, to) {
  const shown = steps.filter(([begin, end]) => end > from && begin < to);
  if (!shown.length) return "Nothing runs.";
  const took = shown.reduce((sum, [begin, end]) => sum + end - begin, 0) / shown.length;
  const rows = shown.reduce((sum, [, , num]) => sum + num, 0) / shown.length;
  const worked = covered(work, from, to);
  const during = worked ? coveredBoth(work, steps, from, to) / worked : 0;
  const numSteps = `${whole.format(shown.length)} ${shown.length === 1 ? "step" : "steps"}`;
  const numRows = `${tenths.format(rows)} ${rows === 1 ? "request" : "requests"}`;
  const said = [
    `${numSteps} of ${time(took / 1e6)} for ${numRows}`,
    `worker busy ${percentOf(worked / (to - from))}`,
  ];
  if (worked) said.push(`${percentOf(during)} of that while a step ran`);
  return said.join(" · ");
}

function processRow([name, { state, restarts }]) {
  const again = restarts ? `, ${restarts} ${restarts === 1 ? "restart" : "restarts"}` : "";
  return { name, state, text: `${name}${again}`, title: `${name} is ${state}${again}` };
}

function replicaRow([name, { state, model, running, waiting, cache_use }]) {
  const ofModel = model === null ? "" : ` (${model})`;
  const requests = running === null ? "" : `: ${running} running, ${waiting} waiting`;
  const cache = cache_use === null ? "" : `, cache ${percentOf(cache_use)}`;
  const text = `${name}${ofModel}${requests}${cache}`;
  return { name, state, text, title: `${name}${ofModel} is ${state}` };
}

/** A list of names with their states; a state is shown to all unless it is the usual one. */
function showStates(id, shown, usual) {
  const list = byId(id);
  const said = JSON.stringify(shown);
  if (list.dataset.said === said) return;
  list.dataset.said = said;
  list.hidden = !shown.length;
  list.replaceChildren(
    ...shown.map(({ state, text, title }) => {
      const className = state === usual ? "unseen" : "";
      const said = element("span", { className, textContent: ` ${state}` });
      return element("li", { dataset: { state }, title }, text, said);
    }),
  );
}

function gauge(id, share) {
  byId(id).value = share ?? 0;
  byId(`${id}-value`).textContent = share === null ? "–" : `${whole.format(share * 100)} %`;
}

function number(value) {
  return (value < 100 ? tenths : whole).format(value);
}

export function time(seconds) {
  if (seconds >= 1) return `${tenths.format(seconds)} s`;
  return `${(seconds < 0.01 ? tenths : whole).format(seconds * 1000)} ms`;
}
