// What is seen of an answer: reasoning, tool calls, and its text as text or as tokens.
//
// An answer of a chat is markdown; a completion is shown as it is, its line breaks and spaces too.

import { element } from "../elements.js";
import { Frame } from "../frame.js";
import { Markdown } from "./markdown.js";
import { TokenView } from "./tokens.js";

export class AnswerView {
  #answer;
  #label;
  #isMarkdown;
  #candidates;
  #kind;
  #isBusy = false;
  #frame = new Frame(() => this.#render());
  #onRendered;
  #reasoning = null; // {details, summary, text}
  #calls = element("div", { className: "calls" });
  #body = element("div", { className: "body" });
  #text = null; // Markdown, Plain or TokenView
  #numbers = document.createTextNode("");

  // kind: "text" or "tokens". isBusy: more is to come. onRendered: called after each rendering.
  constructor(answer, { label, isMarkdown, candidates, kind, isBusy, onRendered }) {
    this.#isBusy = isBusy;
    this.#answer = answer;
    this.#label = label;
    this.#isMarkdown = isMarkdown;
    this.#candidates = candidates;
    this.#onRendered = onRendered;
    this.element = element(
      "div",
      { className: "answer" },
      this.#calls,
      this.#body,
      element("p", { className: "numbers" }, this.#numbers),
    );
    this.element.setAttribute("aria-busy", String(isBusy));
    this.show(kind);
  }

  // As text or as tokens.
  show(kind) {
    if (kind === this.#kind) return;
    this.#kind = kind;
    this.#candidates.look(null);
    if (kind === "tokens") this.#text = new TokenView(this.#label, this.#candidates);
    else this.#text = this.#isMarkdown ? new Markdown(this.#label) : new Plain();
    this.#body.replaceChildren(this.#text.element);
    this.#render();
  }

  // With the next frame.
  update() {
    this.#frame.ask();
  }

  // No more is to come.
  end() {
    this.#isBusy = false;
    this.element.setAttribute("aria-busy", "false");
    this.#render();
  }

  #render() {
    const { text, reasoning, toolCalls, pieces, numbers } = this.#answer;
    if (reasoning) this.#renderReasoning(reasoning);
    if (toolCalls.length) this.#renderCalls(toolCalls);
    const isKept = text && !pieces.length; // from the history: the text is one piece
    if (this.#kind === "tokens") this.#text.update(isKept ? [{ text, token: null }] : pieces);
    else this.#text.update(text, !this.#isBusy);
    this.#numbers.data = numbers;
    this.element.classList.toggle("waiting", this.#isBusy && this.#answer.isEmpty);
    this.#onRendered();
  }

  // Open while there is nothing else; once the reader has opened or closed it, it stays so.
  #renderReasoning(reasoning) {
    if (!this.#reasoning) {
      const summary = element("summary");
      const text = element("div", { className: "plain" });
      const details = element("details", { className: "reasoning" }, summary, text);
      this.#reasoning = { details, summary, text, isTouched: false };
      summary.addEventListener("click", () => {
        this.#reasoning.isTouched = true;
      });
      this.element.prepend(details);
    }
    const isThinking = this.#isBusy && !this.#answer.text && !this.#answer.toolCalls.length;
    if (!this.#reasoning.isTouched) this.#reasoning.details.open = isThinking;
    this.#reasoning.summary.textContent = isThinking ? "Reasoning …" : "Reasoning";
    append(this.#reasoning.text, reasoning);
  }

  #renderCalls(calls) {
    const made = calls.map((call) => {
      const name = element("code", { textContent: call.name || "…" });
      const head = element("p", { className: "call-name" }, "Calls ", name);
      const given = element("pre", { tabIndex: 0, textContent: indented(call.arguments) });
      given.setAttribute("role", "group");
      given.setAttribute("aria-label", `Arguments of ${call.name}`);
      return element("div", { className: "call" }, head, given);
    });
    const said = JSON.stringify(calls);
    if (this.#calls.dataset.said === said) return;
    this.#calls.dataset.said = said;
    this.#calls.replaceChildren(...made);
  }
}

// Text as it is.
class Plain {
  element = element("div", { className: "plain" });

  update(text) {
    append(this.element, text);
  }
}

// The element's text becomes `text`, which has only grown.
function append(parent, text) {
  const shown = parent.firstChild ?? parent.appendChild(document.createTextNode(""));
  if (text.length > shown.length) shown.appendData(text.slice(shown.length));
}

// JSON with a line to each value; what is not whole yet stays as it is.
function indented(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
}
