"""Clients' queries beside streams: tokenize a text, detokenize ids.

- A query is not kept across sessions: the client repeats it after an attach. If its session ends,
  the query is withdrawn, or its answer dropped if it is already being processed.
- Streams and queries share one prompt process, which handles short prompts in order and long ones
  beside them (`long_prompts`). It is therefore given only a few short queries at a time, and one
  long one, so that no stream's prompt waits for more than these. Further queries wait here, short
  and long ones apart; beyond a bound they are rejected.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream_ipc.errors import BadRequest
from slipstream_ipc.messages import (
    Detokenize,
    Detokenized,
    Fault,
    ModelCard,
    Render,
    Rendered,
    Tokenize,
    Tokenized,
    WorkerToClient,
)
from slipstream_ipc.validation.chat_template import (
    MAX_QUESTION_CHARS,
    MAX_QUESTION_TOKENS,
    MAX_SPELLED_TOKENS,
    check_token_ids,
)
from slipstream_worker.clients.query_queue import Query, QueryQueue
from slipstream_worker.clients.readers import StreamReaders
from slipstream_worker.tokenizer.client import RenderSource
from slipstream_worker.tokenizer.long_prompts import is_long, num_prompt_chars, size_of

MAX_ASKED_CHARS = 2**16  # limit on the short queries in the prompt process, approximate
MAX_UNREAD = 1024  # queued messages of a client, beyond which its queries fail
MAX_UNREAD_BYTES = 2**25  # of the answers among them


class ClientQueries:
    """Queries that are not answered yet."""

    def __init__(self, readers: StreamReaders, prompts: RenderSource) -> None:
        self._readers = readers
        self._prompts = prompts
        self._asked: dict[int, Query] = {}  # in the prompt process, by its key
        # keyed by whether the queries are long
        self._queues = {False: QueryQueue(MAX_ASKED_CHARS), True: QueryQueue(1)}

    def tokenize(self, client: bytes, asked: Tokenize) -> None:
        """Answer a Tokenize, at once if it is invalid."""
        if (asked.text is None) == (not asked.messages):
            fault = BadRequest("prompt", "both or none", "one of text and messages").fault
            self._readers.port(client).enqueue(Tokenized(asked.number, fault=fault))
            return
        num_chars = num_prompt_chars(asked.text, asked.messages, asked.template)
        if num_chars > MAX_QUESTION_CHARS:
            allowed = f"at most {MAX_QUESTION_CHARS}"
            fault = BadRequest("prompt", f"{num_chars} characters", allowed).fault
            self._readers.port(client).enqueue(Tokenized(asked.number, fault=fault))
            return
        render = Render(
            0,
            asked.text,
            asked.messages,
            template=asked.template,
            add_special_tokens=asked.add_special_tokens,
            with_strings=asked.with_strings,
            is_question=True,
            max_tokens=MAX_SPELLED_TOKENS if asked.with_strings else MAX_QUESTION_TOKENS,
        )
        self._ask(client, asked.number, render)

    def detokenize(self, client: bytes, asked: Detokenize, card: ModelCard) -> None:
        """Answer a Detokenize, at once if it is invalid."""
        try:
            check_token_ids(asked.token_ids, card)
        except BadRequest as error:
            self._readers.port(client).enqueue(Detokenized(asked.number, fault=error.fault))
            return
        render = Render(
            0,
            is_question=True,
            token_ids=asked.token_ids,
            skip_special_tokens=asked.skip_special_tokens,
        )
        self._ask(client, asked.number, render)

    def answered(self, answer: Rendered) -> bool:
        """Forward an answer of the prompt process; returns whether it belongs to a query."""
        question = self._asked.pop(answer.key, None)
        if question is None:
            return False
        self._answer(question, answer)
        queue = self._queues[is_long(question.render)]
        queue.done(question)
        self._ask_more(queue)
        return True

    def withdraw(self, client: bytes) -> None:
        """Drop the queries of a client whose session has ended."""
        for queue in self._queues.values():
            queue.withdraw(client)
        for key in [key for key, asked in self._asked.items() if asked.client == client]:
            if self._prompts.withdraw(key):
                question = self._asked.pop(key)
                self._queues[is_long(question.render)].done(question)
        for queue in self._queues.values():
            self._ask_more(queue)

    def beat(self) -> None:
        """Withdraw the queries of clients that are not attached."""
        for queue in self._queues.values():
            for client in queue.clients:
                if not self._is_here(client):
                    self.withdraw(client)

    def _ask(self, client: bytes, number: int, render: Render) -> None:
        question = Query(client, number, render, size_of(render))
        queue = self._queues[is_long(render)]
        why = queue.why_full(question)
        if why:
            self._answer(question, Rendered(0, fault=Fault("overloaded", why)))
            return
        queue.add(question)
        self._ask_more(queue)

    def _ask_more(self, queue: QueryQueue) -> None:
        """Pass waiting queries to the prompt process, as many as it may have."""
        while (question := queue.next()) is not None:
            self._asked[self._prompts.ask(question.render)] = question

    def _is_here(self, client: bytes) -> bool:
        try:
            return self._readers.port(client).session.is_open
        except KeyError:
            return False

    def _answer(self, question: Query, answer: Rendered) -> None:
        if not self._is_here(question.client):
            return  # its client has gone
        port = self._readers.port(question.client)
        if _leaves_much_unread(port.unsent):
            why = "answers to questions before this one have not been read"
            answer = Rendered(0, fault=Fault("overloaded", why))
        if question.render.token_ids is not None:
            port.enqueue(Detokenized(question.number, answer.text, answer.fault))
        else:
            port.enqueue(Tokenized(question.number, answer.token_ids, answer.strings, answer.fault))


def _leaves_much_unread(unsent: Sequence[WorkerToClient]) -> bool:
    """Whether a client keeps asking without reading the answers."""
    return len(unsent) > MAX_UNREAD or sum(map(_num_bytes, unsent)) > MAX_UNREAD_BYTES


def _num_bytes(answer: WorkerToClient) -> int:
    match answer:
        case Tokenized():
            return len(answer.token_ids) + sum(map(len, answer.strings))
        case Detokenized():
            return len(answer.text)
        case _:
            return 0
