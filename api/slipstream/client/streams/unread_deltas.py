"""Deltas that nobody reads for a while, merged so that they cost what their content costs.

Owns: when a stream's unread deltas become one, and how. Does not know: streams, who reads.

A delta lies in the columns of the message it came in, and holds all of them, other streams' parts
too. So a reader that does not read would hold every message since; merged deltas hold their own.

Rules:
- The I/O thread alone merges. It takes the newest deltas away one by one and puts back one that
  says the same, while the reader may take from the other end: the reader may find nothing there in
  between, and is rung for afterwards like for any delta.
- A merged delta that is full is left alone, so that every token is copied a few times at most.
"""

from __future__ import annotations

from collections import deque

from slipstream.outputs import Delta, is_alone, join

MOST_UNREAD = 256  # deltas, before they are merged
LOOK_EVERY = 128  # tokens of a stream; a power of two
MOST_UNREAD_AT_END = 16
_FULL_TOKENS = 1024


def merge_unread(unread: deque[Delta]) -> None:
    """Make one delta of the newest ones, up to a full one. They do not hold their stream's end."""
    newest: list[Delta] = []
    while True:
        try:
            delta = unread.pop()
        except IndexError:  # the reader has the rest
            break
        if newest and delta.num_tokens >= _FULL_TOKENS and is_alone(delta):
            unread.append(delta)
            break
        newest.append(delta)
    if newest:
        newest.reverse()
        unread.append(join(newest))
