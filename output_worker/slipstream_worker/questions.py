"""What clients ask beside streams: the ids of a text, the text of ids, the end of streams.

Owns: questions on their way through the prompt process, and how many there may be. Does not know:
streams' lives beyond their stage, tokenizers.

Rules:
- A question leaves nothing behind: its asker says it again after an attach, and where the asker is
  gone its answer is dropped.
- Prompts of streams and questions share one prompt process, first come, first served. So it is
  asked few questions at a time, or one large one: no prompt waits for more than those. The others
  wait here, up to a bound, beyond which they are turned away.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from slipstream_ipc.errors import BadRequest
from slipstream_ipc.messages import (
    Cancel,
    Cancelled,
    CancelledState,
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
from slipstream_ipc.template import MAX_QUESTION_CHARS, check_token_ids
from slipstream_worker.lives import Lives
from slipstream_worker.prompts import PromptSource
from slipstream_worker.registration import num_prompt_chars
from slipstream_worker.streams import Stage

MAX_ASKED_CHARS = 2**16  # of questions that the prompt process has, where it has several
MAX_WAITING = 1024  # questions that wait for their answer; more are turned away
MAX_WAITING_CHARS = 2**26  # of them together; a token id counts as four
MAX_UNREAD = 1024  # states that a client leaves unread; beyond, its questions get no answers
MAX_UNREAD_BYTES = 2**25  # of answers among them

_Asker = tuple[bytes, int, bool, int]  # client, its number, whether for text, characters


class Questions:
    """Asked and not answered yet."""

    def __init__(self, lives: Lives, prompts: PromptSource) -> None:
        self._lives = lives
        self._prompts = prompts
        self._asked: dict[int, _Asker] = {}  # the prompt process, by its key
        self._asked_chars = 0
        self._queue: deque[tuple[_Asker, Render]] = deque()  # it will be asked
        self._queue_chars = 0

    def tokenize(self, client: bytes, asked: Tokenize) -> None:
        """Have it answered."""
        if (asked.text is None) == (not asked.messages):
            fault = BadRequest("prompt", "both or none", "one of text and messages").fault
            self._lives.readers.port(client).state(Tokenized(asked.number, fault=fault))
            return
        num_chars = num_prompt_chars(asked.text, asked.messages, asked.template)
        if num_chars > MAX_QUESTION_CHARS:
            allowed = f"at most {MAX_QUESTION_CHARS}"
            fault = BadRequest("prompt", f"{num_chars} characters", allowed).fault
            self._lives.readers.port(client).state(Tokenized(asked.number, fault=fault))
            return
        render = Render(
            0,
            asked.text,
            asked.messages,
            template=asked.template,
            add_special_tokens=asked.add_special_tokens,
            with_strings=asked.with_strings,
            is_question=True,
        )
        self._ask(client, asked.number, render, num_chars, is_for_text=False)

    def detokenize(self, client: bytes, asked: Detokenize, card: ModelCard) -> None:
        """Have it answered."""
        try:
            check_token_ids(asked.token_ids, card)
        except BadRequest as error:
            self._lives.readers.port(client).state(Detokenized(asked.number, fault=error.fault))
            return
        render = Render(
            0,
            is_question=True,
            token_ids=asked.token_ids,
            skip_special_tokens=asked.skip_special_tokens,
        )
        self._ask(client, asked.number, render, len(asked.token_ids), is_for_text=True)

    def cancel(self, client: bytes, asked: Cancel) -> None:
        """End the streams, and say what became of each."""
        found = tuple([self._cancelled(stream_id) for stream_id in asked.stream_ids])
        self._lives.readers.port(client).state(Cancelled(asked.number, found))

    def answered(self, answer: Rendered) -> bool:
        """The prompt process is done with something; whether it was a question."""
        asker = self._asked.pop(answer.key, None)
        if asker is None:
            return False
        client, number, is_for_text, num_chars = asker
        self._asked_chars -= num_chars
        self._answer(client, number, answer, is_for_text=is_for_text)
        self._ask_more()
        return True

    def _ask(
        self, client: bytes, number: int, render: Render, num_chars: int, *, is_for_text: bool
    ) -> None:
        num_waiting = len(self._asked) + len(self._queue)
        num_chars_waiting = self._asked_chars + self._queue_chars
        if num_waiting >= MAX_WAITING or (
            num_waiting and num_chars_waiting + num_chars > MAX_WAITING_CHARS
        ):
            why = f"{num_waiting} questions wait for the tokenizer already"
            answer = Rendered(0, fault=Fault("overloaded", why))
            self._answer(client, number, answer, is_for_text=is_for_text)
            return
        self._queue.append(((client, number, is_for_text, num_chars), render))
        self._queue_chars += num_chars
        self._ask_more()

    def _ask_more(self) -> None:
        """Let the prompt process have what it may have of those that wait."""
        while self._queue:
            asker, render = self._queue[0]
            client, _, _, num_chars = asker
            if self._asked and self._asked_chars + num_chars > MAX_ASKED_CHARS:
                return
            self._queue.popleft()
            self._queue_chars -= num_chars
            if self._is_here(client):
                self._asked[self._prompts.ask(render)] = asker
                self._asked_chars += num_chars

    def _is_here(self, client: bytes) -> bool:
        try:
            self._lives.readers.port(client)
        except KeyError:
            return False
        return True

    def _answer(self, client: bytes, number: int, answer: Rendered, *, is_for_text: bool) -> None:
        if not self._is_here(client):
            return  # it has gone
        port = self._lives.readers.port(client)
        if _leaves_much_unread(port.unsent):
            why = "answers to questions before this one have not been read"
            answer = Rendered(0, fault=Fault("overloaded", why))
        if is_for_text:
            port.state(Detokenized(number, answer.text, answer.fault))
        else:
            port.state(Tokenized(number, answer.token_ids, answer.strings, answer.fault))

    def _cancelled(self, stream_id: bytes) -> CancelledState:
        stream = self._lives.streams.get(stream_id)
        if stream is None:
            return "ended" if self._lives.keeping.has_been(stream_id) else "unknown"
        if stream.stage is Stage.ENDED:
            return "ended"
        self._lives.abort(stream)
        return "running"


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
