// The served model: its name, and what the server says of it.

import { headersOf } from "./conversation/stream.js";
import { byId, element } from "./elements.js";

export class Model {
  #key;
  #onKnown;
  #onKeyNeeded;
  #isKnown = false; // or asked for, until there is another key
  #known = null;

  // key: gives the API key. onKnown: is given the model. onKeyNeeded: called where the server asks
  // for a key.
  constructor({ key, onKnown, onKeyNeeded }) {
    this.#key = key;
    this.#onKnown = onKnown;
    this.#onKeyNeeded = onKeyNeeded;
    byId("model").addEventListener("click", () => {
      byId("details").showModal();
      this.#showDetails();
    });
    byId("details-close").addEventListener("click", () => byId("details").close());
  }

  // name: as /live has it; null while the server starts.
  async show(name) {
    if (name) byId("model").textContent = name;
    if (this.#isKnown || !name) return;
    this.#isKnown = true;
    try {
      const response = await fetch("/v1/models", { headers: headersOf(this.#key()) });
      if (response.status === 401) this.#onKeyNeeded();
      if (!response.ok) return; // who sends a prompt is told
      [this.#known] = (await response.json()).data;
      byId("model").textContent = this.#known.id;
      this.#onKnown(this.#known);
    } catch {
      this.#isKnown = false;
    }
  }

  // There is another key.
  forget() {
    this.#isKnown = false;
  }

  async #showDetails() {
    const facts = byId("facts");
    if (!facts.childElementCount) facts.append(...rows([["Model", byId("model").textContent]]));
    const [version, health] = await Promise.all([json("/version"), json("/health")]);
    const known = this.#known;
    const processes = Object.entries(health?.processes ?? {});
    facts.replaceChildren(
      ...rows([
        ["Model", known?.id ?? health?.model],
        [
          "Longest request",
          known && `${known.max_model_len.toLocaleString("en")} tokens, prompt and answer`,
        ],
        ["Served by", known?.owned_by],
        ["Since", known && new Date(known.created * 1000).toLocaleString()],
        ["Version", version?.version && `Slipstream ${version.version}`],
        ["Server", health?.status ?? "does not answer"],
        ...processes.map(([name, state]) => [`Process ${name}`, state]),
      ]),
    );
  }
}

async function json(path) {
  try {
    return await (await fetch(path)).json(); // /health has a body with other statuses, too
  } catch {
    return null;
  }
}

function rows(facts) {
  return facts
    .filter(([, value]) => value)
    .flatMap(([name, value]) => [
      element("dt", { textContent: name }),
      element("dd", { textContent: value }),
    ]);
}
