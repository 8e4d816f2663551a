// A conversation: a system prompt and turns, each a prompt and its answer.
//
// mode of a turn: "chat", which is sent with the turns before it, or "completion", which stands
// alone.

import { Answer } from "./answer.js";

const NUM_LOGPROBS = 5;
const COMPLETION_TOKENS = 512; // the API's default of 16 looks like a fault
const TITLE_CHARS = 48;
const MODES = ["chat", "completion"];

export class Turn {
  constructor(mode, prompt, answer = new Answer()) {
    this.mode = mode;
    this.prompt = prompt;
    this.answer = answer;
  }
}

export class Conversation {
  constructor(system = "") {
    this.id = crypto.getRandomValues(new Uint32Array(3)).join("-");
    this.updated = Date.now();
    this.system = system;
    this.turns = [];
  }

  // Of what `toJSON` gave. Throws where it is something else.
  static from({ id, updated, system, turns }) {
    const made = new Conversation(text(system));
    made.id = text(id);
    made.updated = Number(updated);
    made.turns = turns.map(({ mode, prompt, answer }) => {
      if (!MODES.includes(mode)) throw new TypeError(`a turn's mode: ${mode}`);
      return new Turn(mode, text(prompt), Answer.from(answer));
    });
    return made;
  }

  toJSON() {
    const { id, updated, system, turns } = this;
    return { id, updated, system, turns };
  }

  get title() {
    const first = this.turns[0]?.prompt.trim().replace(/\s+/g, " ") ?? "";
    if (!first) return "New conversation";
    const chars = Array.from(first);
    return chars.length <= TITLE_CHARS ? first : `${chars.slice(0, TITLE_CHARS - 1).join("")}…`;
  }

  // {path, content} that asks for the answer of a turn. fields: sampling parameters. longest: of
  // prompt and answer, in tokens; null if it is not known.
  requestOf(turn, fields, longest) {
    const shared = { ...fields, stream_options: { include_usage: true } };
    if (turn.mode === "completion") {
      const max_tokens = Math.min(COMPLETION_TOKENS, Math.ceil((longest ?? Infinity) / 2));
      const content = { max_tokens, ...shared, prompt: turn.prompt, logprobs: NUM_LOGPROBS };
      return { path: "/v1/completions", content };
    }
    const messages = this.#messagesTo(turn);
    const content = { ...shared, messages, logprobs: true, top_logprobs: NUM_LOGPROBS };
    return { path: "/v1/chat/completions", content };
  }

  // Turns without an answer are left out: templates want roles in turns. So are reasoning, which
  // models do not read again, and tool calls, which would need the tools' results behind them.
  #messagesTo(turn) {
    const messages = this.system.trim() ? [{ role: "system", content: this.system }] : [];
    for (const each of this.turns) {
      if (each === turn) break;
      if (each.mode !== "chat" || !each.answer.text) continue;
      messages.push({ role: "user", content: each.prompt });
      messages.push({ role: "assistant", content: each.answer.text });
    }
    return [...messages, { role: "user", content: turn.prompt }];
  }
}

function text(value) {
  if (typeof value !== "string") throw new TypeError(`not a text: ${typeof value}`);
  return value;
}
