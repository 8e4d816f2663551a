// An answer as it comes: its text, reasoning and tool calls, and how fast they came.
//
// `pieces` are the text's tokens with their log-probabilities. They are too many to be kept in the
// history: an answer from there has text alone.

import { time } from "../live/live.js";
import { TokenReader } from "./tokens.js";

const REASONS = {
  stop: "ended by itself or a stop string",
  length: "max tokens reached",
  tool_calls: "waits for its tools",
  abort: "aborted",
  stopped: "stopped",
  lost: "broken off",
};

// In ms since 1970, which other pages understand, and never set back within one.
function clock() {
  return performance.timeOrigin + performance.now();
}

export class Answer {
  text = "";
  reasoning = "";
  toolCalls = []; // {name, arguments}, arguments as JSON
  pieces = [];
  reason = null; // OpenAI's finish_reason; "stopped" by the reader, "lost" with the server
  numTokens = 0;
  firstS = null; // seconds until the first token
  perS = null; // tokens a second, after the first

  #reader = new TokenReader();
  #begin = clock();
  #first = null;

  // Of what `toJSON` gave. Throws where it is something else.
  static from(kept) {
    const made = new Answer();
    made.text = String(kept.text);
    made.reasoning = String(kept.reasoning);
    made.toolCalls = kept.toolCalls.map((call) => ({
      name: String(call.name),
      arguments: String(call.arguments),
    }));
    made.reason = kept.reason in REASONS ? kept.reason : "stopped"; // a reload cut it off
    made.numTokens = Number(kept.numTokens);
    made.firstS = kept.firstS === null ? null : Number(kept.firstS);
    made.perS = kept.perS === null ? null : Number(kept.perS);
    return made;
  }

  // An answer of which more comes than was kept, the next chunk behind the last one. begin: as
  // another page had it.
  goOn(begin) {
    this.reason = null;
    this.#begin = begin;
    this.#first = this.firstS === null ? null : begin + this.firstS * 1000;
    this.#reader = new TokenReader(this.text);
    if (this.text) this.pieces.push({ text: this.text, token: null });
  }

  // When it was asked for, as `clock` has it.
  get begin() {
    return this.#begin;
  }

  toJSON() {
    const { text, reasoning, toolCalls, reason, numTokens, firstS, perS } = this;
    return { text, reasoning, toolCalls, reason, numTokens, firstS, perS };
  }

  get isEmpty() {
    return !this.text && !this.reasoning && !this.toolCalls.length;
  }

  // A chunk of the stream, in the shape of OpenAI's chats or completions.
  add(chunk) {
    for (const choice of chunk.choices ?? []) {
      const pieces = this.#reader.read(choice);
      const delta = choice.delta ?? { content: choice.text };
      this.text += delta.content ?? "";
      // DeepSeek's name and vLLM's
      this.reasoning += delta.reasoning_content ?? delta.reasoning ?? "";
      for (const call of delta.tool_calls ?? []) this.#addCall(call);
      this.pieces.push(...pieces);
      this.reason = choice.finish_reason ?? this.reason;
      this.#count(pieces.filter((piece) => piece.token !== null).length, pieces.length > 0);
    }
    if (chunk.usage) this.#count(chunk.usage.completion_tokens - this.numTokens, false);
  }

  // The first chunk of a call has its name, the others parts of its arguments.
  #addCall({ index = 0, function: part = {} }) {
    const at = Math.min(index, this.toolCalls.length);
    this.toolCalls[at] ??= { name: "", arguments: "" };
    this.toolCalls[at].name += part.name ?? "";
    this.toolCalls[at].arguments += part.arguments ?? "";
  }

  #count(num, isSome) {
    const now = clock();
    this.numTokens += num;
    if (isSome || !this.isEmpty) this.#first ??= now;
    if (this.#first === null) return;
    this.firstS = (this.#first - this.#begin) / 1000;
    if (this.numTokens > 1 && now > this.#first)
      this.perS = ((this.numTokens - 1) * 1000) / (now - this.#first);
  }

  // How much has come, how fast, and why no more.
  get numbers() {
    const said = [];
    if (this.numTokens) said.push(`${this.numTokens} ${this.numTokens === 1 ? "token" : "tokens"}`);
    if (this.firstS !== null) said.push(`first after ${time(this.firstS)}`);
    if (this.perS !== null) said.push(`${Math.round(this.perS)} a second`);
    if (this.reason) said.push(REASONS[this.reason] ?? this.reason);
    return said.join(" · ");
  }
}
