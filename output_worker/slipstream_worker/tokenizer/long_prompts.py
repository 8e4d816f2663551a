"""Long prompts: what counts as long, what is too long, and the threads that tokenise them.

A text of 8 MiB took the demo model's tokenizer 67 s on a busy machine, during which no other prompt
was tokenised. The tokenizers library releases the interpreter's lock while it works: beside that
text, a prompt of five words took 0.5 ms at the 99th percentile, and 44 ms at most.

- A prompt is in a lane by its size (`lane_of`). The tokenizer process renders short ones beside its
  loop, and one of each lane of long ones at a time, on that lane's thread: nobody waits for one
  that is many times as large. Within a lane tenants take turns (`fair_order`), also among short
  ones, of which the process has only a few at a time.
- A prompt that cannot fit the model is refused after part of it has been tokenised
  (`tokens_if_too_long`), so that it costs hardly more than the longest prompt that fits.
"""

from __future__ import annotations

import bisect
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

from slipstream_ipc.messages import ChatMessage, Render, Rendered, TemplateOptions

logger = logging.getLogger(__name__)

LONG_CHARS = 2**14
LANE_CHARS = (LONG_CHARS, 2**16)  # the most in each lane but the last one (decision 017)
NUM_LANES = 1 + len(LANE_CHARS)
IMAGE_CHARS = 2**12  # that an image's placeholders count as; their number is known once rendered
SLICE_CHARS = 2**16  # slice of a text that may be too long


def size_of(request: Render) -> int:
    """Size of the request in characters; a token id counts as one, an image as IMAGE_CHARS."""
    num_ids = len(request.token_ids or b"") // 4
    num_chars = num_prompt_chars(request.text, request.messages, request.template)
    num_chars += IMAGE_CHARS * len(request.media)
    num_inputs = sum(map(len, (*request.texts, *request.pairs)))
    return num_ids + num_chars + len(request.prediction) + num_inputs


def num_prompt_chars(
    text: str | None, messages: tuple[ChatMessage, ...], template: TemplateOptions
) -> int:
    """Number of characters to render and tokenise."""
    turns = 0
    for turn in messages:
        turns += len(turn.role) + len(turn.content) + len(turn.reasoning_content or "")
        for call in turn.tool_calls or ():
            turns += len(call.function.name) + len(call.function.arguments)
    return len(text or "") + turns + len(template.tools) + len(template.kwargs)


def lane_of(request: Render) -> int:
    """The lane that a prompt is rendered in: 0 for a short one, up to NUM_LANES - 1."""
    return bisect.bisect_left(LANE_CHARS, size_of(request))


def is_long(request: Render) -> bool:
    """True if the prompt is long enough that others should not wait for it."""
    return lane_of(request) > 0


def tokens_if_too_long(text: str, max_tokens: int, count: Callable[[str], int]) -> int:
    """The tokens counted of a text that certainly has more than `max_tokens`; 0 if it may fit.

    count: number of tokens of a text. The text is counted in slices, of which as few as possible
    are; as a cut can add tokens, only more than twice `max_tokens` counts as too long. `max_tokens`
    0 allows any number.
    """
    if not max_tokens or len(text) <= max(SLICE_CHARS, 2 * max_tokens):
        return 0
    num = 0
    for begin in range(0, len(text), SLICE_CHARS):
        num += count(text[begin : begin + SLICE_CHARS])
        if num > 2 * max_tokens:
            return num
    return 0


class LongPromptThread:
    """The thread of a lane. If `work` raises, the process exits."""

    def __init__(self, work: Callable[[Render], Rendered]) -> None:
        self._work = work
        self._asked: SimpleQueue[Render] = SimpleQueue()
        self._done: deque[Rendered] = deque()
        self._wakeup_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # daemon: work in progress cannot be cancelled
        threading.Thread(target=self._run, name="long prompts", daemon=True).start()

    def fileno(self) -> int:
        """Readable when `take_rendered` has something."""
        return self._wakeup_fd

    def put(self, request: Render) -> None:
        """Queue a request."""
        self._asked.put(request)

    def take_rendered(self) -> list[Rendered]:
        """Answers since the last call. Call it when the descriptor is readable."""
        os.eventfd_read(self._wakeup_fd)
        return [self._done.popleft() for _ in range(len(self._done))]

    def _run(self) -> None:
        try:
            while True:
                self._done.append(self._work(self._asked.get()))
                os.eventfd_write(self._wakeup_fd, 1)
        except BaseException:  # without this thread the process would still look healthy
            logger.exception("the long-prompt thread failed")
            os._exit(1)  # the worker replaces us
