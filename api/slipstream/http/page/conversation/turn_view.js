// What is seen of a turn: its prompt, which can be edited, and its answer.

import { copyButton } from "../clipboard.js";
import { button, element } from "../elements.js";
import { AnswerView } from "./answer_view.js";

export class TurnView {
  #turn;
  #number;
  #told;
  #said;
  #prompt;
  #edit;

  // number: the turn's, from 1. told: {onEdited(turn, prompt), onRegenerate(turn)}.
  // options: of the AnswerView.
  constructor(turn, number, told, options) {
    this.#turn = turn;
    this.#number = number;
    this.#told = told;
    this.#said = element("p", { className: "said", textContent: turn.prompt });
    this.#edit = button("Edit", `Edit prompt ${number}`, () => this.edit(turn.prompt));
    const tools = [this.#edit, copyButton(`Copy prompt ${number}`, () => turn.prompt)];
    this.#prompt = element(
      "div",
      { className: "prompt" },
      this.#said,
      element("div", { className: "tools" }, ...tools),
    );
    this.answer = new AnswerView(turn.answer, {
      ...options,
      label: `Answer ${number}`,
      isMarkdown: turn.mode === "chat",
    });
    const again = button("Regenerate", `Regenerate answer ${number}`, () =>
      told.onRegenerate(turn),
    );
    again.classList.add("asks", "again");
    this.#edit.classList.add("asks");
    const copy = copyButton(`Copy answer ${number}`, () => turn.answer.text);
    this.element = element(
      "li",
      { className: "turn", dataset: { mode: turn.mode } },
      element("h3", { className: "unseen", textContent: `Prompt ${number}` }),
      this.#prompt,
      element("h3", { className: "unseen", textContent: `Answer ${number}` }),
      this.answer.element,
      element("div", { className: "tools" }, copy, again),
    );
  }

  // A field in place of the prompt, with this text in it.
  edit(text) {
    const label = `Prompt ${this.#number}`;
    const field = element("textarea", { value: text, rows: 3, required: true, spellcheck: false });
    field.setAttribute("aria-label", label);
    const close = () => {
      form.replaceWith(this.#prompt);
      this.#edit.focus();
    };
    const cancel = element("button", { type: "button", textContent: "Cancel" });
    cancel.addEventListener("click", close);
    const send = element("button", { type: "submit", className: "primary", textContent: "Send" });
    const hint = element("span", { className: "hint", textContent: "Later turns go." });
    const buttons = element("div", { className: "buttons" }, send, cancel, hint);
    const form = element("form", { className: "edit" }, field, buttons);
    form.setAttribute("aria-label", `Edit prompt ${this.#number}`);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#told.onEdited(this.#turn, field.value);
    });
    form.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation(); // it does not stop an answer
        close();
      } else if (sends(event)) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    this.#prompt.replaceWith(form);
    field.focus();
  }
}

// Whether a key pressed in a text field sends it: Enter, but where fingers type, with Ctrl alone.
export function sends({ key, shiftKey, ctrlKey, metaKey, isComposing }) {
  if (key !== "Enter" || isComposing) return false;
  return ctrlKey || metaKey || (!shiftKey && !matchMedia("(pointer: coarse)").matches);
}
