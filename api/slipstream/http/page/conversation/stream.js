// An answer as it comes, over as many connections as it takes: server-sent events from bytes, going
// on by Last-Event-ID where a connection breaks.
//
// Every event is given once; a refusal is an error, a break is not.

const MOST_TRIES = 20; // in a row without an event
const LONGEST_PAUSE_MS = 2000;

export class Refused extends Error {
  constructor(status, error) {
    super(error.message);
    this.status = status;
    this.param = error.param;
  }
}

// {id, data} of each event in a body of bytes. An event without its end is none.
export async function* eventsIn(body) {
  const decoder = new TextDecoder();
  const reader = body.getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + decoder.decode(value, { stream: true })).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) yield eventOf(block);
    }
  } finally {
    reader.cancel().catch(() => {}); // it may have broken
  }
}

function eventOf(block) {
  const event = { id: null, data: "" };
  for (const line of block.split("\n")) {
    if (line.startsWith("id: ")) event.id = line.slice(4);
    else if (line.startsWith("data: ")) event.data += line.slice(6);
  }
  return event;
}

// What is sent for a streamed answer, {path, body, lastId}. lastId: of the last event that has come,
// null before there is one; as JSON it is all that another page needs to go on.
export function streamed(path, content) {
  return { path, body: JSON.stringify({ ...content, stream: true }), lastId: null };
}

// The chunks of a streamed answer, behind `request.lastId`, which goes along. told: what is called
// when the connection is lost (`lost`, with whether anything had come) and when it goes on
// (`resumed`). Throws: Refused; AbortError by `signal`.
export async function* chunksOf(request, { key, signal, told }) {
  let isLost = false;
  for (let tries = 0; tries < MOST_TRIES; tries += 1) {
    try {
      const response = await fetch(request.path, {
        method: "POST",
        headers: headersOf(key, {
          Accept: "text/event-stream",
          ...(request.lastId && { "Last-Event-ID": request.lastId }),
        }),
        body: request.body,
        signal,
      });
      if (!response.ok) {
        const refusal = await refusalOf(response);
        if (request.lastId === null || response.status !== 503) throw refusal;
        throw new Error(refusal.message); // the engine is on its way
      }
      for await (const event of eventsIn(response.body)) {
        tries = 0;
        if (isLost) told.resumed();
        isLost = false;
        if (event.data === "[DONE]") return;
        const chunk = JSON.parse(event.data);
        if (chunk.error) throw new Refused(0, chunk.error);
        request.lastId = event.id ?? request.lastId;
        yield chunk;
      }
    } catch (error) {
      if (error instanceof Refused || signal.aborted) throw error;
    }
    if (!isLost) told.lost(request.lastId !== null);
    isLost = true;
    await pause(Math.min(LONGEST_PAUSE_MS, 100 * 2 ** tries), signal);
  }
  throw new Error("The server does not come back.");
}

// Ends an answer in the engine, which would go on for a while for a reader that may come back.
export function endAnswer(id, key) {
  const body = JSON.stringify({ request_id: id });
  return fetch("/abort", { method: "POST", headers: headersOf(key), body, keepalive: true });
}

export function headersOf(key, more = {}) {
  return {
    "Content-Type": "application/json",
    ...(key && { Authorization: `Bearer ${key}` }),
    ...more,
  };
}

async function refusalOf(response) {
  try {
    return new Refused(response.status, (await response.json()).error);
  } catch {
    return new Refused(response.status, { message: `The server answered ${response.status}.` });
  }
}

function pause(ms, signal) {
  return new Promise((resolve, reject) => {
    const stop = () => reject(signal.reason);
    if (signal.aborted) stop();
    signal.addEventListener("abort", stop, { once: true });
    setTimeout(() => {
      signal.removeEventListener("abort", stop);
      resolve();
    }, ms);
  });
}
