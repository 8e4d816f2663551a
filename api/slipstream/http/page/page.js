// The page: a conversation with the model, beside what the server does.

import { Conversation, Turn } from "./conversation/conversation.js";
import { History } from "./conversation/history.js";
import { Settings } from "./conversation/settings.js";
import { chunksOf, endAnswer, Refused, streamed } from "./conversation/stream.js";
import { Candidates } from "./conversation/tokens.js";
import { sends, TurnView } from "./conversation/turn_view.js";
import { byId, element } from "./elements.js";
import { Live, time } from "./live/live.js";
import { Model } from "./model.js";
import { load, onChange, save, saveForTab, takeOfTab } from "./storage.js";
import { switchTheme } from "./theme.js";

const KEY = "slipstream-key";
const LEFT = "left"; // by the page before, in this tab
const SAID_CHARS = 400; // of an answer, to those who hear the page
const form = byId("ask");
const prompt = byId("prompt");
const send = byId("send");
const stop = byId("stop");
const turnsBox = byId("turns");
const turnList = byId("turn-list");
const history = new History();
const settings = new Settings();
const candidates = new Candidates(byId("candidates"), turnsBox);
const model = new Model({
  key,
  onKnown: ({ max_model_len }) => {
    settings.maxTokens = max_model_len;
  },
  onKeyNeeded: () => {
    byId("key-row").hidden = false;
  },
});
let conversation = new Conversation();
let views = []; // of its turns
let running = null; // {controller, key, request, id, isStopped, turn, conversation}

function key() {
  return byId("key").value.trim();
}

function mode() {
  return form.elements.mode.value;
}

// Answers are shown as "text" or as "tokens".
function view() {
  return document.querySelector("#view :checked").value;
}

// Checks the button of this value, if there is one.
function choose(fieldset, value) {
  for (const each of byId(fieldset).querySelectorAll("input"))
    each.checked ||= each.value === value;
}

function say(text, kind = "") {
  byId("notice").textContent = text;
  byId("notice").className = kind;
}

// ---- the conversation ---------------------------------------------------------------------------

function open(next) {
  stopIt();
  conversation = next;
  byId("system").value = next.system;
  showTurns();
  showConversations();
  turnsBox.scrollTop = turnsBox.scrollHeight;
}

function showTurns() {
  candidates.look(null);
  views = [];
  turnList.replaceChildren();
  for (const turn of conversation.turns) addView(turn);
  byId("empty").hidden = views.length > 0;
}

function addView(turn) {
  const told = {
    onEdited: (edited, text) => ask(text, edited),
    onRegenerate: (again) => ask(again.prompt, again),
  };
  const isBusy = running?.turn === turn;
  const made = new TurnView(turn, views.length + 1, told, {
    candidates,
    kind: view(),
    isBusy,
    onRendered: follow,
  });
  views.push(made);
  turnList.append(made.element);
  return made;
}

// The end stays in sight while the answer comes, for a reader who is there.
let isAtEnd = true;
turnsBox.addEventListener("scroll", () => {
  isAtEnd = turnsBox.scrollHeight - turnsBox.scrollTop - turnsBox.clientHeight < 40;
});
function follow() {
  if (running && isAtEnd) turnsBox.scrollTop = turnsBox.scrollHeight;
}

function showConversations() {
  const kept = history.list();
  const others = kept.some(({ id }) => id === conversation.id) ? kept : [conversation, ...kept];
  byId("conversations").replaceChildren(
    ...others.map(({ id, title }) => element("option", { value: id, textContent: title })),
  );
  byId("conversations").value = conversation.id;
  byId("delete").disabled = running !== null || !conversation.turns.length;
}

// Whether this browser has the conversation now.
function keep() {
  if (!conversation.turns.length) return false;
  const isKept = history.save(conversation);
  showConversations();
  if (!isKept)
    say(
      "This browser has no room for this conversation: it is gone when the page is closed.",
      "bad",
    );
  return isKept;
}

// ---- an answer ----------------------------------------------------------------------------------

// Asks a new turn, or one of the conversation's anew, whose later turns go. Where nothing comes,
// everything is as it was.
async function ask(text, again = null, turnMode = again?.mode ?? mode()) {
  if (running || !text.trim() || !settings.check()) return;
  const before = conversation.turns;
  const turn = new Turn(turnMode, text);
  conversation.turns = [...before.slice(0, again ? before.indexOf(again) : before.length), turn];
  const { path, content } = conversation.requestOf(turn, settings.values, model.longest);
  const mine = begin(turn, streamed(path, { ...content, ...model.ofRequest }));
  if (again) showTurns();
  else {
    addView(turn);
    prompt.value = "";
  }
  setBusy(true);
  if (again) stop.focus();
  byId("empty").hidden = true;
  isAtEnd = true;
  follow();
  say("");
  keep();
  await finish(mine, before, again);
}

// What runs from now on: the answer of a turn of this conversation.
function begin(turn, request) {
  running = {
    controller: new AbortController(),
    key: key(),
    request,
    id: null,
    isStopped: false,
    turn,
    conversation,
  };
  return running;
}

// Reads the answer of what runs to its end. before: the turns where nothing comes; again: the one
// that was asked anew.
async function finish(mine, before, again = null) {
  const { turn } = mine;
  const shown = views.at(-1);
  const error = await read(mine, shown);
  if (mine.isStopped) turn.answer.reason = "stopped";
  else if (error) turn.answer.reason = "lost";
  shown.answer.end();
  running = null;
  setBusy(false);
  if (error && !mine.isStopped && turn.answer.isEmpty) {
    mine.conversation.turns = before;
    if (mine.conversation === conversation) undo(turn, again, error);
  } else if (error) say(mine.isStopped ? "Stopped." : error.message, mine.isStopped ? "" : "bad");
  else announce(turn.answer);
  if (mine.conversation === conversation) keep();
  else history.save(mine.conversation);
}

// Leaves what runs to the page that is loaded next in this tab, as by a reload. Where there is none
// the server ends it, as for any reader that does not come back. False: there is no room.
function leave() {
  const { turn, request, id } = running;
  return saveForTab(LEFT, { of: conversation.id, begin: turn.answer.begin, request, id });
}

// Goes on with what the page before has left, where it is this conversation's.
function goOn(left) {
  if (left?.of !== conversation.id) return;
  const turn = conversation.turns.at(-1);
  turn.answer.goOn(left.begin);
  const mine = begin(turn, left.request);
  mine.id = left.id;
  showTurns();
  setBusy(true);
  finish(mine, conversation.turns.slice(0, -1));
}

// Reads the answer of what runs. The error that ended it, or null.
async function read(mine, shown) {
  let lostAt = 0;
  const told = {
    lost: (hasBegun) => {
      lostAt = performance.now();
      say(
        hasBegun ? "Connection lost; going on where it was …" : "No connection; trying again …",
        "bad",
      );
    },
    resumed: () =>
      say(`Connection lost, and gone on with after ${time((performance.now() - lostAt) / 1000)}.`),
  };
  try {
    for await (const chunk of chunksOf(mine.request, {
      key: mine.key,
      signal: mine.controller.signal,
      told,
    })) {
      mine.id = chunk.id;
      mine.turn.answer.add(chunk);
      shown.answer.update();
    }
    return null;
  } catch (error) {
    return error;
  }
}

// Nothing came: the prompt goes back to where it was written, and the reader is told why.
function undo(turn, again, error) {
  showTurns();
  setBusy(false);
  const isUntemplated = error instanceof Refused && /no chat template/.test(error.message);
  if (isUntemplated && turn.mode === "chat") {
    choose("mode", "completion");
    save("mode", mode());
    ask(turn.prompt, again, "completion");
    say("This model has no chat template: its prompt is completed.");
    return;
  }
  if (again) views[conversation.turns.indexOf(again)].edit(turn.prompt);
  else prompt.value ||= turn.prompt;
  if (error.status === 401) {
    byId("key-row").hidden = false;
    byId("key").focus();
    say("This server asks for an API key.", "bad");
  } else say(error.message, "bad");
}

function announce({ text, toolCalls, numbers }) {
  const said =
    text ||
    (toolCalls.length ? `Calls ${toolCalls.map((call) => call.name).join(", ")}` : "Nothing");
  byId("announce").textContent = `Answered: ${said.slice(0, SAID_CHARS)}. ${numbers}`;
}

function stopIt() {
  if (!running) return;
  const { controller, id, key: itsKey } = running;
  running.isStopped = true;
  if (id) endAnswer(id, itsKey).catch(() => {});
  controller.abort();
}

function setBusy(isBusy) {
  const hadFocus = document.activeElement === (isBusy ? send : stop);
  send.disabled = isBusy;
  stop.disabled = !isBusy;
  for (const each of turnList.querySelectorAll(".asks")) each.disabled = isBusy;
  turnsBox.setAttribute("aria-busy", String(isBusy));
  byId("announce").textContent = isBusy ? "Answering." : "";
  if (hadFocus) (isBusy ? stop : send).focus();
}

// ---- what the reader does -----------------------------------------------------------------------

form.addEventListener("submit", (event) => {
  event.preventDefault();
  ask(prompt.value);
});
prompt.addEventListener("keydown", (event) => {
  if (!sends(event)) return;
  event.preventDefault();
  ask(prompt.value);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) stopIt();
});
stop.addEventListener("click", stopIt);
addEventListener("pagehide", () => {
  const isKept = keep(); // `finish` may not come to its end any more
  if (running && !(isKept && leave())) stopIt();
});
addEventListener("pageshow", () => takeOfTab(LEFT)); // this page itself goes on with it
byId("view").addEventListener("change", () => {
  for (const each of views) each.answer.show(view());
  save("view", view());
  byId("legend").hidden = view() !== "tokens";
});
byId("mode").addEventListener("change", () => save("mode", mode()));
byId("new").addEventListener("click", () => {
  open(new Conversation(conversation.system));
  prompt.focus();
});
byId("delete").addEventListener("click", () => {
  if (!confirm("Delete this conversation from this browser?")) return;
  const { id } = conversation;
  open(new Conversation(conversation.system));
  history.remove(id);
  showConversations();
  prompt.focus();
});
byId("conversations").addEventListener("change", (event) => {
  open(history.load(event.target.value) ?? new Conversation());
});
onChange(showConversations);
byId("system").addEventListener("change", (event) => {
  conversation.system = event.target.value;
  keep();
});
byId("empty").addEventListener("click", (event) => {
  if (event.target.closest("button")) ask(event.target.textContent);
});
byId("key").addEventListener("change", () => {
  sessionStorage.setItem(KEY, key());
  model.forget();
});

byId("key").value = sessionStorage.getItem(KEY) ?? "";
byId("key-row").hidden = !key();
switchTheme(byId("theme"));
choose("mode", load("mode"));
choose("view", load("view"));
const left = takeOfTab(LEFT);
const shownFirst = left?.of ?? history.list()[0]?.id;
open((shownFirst && history.load(shownFirst)) ?? new Conversation());
goOn(left);
byId("view").dispatchEvent(new Event("change"));
new Live((name) => model.show(name));
