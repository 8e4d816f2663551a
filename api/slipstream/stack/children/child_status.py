"""What a child says of itself, read without trusting it.

Owns: which part of a line can be used. Does not know: pipes, processes, what follows.

Rules:
- A line that is no status is nothing: neither it nor what is wrong with it ends anybody. A child
  that says nothing else counts as hung, in time.
- Numbers that cannot be (NaN, a count below 0, a histogram of another shape) stay away alone: the
  beat that they came with is one.
"""

from __future__ import annotations

import msgspec

from slipstream_ipc.errors import brief
from slipstream_ipc.messages import Status

_decode = msgspec.json.Decoder(Status).decode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_UNREADABLE = (msgspec.DecodeError, ValueError, RecursionError)


def status_of(line: bytes) -> tuple[Status | None, str]:
    """What of the line can be used, None: nothing; and what is wrong with it, "": nothing."""
    try:
        return _decode(line), ""
    except _UNREADABLE as error:
        why = brief(str(error))
    try:
        fields = _decode_fields(line)
        if fields.pop("numbers", None) is not None:
            return _decode(msgspec.json.encode(fields)), f"numbers that cannot be: {why}"
    except _UNREADABLE:
        pass
    return None, f"{len(line)} bytes that are no status: {why}"
