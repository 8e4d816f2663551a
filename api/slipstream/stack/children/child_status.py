"""Decodes the status lines of a child, without trusting them.

- A line that is not a status is ignored and ends no process. A child that sends nothing else counts
  as hung in time.
- Invalid numbers (NaN, a count below 0, a histogram of another shape) are dropped alone; the rest
  of the status, such as its heartbeat, counts.
"""

from __future__ import annotations

import msgspec

from slipstream_ipc.errors import brief
from slipstream_ipc.messages import Status

_decode = msgspec.json.Decoder(Status).decode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_UNREADABLE = (msgspec.DecodeError, ValueError, RecursionError)


def status_of(line: bytes) -> tuple[Status | None, str]:
    """The usable part of a line, or None; and what is wrong with the line, "" if nothing is."""
    try:
        return _decode(line), ""
    except _UNREADABLE as error:
        why = brief(str(error))
    try:
        fields = _decode_fields(line)
        if fields.pop("numbers", None) is not None:
            return _decode(msgspec.json.encode(fields)), f"invalid numbers: {why}"
    except _UNREADABLE:
        pass
    return None, f"{len(line)} bytes that are not a status: {why}"
