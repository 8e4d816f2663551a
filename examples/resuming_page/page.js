// A stream that goes on over broken connections and the death of the server's HTTP process.
//
// A POST begins the answer: its first chunk tells the answer's id. From then on an EventSource reads
// GET /v1/streams/ID. When its connection breaks, the browser reconnects by itself and sends the id of the
// last event it has, and the server goes on behind it. An EventSource gives up for good at any status but
// 200 (a server that starts answers 503), so a new one is opened then, with the id in the query.

const server = new URLSearchParams(location.search).get("server") ?? "http://127.0.0.1:8000";
const maxTokens = Number(new URLSearchParams(location.search).get("max_tokens") ?? 400);
const PAUSE_MS = 500;

const form = document.getElementById("form");
const prompt = document.getElementById("prompt");
const status = document.getElementById("status");
const answer = document.getElementById("answer");
let source = null;

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  source?.close();
  answer.textContent = "";
  status.textContent = "asking";
  try {
    read(await begin(prompt.value));
  } catch (error) {
    status.textContent = `failed: ${error.message}`;
  }
});

/** Asks for an answer; its id. The stream runs on for 10 s without a reader. */
async function begin(text) {
  const leave = new AbortController();
  const response = await fetch(`${server}/v1/completions`, {
    method: "POST",
    headers: { "Content-Type": "application/json", Accept: "text/event-stream" },
    body: JSON.stringify({ prompt: text, max_tokens: maxTokens, temperature: 0, ignore_eos: true, stream: true }),
    signal: leave.signal,
  });
  if (!response.ok) throw new Error((await response.json()).error.message);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let read = "";
  while (true) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the answer ended before it began");
    read += value;
    const chunk = read.match(/^data: (\{.*\})\n\n/m);
    if (chunk) {
      leave.abort();
      return JSON.parse(chunk[1]).id;
    }
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
    if (error) {
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
      setTimeout(() => own === source && read(id, lastId), PAUSE_MS);
    }
  };
}
