// An answer's tokens: their text, how likely each was, and what else could have stood there.
//
// The text that is shown is the chunks' text, joined; how it is cut into tokens cannot change it.

import { element } from "../elements.js";

const UNSURE_AT = 4; // a log-probability of -4, 2 %, is as unsure as colour gets
const LEAST = -9999; // how minus infinity is told

// The tokens of a chunk's choice: {token, logprob, top: [[token, logprob], …], end}; end: where its
// text ends within the chunk's, in characters; the last one's is the chunk's.
export class TokenReader {
  #shown; // characters
  #decoder = new TextDecoder(); // of a chat's tokens, which may be parts of characters

  // text: of the answer, as far as another reader has read it.
  constructor(text = "") {
    this.#shown = Array.from(text).length;
  }

  read(choice) {
    const text = choice.delta ? (choice.delta.content ?? "") : choice.text;
    const chars = Array.from(text);
    const logprobs = choice.logprobs;
    const tokens = !logprobs
      ? []
      : logprobs.content
        ? this.#ofChat(logprobs.content)
        : this.#ofColumns(logprobs);
    this.#shown += chars.length;
    let from = 0;
    const last = tokens.length - 1;
    const pieces = tokens.map((token, index) => {
      const to = index === last ? chars.length : Math.min(chars.length, Math.max(from, token.end));
      const piece = { ...token, text: chars.slice(from, to).join("") };
      from = to;
      return piece;
    });
    return tokens.length || !text ? pieces : [{ text, token: null }];
  }

  #ofColumns({ tokens, token_logprobs, top_logprobs, text_offset }) {
    return tokens.map((token, index) => ({
      token,
      logprob: token_logprobs[index],
      top: Object.entries(top_logprobs[index] ?? {}),
      end: (text_offset[index + 1] ?? Infinity) - this.#shown,
    }));
  }

  #ofChat(content) {
    let end = 0;
    return content.map(({ token, logprob, bytes, top_logprobs }) => {
      const text = bytes ? this.#decoder.decode(new Uint8Array(bytes), { stream: true }) : token;
      end += Array.from(text).length;
      const top = new Map([
        [token, logprob],
        ...top_logprobs.map((one) => [one.token, one.logprob]),
      ]);
      return { token, logprob, top: [...top], end };
    });
  }
}

// An answer's text as tokens, each coloured by how unsure the model was of it. candidates: the card
// that shows what else could have stood there, shared by all answers.
export class TokenView {
  #candidates;
  #numShown = 0;
  #pieces = [];

  constructor(label, candidates) {
    this.#candidates = candidates;
    this.element = element("div", { className: "tokens", tabIndex: 0 });
    this.element.setAttribute("role", "group");
    this.element.setAttribute(
      "aria-label",
      `${label}. Left and right arrow keys go through its tokens.`,
    );
    const look = (event) => this.#look(event.target.closest(".token"));
    this.element.addEventListener(
      "pointerover",
      (event) => event.pointerType === "mouse" && look(event),
    );
    this.element.addEventListener("pointerleave", () => this.#look(null));
    this.element.addEventListener("click", look);
    this.element.addEventListener("blur", () => this.#look(null));
    this.element.addEventListener("keydown", (event) => this.#onKey(event));
  }

  // All pieces so far: those that are not shown yet are.
  update(pieces) {
    this.#pieces = pieces;
    const fragment = document.createDocumentFragment();
    for (; this.#numShown < pieces.length; this.#numShown += 1) {
      const piece = pieces[this.#numShown];
      if (!piece.text) continue; // a part of the character that the next one completes
      const span = element("span", { textContent: piece.text });
      if (piece.token !== null) {
        span.className = "token";
        span.dataset.index = this.#numShown;
        span.style.setProperty("--unsure", Math.min(1, -piece.logprob / UNSURE_AT).toFixed(3));
      }
      fragment.append(span);
    }
    this.element.append(fragment);
  }

  #onKey(event) {
    const spans = [...this.element.getElementsByClassName("token")];
    const at = spans.indexOf(this.#candidates.span);
    const next = {
      ArrowRight: Math.min(spans.length - 1, at + 1),
      ArrowLeft: at < 0 ? spans.length - 1 : Math.max(0, at - 1),
      Home: 0,
      End: spans.length - 1,
    }[event.key];
    if (next === undefined || !spans.length || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    spans[next].scrollIntoView({ block: "nearest" });
    this.#look(spans[next]);
  }

  #look(span) {
    this.#candidates.look(span, span && this.#pieces[span.dataset.index]);
  }
}

// The card of what else could have stood where a token stands.
export class Candidates {
  span = null; // of the token that is looked at
  #card;
  #frame;

  // frame: the element that answers scroll in.
  constructor(card, frame) {
    this.#card = card;
    this.#frame = frame;
    for (const moving of [frame, window]) moving.addEventListener("scroll", () => this.#place());
  }

  look(span, piece) {
    if (span === this.span) return;
    this.span?.classList.remove("looked");
    this.span = span;
    this.#card.hidden = !span;
    if (!span) return;
    span.classList.add("looked");
    this.#card.replaceChildren(...candidateRows(piece));
    this.#place();
  }

  // Below the token, or above it where there is no room; within the window's width.
  #place() {
    if (!this.span) return;
    const frame = this.#frame.getBoundingClientRect();
    const token = this.span.getClientRects()[0];
    if (!token || token.bottom < frame.top || token.top > frame.bottom) {
      this.look(null);
      return;
    }
    const { offsetWidth: width, offsetHeight: height } = this.#card;
    const { clientWidth, clientHeight } = document.documentElement;
    const left = Math.max(8, Math.min(token.left, clientWidth - width - 8));
    const isBelow = token.bottom + height + 8 < clientHeight;
    const top = isBelow ? token.bottom + 6 : token.top - height - 6;
    this.#card.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
  }
}

function candidateRows({ token, top }) {
  return top
    .toSorted((one, other) => other[1] - one[1])
    .map(([name, logprob]) => {
      const share = logprob <= LEAST ? 0 : Math.exp(logprob);
      const bar = element("i");
      bar.style.width = `${(share * 100).toFixed(1)}%`;
      return element(
        "div",
        { className: name === token ? "candidate taken" : "candidate" },
        element("code", { textContent: visible(name) }),
        element("span", {}, bar),
        element("b", { textContent: percentOf(share) }),
      );
    });
}

export function percentOf(share) {
  if (share >= 0.9995) return "100 %";
  if (share < 0.001) return "< 0.1 %";
  return `${(share * 100).toFixed(1)} %`;
}

function visible(token) {
  return token.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥") || "∅";
}
