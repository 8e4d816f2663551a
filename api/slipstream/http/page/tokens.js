// An answer's tokens: their text, how likely each was, and what else could have stood there.
//
// Owns: the spans, the one that is looked at, its candidates. Does not know: where chunks come from.
// Rule: the text that is shown is the chunks' text, joined; how it is cut into tokens cannot change it.

const UNSURE_AT = 4; // a log-probability of -4, 2 %, is as unsure as colour gets
const LEAST = -9999; // how minus infinity is told

// The tokens of a chunk's choice: {token, logprob, top: [[token, logprob], …], end}; end: where its
// text ends within the chunk's, in characters; the last one's is the chunk's.
export class TokenReader {
  #shown = 0; // characters
  #decoder = new TextDecoder(); // of a chat's tokens, which may be parts of characters

  read(choice) {
    const text = choice.delta ? (choice.delta.content ?? "") : choice.text;
    const chars = Array.from(text);
    const logprobs = choice.logprobs;
    const tokens = !logprobs ? [] : logprobs.content ? this.#ofChat(logprobs.content) : this.#ofColumns(logprobs);
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
      const top = new Map([[token, logprob], ...top_logprobs.map((one) => [one.token, one.logprob])]);
      return { token, logprob, top: [...top], end };
    });
  }
}

export class TokenView {
  #output;
  #card;
  #tokens = [];
  #waiting = []; // not shown yet
  #looked = null; // the span that is looked at

  constructor(output, card) {
    this.#output = output;
    this.#card = card;
    output.addEventListener("pointerover", (event) => {
      if (event.pointerType === "mouse") this.#look(event.target.closest(".token"));
    });
    output.addEventListener("pointerleave", () => this.#look(null));
    output.addEventListener("click", (event) => this.#look(event.target.closest(".token")));
    output.addEventListener("blur", () => this.#look(null));
    output.addEventListener("scroll", () => this.#place());
    output.addEventListener("keydown", (event) => this.#onKey(event));
  }

  clear() {
    this.#look(null);
    this.#tokens = [];
    this.#waiting = [];
    this.#output.replaceChildren();
  }

  // Shown with the next frame, all that come until then at once.
  add(pieces) {
    if (!this.#waiting.length) requestAnimationFrame(() => this.#show());
    this.#waiting.push(...pieces);
  }

  #show() {
    const output = this.#output;
    const isAtEnd = output.scrollHeight - output.scrollTop - output.clientHeight < 30;
    const fragment = document.createDocumentFragment();
    for (const piece of this.#waiting) {
      if (!piece.text) continue; // a part of the character that the next one completes
      const span = document.createElement("span");
      span.textContent = piece.text;
      if (piece.token !== null) {
        span.className = "token";
        span.dataset.index = this.#tokens.push(piece) - 1;
        span.style.setProperty("--unsure", Math.min(1, -piece.logprob / UNSURE_AT).toFixed(3));
      }
      fragment.append(span);
    }
    this.#waiting = [];
    output.append(fragment);
    if (isAtEnd) output.scrollTop = output.scrollHeight;
  }

  #onKey(event) {
    const spans = this.#output.getElementsByClassName("token");
    const at = this.#looked ? Number(this.#looked.dataset.index) : null;
    const next = {
      ArrowRight: at === null ? 0 : Math.min(spans.length - 1, at + 1),
      ArrowLeft: at === null ? spans.length - 1 : Math.max(0, at - 1),
      Home: 0,
      End: spans.length - 1,
    }[event.key];
    if (next === undefined || !spans.length || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    spans[next].scrollIntoView({ block: "nearest" });
    this.#look(spans[next]);
  }

  #look(span) {
    if (span === this.#looked) return;
    this.#looked?.classList.remove("looked");
    this.#looked = span;
    this.#card.hidden = !span;
    if (!span) return;
    span.classList.add("looked");
    this.#card.replaceChildren(...candidateRows(this.#tokens[span.dataset.index]));
    this.#place();
  }

  // Below the token, or above it where there is no room; within the output's width.
  #place() {
    if (!this.#looked) return;
    const frame = this.#output.getBoundingClientRect();
    const token = this.#looked.getClientRects()[0] ?? frame;
    if (token.bottom < frame.top || token.top > frame.bottom) {
      this.#look(null);
      return;
    }
    const { offsetWidth: width, offsetHeight: height } = this.#card;
    const left = Math.max(0, Math.min(token.left - frame.left, frame.width - width));
    const isBelow = token.bottom + height + 8 < document.documentElement.clientHeight;
    const top = isBelow ? token.bottom - frame.top + 6 : token.top - frame.top - height - 6;
    this.#card.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
  }
}

function candidateRows({ token, top }) {
  return top
    .toSorted((one, other) => other[1] - one[1])
    .map(([name, logprob]) => {
      const share = logprob <= LEAST ? 0 : Math.exp(logprob);
      const row = document.createElement("div");
      row.className = name === token ? "candidate taken" : "candidate";
      const label = document.createElement("code");
      label.textContent = visible(name);
      const bar = document.createElement("i");
      bar.style.width = `${(share * 100).toFixed(1)}%`;
      const track = document.createElement("span");
      track.append(bar);
      const percent = document.createElement("b");
      percent.textContent = percentOf(share);
      row.append(label, track, percent);
      return row;
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
