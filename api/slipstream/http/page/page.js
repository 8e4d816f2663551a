// The page: a prompt and its answer; the rest is live.js.

import { Live, time } from "./live.js";
import { chunksOf, endAnswer, headersOf, Refused } from "./stream.js";
import { TokenReader, TokenView } from "./tokens.js";

const NUM_LOGPROBS = 5;
const KEY = "slipstream-key";
const EXAMPLES = { chat: "What is an assert statement?", completion: "The with statement is used to" };
const byId = (id) => document.getElementById(id);
const form = byId("ask");
const prompt = byId("prompt");
const send = byId("send");
const stop = byId("stop");
const tokens = new TokenView(byId("output"), byId("candidates"));
let running = null; // {controller, key, id, isStopped}

// ---- the form -----------------------------------------------------------------------------------

function mode() {
  return form.elements.mode.value;
}

function key() {
  return byId("key").value.trim();
}

function stops() {
  const lines = byId("stops").value.split("\n").filter((line) => line !== "");
  return lines.map((line) => line.replace(/\\([nt\\])/g, (_, char) => ({ n: "\n", t: "\t", "\\": "\\" })[char]));
}

function requestOf() {
  const shared = {
    max_tokens: Number(byId("max-tokens").value),
    temperature: Number(byId("temperature").value),
    ...(stops().length && { stop: stops() }),
    stream_options: { include_usage: true },
  };
  if (mode() === "chat") {
    const messages = [{ role: "user", content: prompt.value }];
    const content = { ...shared, messages, logprobs: true, top_logprobs: NUM_LOGPROBS };
    return { path: "/v1/chat/completions", content };
  }
  const content = { ...shared, prompt: prompt.value, logprobs: NUM_LOGPROBS };
  return { path: "/v1/completions", content };
}

function askForKey() {
  byId("key-row").hidden = false;
  byId("key").focus();
}

// ---- an answer ----------------------------------------------------------------------------------

async function run() {
  if (running || !form.reportValidity()) return;
  const mine = { controller: new AbortController(), key: key(), id: null, isStopped: false };
  running = mine;
  setBusy(true);
  tokens.clear();
  say("");
  const numbers = new Numbers();
  try {
    await readAnswer(mine, numbers);
  } catch (error) {
    if (mine.isStopped) say("Stopped.");
    else if (error.status === 401) {
      askForKey();
      say("This server asks for an API key.", "bad");
    } else if (error instanceof Refused && mode() === "chat" && /no chat template/.test(error.message)) {
      setMode("completion");
      running = null;
      await run();
      say("This model has no chat template: its prompt was completed.");
      return;
    } else say(error.message, "bad");
  } finally {
    if (running === mine) {
      running = null;
      setBusy(false);
    }
  }
}

async function readAnswer(mine, numbers) {
  const { path, content } = requestOf();
  const reader = new TokenReader();
  let lostAt = 0;
  let reason = null;
  const told = {
    lost: (hasBegun) => {
      lostAt = performance.now();
      say(hasBegun ? "Connection lost; going on where it was …" : "No connection; trying again …", "bad");
    },
    resumed: () => say(`Connection lost, and gone on with after ${time((performance.now() - lostAt) / 1000)}.`),
  };
  const options = { key: mine.key, signal: mine.controller.signal, told };
  for await (const chunk of chunksOf(path, content, options)) {
    mine.id = chunk.id;
    for (const choice of chunk.choices) {
      const pieces = reader.read(choice);
      numbers.add(pieces);
      tokens.add(pieces);
      reason = choice.finish_reason ?? reason;
    }
    if (chunk.usage) numbers.end(chunk.usage, reason);
  }
}

function stopIt() {
  if (!running) return;
  const { controller, id, key: itsKey } = running;
  running.isStopped = true;
  if (id) endAnswer(id, itsKey).catch(() => {});
  controller.abort();
}

// How much has come, how fast.
class Numbers {
  #begin = performance.now();
  #first = null;
  #num = 0;

  constructor() {
    byId("numbers").textContent = "";
  }

  add(pieces) {
    this.#num += pieces.filter((piece) => piece.token !== null).length;
    if (pieces.length) this.#first ??= performance.now();
    if (this.#first !== null) this.#show(this.#num, []);
  }

  end(usage, reason) {
    const why = { stop: "ended by itself or a stop string", length: "max tokens reached" }[reason];
    this.#show(usage.completion_tokens, why ? [why] : []);
  }

  #show(num, more) {
    const now = performance.now();
    const said = [`${num} ${num === 1 ? "token" : "tokens"}`];
    if (this.#first !== null) said.push(`first after ${time((this.#first - this.#begin) / 1000)}`);
    if (num > 1 && now > this.#first) {
      said.push(`${Math.round(((num - 1) * 1000) / (now - this.#first))} a second`);
    }
    byId("numbers").textContent = [...said, ...more].join(" · ");
  }
}

function say(text, kind = "") {
  byId("notice").textContent = text;
  byId("notice").className = kind;
}

function setBusy(isBusy) {
  const hadFocus = document.activeElement === (isBusy ? send : stop);
  send.disabled = isBusy;
  stop.disabled = !isBusy;
  byId("output").setAttribute("aria-busy", String(isBusy));
  if (hadFocus) (isBusy ? stop : send).focus();
}

function setMode(wanted) {
  const wasExample = Object.values(EXAMPLES).includes(prompt.value) || !prompt.value;
  form.elements.mode.value = wanted;
  if (wasExample) prompt.value = EXAMPLES[wanted];
}

// ---- what is served -----------------------------------------------------------------------------

let isModelKnown = false;

async function showModel(name) {
  if (name) byId("model").textContent = name;
  if (isModelKnown || !name) return;
  isModelKnown = true; // or asked for, until there is another key
  const response = await fetch("/v1/models", { headers: headersOf(key()) });
  if (response.status === 401) byId("key-row").hidden = false;
  if (!response.ok) return; // who sends a prompt is told
  const [model] = (await response.json()).data;
  byId("model").textContent = model.id;
  byId("model").title = `The model that is served; up to ${model.max_model_len} tokens a request`;
  byId("max-tokens").max = model.max_model_len;
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
form.addEventListener("change", (event) => {
  if (event.target.name === "mode") setMode(event.target.value);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    run();
  } else if (event.key === "Escape") stopIt();
});
stop.addEventListener("click", stopIt);
addEventListener("pagehide", stopIt);
byId("key").addEventListener("change", () => {
  sessionStorage.setItem(KEY, key());
  isModelKnown = false;
});

byId("key").value = sessionStorage.getItem(KEY) ?? "";
byId("key-row").hidden = !key();
setMode(mode()); // a browser may have kept another one
new Live((name) => {
  showModel(name).catch(() => {
    isModelKnown = false;
  });
});
