"""Long prompts beside the short ones: which are long, which too long, the thread they run on.

Owns: the thread in the prompt process that tokenises them. Does not know: sockets, streams,
tokenizers, whose turn it is (`fair_order`).

A text of 8 MiB took the demo model's tokenizer 67 s on a busy machine, in which no other prompt was
tokenised. The tokenizers library gives the interpreter's lock up while it works: beside that text a
prompt of five words took 0.5 ms at the 99th percentile, and 44 ms at most.

Rules:
- The prompt process has one long prompt at a time, on a thread of its own, and short ones beside.
- What cannot fit into the model is refused after a part of it was tokenised (`is_too_long`), so
  that none costs much more than the longest that fits.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

from slipstream_ipc.messages import ChatMessage, Render, Rendered, TemplateOptions

logger = logging.getLogger(__name__)

LONG_CHARS = 2**14
SLICE_CHARS = 2**16  # of a text that may be too long, tokenised at a time


def size_of(request: Render) -> int:
    """How much work it is, in characters; a token id counts as one."""
    num_ids = len(request.token_ids or b"") // 4
    return num_ids + num_prompt_chars(request.text, request.messages, request.template)


def num_prompt_chars(
    text: str | None, messages: tuple[ChatMessage, ...], template: TemplateOptions
) -> int:
    """How much there is to render and to tokenise."""
    turns = 0
    for turn in messages:
        turns += len(turn.role) + len(turn.content)
        for call in turn.tool_calls or ():
            turns += len(call.function.name) + len(call.function.arguments)
    return len(text or "") + turns + len(template.tools) + len(template.kwargs)


def is_long(request: Render) -> bool:
    """Whether others shall not wait for it."""
    return size_of(request) > LONG_CHARS


def is_too_long(text: str, max_tokens: int, count: Callable[[str], int]) -> bool:
    """Whether a text is certain to have more tokens than that, from as little of it as need be.

    count: tokens of a text. It is counted in slices; as a cut can make tokens of its own, only what
    has twice as many counts. 0 for `max_tokens` allows any number.
    """
    if not max_tokens or len(text) <= max(SLICE_CHARS, 2 * max_tokens):
        return False
    num = 0
    for begin in range(0, len(text), SLICE_CHARS):
        num += count(text[begin : begin + SLICE_CHARS])
        if num > 2 * max_tokens:
            return True
    return False


class LongPromptThread:
    """The thread. Where `work` raises, the process ends."""

    def __init__(self, work: Callable[[Render], Rendered]) -> None:
        self._work = work
        self._asked: SimpleQueue[Render] = SimpleQueue()
        self._done: deque[Rendered] = deque()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # it ends with its process: what it works on cannot be called off
        threading.Thread(target=self._run, name="long prompts", daemon=True).start()

    def fileno(self) -> int:
        """Readable when `take` has something."""
        return self._bell

    def put(self, request: Render) -> None:
        """Have it done."""
        self._asked.put(request)

    def take_rendered(self) -> list[Rendered]:
        """What has been done since. To be called when the descriptor is readable."""
        os.eventfd_read(self._bell)
        return [self._done.popleft() for _ in range(len(self._done))]

    def _run(self) -> None:
        try:
            while True:
                self._done.append(self._work(self._asked.get()))
                os.eventfd_write(self._bell, 1)
        except BaseException:  # a process without this thread would look well
            logger.exception("the thread of long prompts failed")
            os._exit(1)  # the worker replaces us
