"""Merging of unread deltas, so that a slow reader holds no more memory than its output takes.

A delta refers to the columns of the message it arrived in and keeps all of them alive, including
the other streams' parts. A merged delta has columns of its own.

- Only the I/O thread merges. It pops the newest deltas and appends one with the same content, while
  the reader may pop from the other end. The reader may find the queue empty meanwhile, so its
  wakeup is rung afterwards as for any delta.
- A full merged delta is not merged again, so each token is copied a few times at most.
"""

from __future__ import annotations

from collections import deque

from slipstream.outputs import Delta, is_alone, join

MOST_UNREAD = 256  # deltas before they are merged
LOOK_EVERY = 128  # tokens of a stream between checks of its queue; a power of two
MOST_UNREAD_AT_END = 16
_FULL_TOKENS = 1024


def merge_unread(unread: deque[Delta]) -> None:
    """Merge the newest deltas, back to the last full one. None of them holds the stream's end."""
    newest: list[Delta] = []
    while True:
        try:
            delta = unread.pop()
        except IndexError:  # the reader has taken the rest
            break
        if newest and delta.num_tokens >= _FULL_TOKENS and is_alone(delta):
            unread.append(delta)
            break
        newest.append(delta)
    if newest:
        newest.reverse()
        unread.append(join(newest))
