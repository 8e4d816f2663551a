"""What clients ask beside streams: the ids of a text, the text of ids.

Owns: questions on their way through the prompt process, and how large they may be. Does not know:
streams, tokenizers, whose turn it is (`query_queue`).

Rules:
- A question leaves nothing behind: its asker says it again after an attach. Where the asker's
  session has ended it is withdrawn; where it is being worked on already its answer is dropped.
- Prompts of streams and questions share one prompt process, which works on the short ones in their
  order and on long ones beside (`long_prompts`). So it is asked few short questions at a time, and
  one long one: no prompt waits for more than those. The others wait here, short and long ones
  apart, up to a bound, beyond which they are turned away.
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

MAX_ASKED_CHARS = 2**16  # of short questions that the prompt process has, about
MAX_UNREAD = 1024  # states that a client leaves unread; beyond, its questions get no answers
MAX_UNREAD_BYTES = 2**25  # of answers among them


class ClientQueries:
    """Asked and not answered yet."""

    def __init__(self, readers: StreamReaders, prompts: RenderSource) -> None:
        self._readers = readers
        self._prompts = prompts
        self._asked: dict[int, Query] = {}  # the prompt process, by its key
        # by whether they are long
        self._queues = {False: QueryQueue(MAX_ASKED_CHARS), True: QueryQueue(1)}

    def tokenize(self, client: bytes, asked: Tokenize) -> None:
        """Have it answered."""
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
        """Have it answered."""
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
        """The prompt process is done with something; whether it was a question."""
        question = self._asked.pop(answer.key, None)
        if question is None:
            return False
        self._answer(question, answer)
        queue = self._queues[is_long(question.render)]
        queue.done(question)
        self._ask_more(queue)
        return True

    def withdraw(self, client: bytes) -> None:
        """A client's session is over."""
        for queue in self._queues.values():
            queue.withdraw(client)
        for key in [key for key, asked in self._asked.items() if asked.client == client]:
            if self._prompts.withdraw(key):
                question = self._asked.pop(key)
                self._queues[is_long(question.render)].done(question)
        for queue in self._queues.values():
            self._ask_more(queue)

    def beat(self) -> None:
        """Withdraw what nobody waits for any more, as its asker stays away."""
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
        """Let the prompt process have what it may have of those that wait."""
        while (question := queue.next()) is not None:
            self._asked[self._prompts.ask(question.render)] = question

    def _is_here(self, client: bytes) -> bool:
        try:
            return self._readers.port(client).session.is_open
        except KeyError:
            return False

    def _answer(self, question: Query, answer: Rendered) -> None:
        if not self._is_here(question.client):
            return  # it has gone
        port = self._readers.port(question.client)
        if _leaves_much_unread(port.unsent):
            why = "answers to questions before this one have not been read"
            answer = Rendered(0, fault=Fault("overloaded", why))
        if question.render.token_ids is not None:
            port.enqueue(Detokenized(question.number, answer.text, answer.fault))
        else:
            port.enqueue(Tokenized(question.number, answer.token_ids, answer.strings, answer.fault))


def _leaves_much_unread(unsent: Sequence[WorkerToClient]) -> bool:
    """Whether a client asks, and does not take what it asked for."""
    return len(unsent) > MAX_UNREAD or sum(map(_num_bytes, unsent)) > MAX_UNREAD_BYTES


def _num_bytes(answer: WorkerToClient) -> int:
    match answer:
        case Tokenized():
            return len(answer.token_ids) + sum(map(len, answer.strings))
        case Detokenized():
            return len(answer.text)
        case _:
            return 0
