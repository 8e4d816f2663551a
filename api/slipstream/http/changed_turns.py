"""The header that says what was done to a chat's turns so that the model's template takes them."""

from __future__ import annotations

from collections.abc import Iterable

from slipstream.http.exchange import HttpRequest
from slipstream_ipc.messages import TurnChanges

CHANGED_TURNS = b"x-slipstream-changed-turns"


def tell_changed_turns(request: HttpRequest, changes: Iterable[TurnChanges]) -> None:
    """Add the header to the answer; call it before its head is sent. changes: of each prompt."""
    found = dict.fromkeys(change for each in changes for change in each)
    if found:
        header = CHANGED_TURNS, ", ".join(found).encode()
        request.answer_headers = (*request.answer_headers, header)
