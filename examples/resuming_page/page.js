// A stream that goes on over broken connections, the death of the server's HTTP process, and its restart.
//
// A POST begins the answer: its first chunk tells the answer's id. From then on an EventSource reads
// GET /v1/streams/ID. When its connection breaks, the browser reconnects by itself and sends the id of the
// last event it has, and the server goes on behind it. An EventSource gives up for good at any status but
// 200: a server that starts answers 503, one that was started anew does not know the stream (404). The same
// POST with that id goes on in each case, and a new EventSource is opened with the id in the query.

const server = new URLSearchParams(location.search).get("server") ?? "http://127.0.0.1:8000";
const maxTokens = Number(new URLSearchParams(location.search).get("max_tokens") ?? 400);
const PAUSE_MS = 500;
const RETRIED = ["overloaded", "not_ready", "draining"]; // as a server that stops says in an event

const form = document.getElementById("form");
const prompt = document.getElementById("prompt");
const status = document.getElementById("status");
const answer = document.getElementById("answer");
let source = null;
let asked = "";

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  source?.close();
  answer.textContent = "";
  status.textContent = "asking";
  try {
    asked = prompt.value;
    read(await begin());
  } catch (error) {
    status.textContent = `failed: ${error.message}`;
  }
});

/**
 * Asks for the answer, behind the event `lastId` if there is one; its id, null where nothing is left to
 * read. The stream runs on for 10 s without a reader.
 */
async function begin(lastId = null) {
  const leave = new AbortController();
  const response = await fetch(`${server}/v1/completions`, {
    method: "POST",
    headers: {
      "Content-Type": "application/json",
      Accept: "text/event-stream",
      ...(lastId === null ? {} : { "Last-Event-ID": lastId }),
    },
    body: JSON.stringify({ prompt: asked, max_tokens: maxTokens, temperature: 0, ignore_eos: true, stream: true }),
    signal: leave.signal,
  });
  if (!response.ok) {
    const { error } = await response.json();
    throw Object.assign(new Error(error.message), { isFinal: response.status < 500 });
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let read = "";
  while (true) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the answer ended before it began");
    read += value;
    const chunk = read.match(/^data: (\{.*\})\n\n/m);
    if (chunk) {
      leave.abort();
      const { id, error } = JSON.parse(chunk[1]);
      if (error) throw Object.assign(new Error(error.message), { isFinal: !RETRIED.includes(error.code) });
      return id;
    }
    if (read.includes("data: [DONE]")) return null;
  }
}

/** Goes on behind the event `lastId` in the place of `own`, which has given up. */
async function resume(own, lastId) {
  try {
    const id = own === source ? await begin(lastId) : null;
    if (own !== source) return;
    if (id === null) status.textContent = "done";
    else read(id, lastId);
  } catch (error) {
    if (error.isFinal) status.textContent = `failed: ${error.message}`;
    else setTimeout(() => resume(own, lastId), PAUSE_MS);
  }
}

/** Shows the answer, behind the event `lastId` if there is one. */
function read(id, lastId = null) {
  const after = lastId === null ? "" : `?last_event_id=${encodeURIComponent(lastId)}`;
  source = new EventSource(`${server}/v1/streams/${id}${after}`);
  const own = source;
  source.onopen = () => {
    status.textContent = "reading";
  };
  source.onmessage = (event) => {
    if (event.data === "[DONE]") {
      own.close();
      status.textContent = "done";
      return;
    }
    lastId = event.lastEventId || lastId;
    const { choices, error } = JSON.parse(event.data);
    if (error && RETRIED.includes(error.code)) {
      own.close();
      status.textContent = "reconnecting";
      setTimeout(() => resume(own, lastId), PAUSE_MS);
    } else if (error) {
      own.close();
      status.textContent = `failed: ${error.message}`;
    } else if (choices.length) {
      answer.append(choices[0].text);
    }
  };
  source.onerror = () => {
    answer.dataset.breaks = Number(answer.dataset.breaks ?? 0) + 1;
    status.textContent = "reconnecting";
    if (own.readyState === EventSource.CLOSED && own === source) {
      setTimeout(() => resume(own, lastId), PAUSE_MS);
    }
  };
}
