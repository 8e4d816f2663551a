// The conversations that this browser keeps, in localStorage: the newest, within bounds.
//
// Each has an entry of its own, so that tabs do not overwrite each other's.

import { load, names, onChange, remove, save } from "../storage.js";
import { Conversation } from "./conversation.js";

const PREFIX = "conversation.";
const MAX_CONVERSATIONS = 50;
const MAX_CHARS = 2_000_000; // all together; browsers give an origin 5 million

export class History {
  #kept = new Map(); // id to {title, updated, size}

  constructor() {
    for (const name of names(PREFIX)) this.#read(name);
    onChange((name) => {
      if (name === null) this.#kept.clear();
      else if (name.startsWith(PREFIX)) this.#read(name);
    });
  }

  // {id, title, updated}, the newest first.
  list() {
    const all = [...this.#kept].map(([id, { title, updated }]) => ({ id, title, updated }));
    return all.sort((one, other) => other.updated - one.updated);
  }

  // null if it is not there, or no longer.
  load(id) {
    return this.#read(PREFIX + id);
  }

  // The oldest others make room. False: this browser does not keep it.
  save(conversation) {
    const seen = conversation.updated;
    if (this.#read(PREFIX + conversation.id)?.updated > seen) {
      conversation.id = new Conversation().id; // another tab went on with it: now there are two
    }
    conversation.updated = Math.max(Date.now(), (this.list()[0]?.updated ?? 0) + 1);
    const size = JSON.stringify(conversation).length;
    if (size > MAX_CHARS) return false;
    const { id, title, updated } = conversation;
    const others = this.list().filter((other) => other.id !== id);
    const isFull = () => {
      const all = others.reduce((sum, other) => sum + this.#kept.get(other.id).size, size);
      return others.length >= MAX_CONVERSATIONS || all > MAX_CHARS;
    };
    while (isFull()) this.remove(others.pop().id);
    while (!save(PREFIX + id, conversation)) {
      if (!others.length) return false;
      this.remove(others.pop().id);
    }
    this.#kept.set(id, { title, updated, size });
    return true;
  }

  remove(id) {
    this.#kept.delete(id);
    remove(PREFIX + id);
  }

  #read(name) {
    const id = name.slice(PREFIX.length);
    this.#kept.delete(id);
    const body = load(name);
    try {
      const found = Conversation.from(body);
      if (found.id !== id) return null;
      const { title, updated } = found;
      this.#kept.set(id, { title, updated, size: JSON.stringify(body).length });
      return found;
    } catch {
      return null; // not one of ours, or none
    }
  }
}
