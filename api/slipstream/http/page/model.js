// The served models: the one that is asked, and what the server says of it.

import { headersOf } from "./conversation/stream.js";
import { byId, element } from "./elements.js";

export class Model {
  #key;
  #onKnown;
  #onKeyNeeded;
  #shown = null; // what /live had when the models were asked for; null: ask, if it has a name
  #served = [];
  #known = null;

  // key: gives the API key. onKnown: is given the model that is asked. onKeyNeeded: called where the
  // server asks for a key.
  constructor({ key, onKnown, onKeyNeeded }) {
    this.#key = key;
    this.#onKnown = onKnown;
    this.#onKeyNeeded = onKeyNeeded;
    byId("model").addEventListener("click", () => {
      byId("details").showModal();
      this.#showDetails();
    });
    byId("models").addEventListener("change", () => this.#choose(byId("models").value));
    byId("details-close").addEventListener("click", () => byId("details").close());
  }

  // What a request says of the model: its name where there are several, else nothing.
  get ofRequest() {
    return this.#served.length > 1 ? { model: this.#known.id } : {};
  }

  // The longest request, in tokens, prompt and answer; null while it is not known.
  get longest() {
    return this.#known?.max_model_len ?? null;
  }

  // name: as /live has it, of several their names; null while the server starts.
  async show(name) {
    if (name) byId("model").textContent = name;
    if (this.#shown === name || !name) return;
    this.#shown = name;
    try {
      const response = await fetch("/v1/models", { headers: headersOf(this.#key()) });
      if (response.status === 401) this.#onKeyNeeded();
      if (!response.ok) return; // who sends a prompt is told
      this.#served = (await response.json()).data;
      const names = this.#served.map(({ id }) => id);
      byId("models").replaceChildren(...names.map((textContent) => element("option", { textContent })));
      byId("models").hidden = names.length < 2;
      this.#choose(this.#known?.id);
    } catch {
      this.#shown = null;
    }
  }

  // The first one where the server has none of this name, or no longer.
  #choose(name) {
    this.#known = this.#served.find(({ id }) => id === name) ?? this.#served[0];
    byId("models").value = this.#known.id;
    this.#onKnown(this.#known);
  }

  // There is another key.
  forget() {
    this.#shown = null;
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
