"""The positions at which the state of a request is saved, so that requests that begin equally can
continue there.

The places in a prompt, the more useful ones first:

- Where the cache held further blocks and no state: other requests branch off there.
- At the last block in front of the last token: the next turn of a conversation mostly begins with
  this prompt.
- At a multiple of `_BACK` tokens before that: chat templates may write the end of a prompt
  differently once an answer follows.
- At each multiple of `_INTERVAL` tokens, for prompts that have a long beginning in common.

In an answer, at each multiple of `_BACK` tokens; each mark takes the place of the one before it, so
the last one is where the next turn continues.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_BACK = 64
_INTERVAL = 2048


def state_marks(
    start: int, stop: int, *, num_tokens: int, block_size: int, branch: int
) -> list[int]:
    """Return the marks among the block ends `start` < mark <= `stop`, all different, the more
    useful ones first; all in blocks.

    num_tokens: of the request. branch: the block end where others branch off, or 0.
    """
    last = (num_tokens - 1) // block_size
    back, interval = (_blocks(each, block_size) for each in (_BACK, _INTERVAL))
    marks = [branch, last, (last - 1) // back * back]
    marks += range((start // interval + 1) * interval, stop + 1, interval)
    return [mark for mark in dict.fromkeys(marks) if start < mark <= stop]


def answer_marks(num_blocks: npt.NDArray[np.int64], block_size: int) -> npt.NDArray[np.bool_]:
    """True where an answer has a mark behind so many blocks, [n]."""
    marked: npt.NDArray[np.bool_] = num_blocks % _blocks(_BACK, block_size) == 0
    return marked


def last_answer_mark(num_blocks: npt.NDArray[np.int64], block_size: int) -> npt.NDArray[np.int64]:
    """The blocks in front of the last mark of an answer of so many blocks, [n]."""
    interval = _blocks(_BACK, block_size)
    return num_blocks // interval * interval


def _blocks(num_tokens: int, block_size: int) -> int:
    return max(1, -(-num_tokens // block_size))
