// Sampling settings: a form whose filled fields go into requests by their names, as
// /v1/chat/completions takes them. What it holds is kept in this browser.

import { byId } from "../elements.js";
import { load, save } from "../storage.js";

const ESCAPES = { n: "\n", t: "\t", "\\": "\\" };

export class Settings {
  #dialog = byId("settings");
  #form = byId("settings-form");

  constructor() {
    const fields = this.#fields();
    const kept = load("settings") ?? {};
    for (const field of fields) {
      if (typeof kept[field.name] === "string") field.value = kept[field.name];
    }
    this.#form.addEventListener("change", () => {
      save("settings", Object.fromEntries(fields.map(({ name, value }) => [name, value])));
    });
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#dialog.close();
    });
    byId("defaults").addEventListener("click", () => {
      for (const field of fields) field.value = field.defaultValue;
      this.#form.dispatchEvent(new Event("change"));
    });
    byId("settings-open").addEventListener("click", () => this.#dialog.showModal());
  }

  // Whether all can be sent; if not, the reader is shown why.
  check() {
    if (this.#form.checkValidity()) return true;
    if (!this.#dialog.open) this.#dialog.showModal();
    this.#form.reportValidity();
    return false;
  }

  // The request's fields, by name.
  get values() {
    const values = {};
    for (const { name, type, value } of this.#fields()) {
      if (type === "number" && value !== "") values[name] = Number(value);
      else if (name === "stop" && stops(value).length) values.stop = stops(value);
    }
    return values;
  }

  set maxTokens(most) {
    this.#form.elements.max_tokens.max = most;
  }

  // Those with names are the request's.
  #fields() {
    return [...this.#form.elements].filter((field) => field.name);
  }
}

// A stop string a line.
function stops(text) {
  const lines = text.split("\n").filter((line) => line !== "");
  return lines.map((line) => line.replace(/\\([nt\\])/g, (_, char) => ESCAPES[char]));
}
