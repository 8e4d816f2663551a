"""Clients' queries beside streams: tokenize a text, detokenize ids, and the texts of embeddings.
Recalls are answered elsewhere.

- A query is not kept across sessions: the client repeats it after an attach. If its session ends,
  the query is withdrawn, or its answer dropped if it is already being processed.
- Streams and queries share one tokenizer process, which handles short prompts in order and long
  ones beside them (`long_prompts`). It is therefore given only a few short queries at a time, and
  one long one, so that no stream's prompt waits for more than these. Further queries wait here,
  short and long ones apart; beyond a bound they are rejected.
"""

from __future__ import annotations

from slipstream_ipc.errors import BadRequest, Summary
from slipstream_ipc.messages import (
    Detokenize,
    Detokenized,
    Embed,
    Fault,
    KeptAnswer,
    Located,
    ModelCard,
    Recalled,
    Render,
    Rendered,
    Tokenize,
    Tokenized,
)
from slipstream_ipc.validation.chat_template import (
    MAX_QUERY_CHARS,
    MAX_QUERY_TOKENS,
    MAX_SPELLED_TOKENS,
    check_token_ids,
)
from slipstream_ipc.validation.media import check_parts, limited_sizes, why_no_media
from slipstream_worker.clients.embedding_queries import EmbeddingQueries
from slipstream_worker.clients.ports import ClientPort
from slipstream_worker.clients.query_queue import QueryQueue, QueuedQuery
from slipstream_worker.clients.readers import StreamReaders
from slipstream_worker.tokenizer.client import RenderSource
from slipstream_worker.tokenizer.long_prompts import (
    NUM_LANES,
    lane_of,
    num_prompt_chars,
    size_of,
)

MAX_CHARS_IN_PROCESS = 2**16  # limit on the short queries in the tokenizer process, approximate
MAX_UNREAD = 1024  # queued messages of a client, beyond which its queries fail
MAX_UNREAD_BYTES = 2**25  # of the answers among them
UNREAD = Fault("overloaded", "the answers to earlier queries have not been read")


class ClientQueries:
    """Queries that are not answered yet."""

    def __init__(
        self, readers: StreamReaders, prompts: RenderSource, embeddings: EmbeddingQueries
    ) -> None:
        self._readers = readers
        self._embeddings = embeddings
        self._prompts = prompts
        self._in_process: dict[int, QueuedQuery] = {}  # in the tokenizer process, by its key
        # by lane; of each lane of long ones, one is in the tokenizer process at a time
        self._queues = [
            QueryQueue(1 if lane else MAX_CHARS_IN_PROCESS) for lane in range(NUM_LANES)
        ]

    def tokenize(self, client: bytes, message: Tokenize, card: ModelCard) -> None:
        """Answer a Tokenize, at once if it is invalid."""
        if (message.text is None) == (not message.messages):
            fault = BadRequest("prompt", Summary("both or none"), "one of text and messages").fault
            self._readers.port(client).enqueue(Tokenized(message.number, fault=fault))
            return
        num_chars = num_prompt_chars(message.text, message.messages, message.template)
        if num_chars > MAX_QUERY_CHARS:
            allowed = f"at most {MAX_QUERY_CHARS}"
            fault = BadRequest("prompt", Summary(f"{num_chars} characters"), allowed).fault
            self._readers.port(client).enqueue(Tokenized(message.number, fault=fault))
            return
        try:
            check_parts(message.messages, len(message.media))
            if message.media and (why := why_no_media(card)):
                raise BadRequest("media", Summary("an image"), f"text: {why}")
        except BadRequest as error:
            self._readers.port(client).enqueue(Tokenized(message.number, fault=error.fault))
            return
        render = Render(
            0,
            message.text,
            message.messages,
            template=message.template,
            add_special_tokens=message.add_special_tokens,
            with_strings=message.with_strings,
            is_query=True,
            max_tokens=MAX_SPELLED_TOKENS if message.with_strings else MAX_QUERY_TOKENS,
            media=limited_sizes(message.media, card),
        )
        self._add(client, message, render)

    def detokenize(self, client: bytes, message: Detokenize, card: ModelCard) -> None:
        """Answer a Detokenize, at once if it is invalid."""
        try:
            check_token_ids(message.token_ids, card)
        except BadRequest as error:
            self._readers.port(client).enqueue(Detokenized(message.number, fault=error.fault))
            return
        render = Render(
            0,
            is_query=True,
            token_ids=message.token_ids,
            skip_special_tokens=message.skip_special_tokens,
        )
        self._add(client, message, render)

    def embed(self, client: bytes, message: Embed, card: ModelCard) -> None:
        """Tokenize the texts of an Embed; `EmbeddingQueries` goes on with them."""
        render = self._embeddings.begin(client, message, self._tenant(client, message), card)
        if render is not None:
            self._add(client, message, render)

    def answered(self, answer: Rendered) -> bool:
        """Forward an answer of the tokenizer process; returns whether it belongs to a query."""
        query = self._in_process.pop(answer.key, None)
        if query is None:
            return False
        self._answer(query, answer)
        queue = self._queues[lane_of(query.render)]
        queue.done(query)
        self._send_waiting(queue)
        return True

    def leaves_much_unread(self, client: bytes) -> bool:
        """True if an attached client keeps asking without reading the answers."""
        return self._readers.is_here(client) and _leaves_much_unread(self._readers.port(client))

    def respond(self, client: bytes, found: Recalled | Located) -> None:
        """Send an answer that was looked up here."""
        if self._readers.is_here(client):
            self._readers.port(client).enqueue(found, num_bytes=_num_bytes(found))

    def withdraw(self, client: bytes) -> None:
        """Drop the queries of a client whose session has ended."""
        for queue in self._queues:
            queue.withdraw(client)
        for key in [key for key, message in self._in_process.items() if message.client == client]:
            if self._prompts.withdraw(key):
                query = self._in_process.pop(key)
                self._queues[lane_of(query.render)].done(query)
        for queue in self._queues:
            self._send_waiting(queue)

    def beat(self) -> None:
        """Withdraw the queries of clients that are not attached."""
        for queue in self._queues:
            for client in queue.clients:
                if not self._readers.is_here(client):
                    self.withdraw(client)

    def _tenant(self, client: bytes, message: Tokenize | Detokenize | Embed) -> bytes:
        return self._readers.port(client).session.public_key or message.tenant or client

    def _add(self, client: bytes, message: Tokenize | Detokenize | Embed, render: Render) -> None:
        tenant = self._tenant(client, message)
        query = QueuedQuery(client, message.number, render, size_of(render), tenant)
        queue = self._queues[lane_of(render)]
        why = queue.why_full(query)
        if why:
            self._answer(query, Rendered(0, fault=Fault("overloaded", why)))
            return
        queue.add(query)
        self._send_waiting(queue)

    def _send_waiting(self, queue: QueryQueue) -> None:
        """Pass waiting queries to the tokenizer process, as many as it may have."""
        while (query := queue.next()) is not None:
            self._in_process[self._prompts.ask(query.render)] = query

    def _answer(self, query: QueuedQuery, answer: Rendered) -> None:
        if not self._readers.is_here(query.client):
            return  # its client has gone
        port = self._readers.port(query.client)
        if _leaves_much_unread(port):
            answer = Rendered(0, fault=UNREAD)
        if query.render.texts:
            self._embeddings.rendered(query.client, query.number, answer)
            return
        found: Detokenized | Tokenized
        if query.render.token_ids is not None:
            found = Detokenized(query.number, answer.text, answer.fault)
        else:
            found = Tokenized(
                query.number, answer.token_ids, answer.strings, answer.fault, answer.changed_turns
            )
        port.enqueue(found, num_bytes=_num_bytes(found))


def _leaves_much_unread(port: ClientPort) -> bool:
    return port.num_unsent > MAX_UNREAD or port.num_unsent_bytes > MAX_UNREAD_BYTES


def _num_bytes(answer: Tokenized | Detokenized | Located | Recalled) -> int:
    match answer:
        case Tokenized():
            return len(answer.token_ids) + sum(map(len, answer.strings))
        case Detokenized():
            return len(answer.text)
        case Located():
            return 8 * len(answer.moves)
        case Recalled(_, KeptAnswer() as kept):
            num_chars = len(kept.text) + sum([len(event.text) for event in kept.events])
            return len(kept.keep.record) + num_chars
        case _:
            return 0
