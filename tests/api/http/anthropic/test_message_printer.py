"""What a message says of its end, and of its calls."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from slipstream.http.anthropic.message_printer import MessagePrinter, _stop
from slipstream.http.blocks.block_printer import AnswerHead, blocks_of
from slipstream.http.openai.usage import Usage
from slipstream_ipc.messages import AnswerEvent, End, EventKind, FinishReason

ALLOWED = {"end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn", "refusal"}


@pytest.mark.parametrize("reason", sorted({*get_args(FinishReason)} - {"error", "abort"}))
@pytest.mark.parametrize("stop", [None, "x"])
def test_an_answer_that_was_not_aborted_has_a_stop_reason_that_clients_know(
    reason: str, stop: str | None
) -> None:
    found = _stop((), End(reason, 3, stop))  # type: ignore[arg-type]
    assert found.stop_reason in ALLOWED


def test_a_call_whose_input_nests_beyond_pythons_recursion_has_none() -> None:
    """A model may write one bracket after the other."""
    for arguments, expected in (('{"a": [[]]}', {"a": [[]]}), (f'{{"a": {"[" * 5000}', {})):
        for closing in ("", "]" * 5000 + "}"):
            events = (
                AnswerEvent(EventKind.CALL_BEGINS, "f", 0, "call_1"),
                AnswerEvent(EventKind.CALL_ARGUMENTS, arguments + closing * (not expected), 0),
                AnswerEvent(EventKind.CALL_ENDS, "", 0),
            )
            end = End("stop", 5)
            printer = MessagePrinter(AnswerHead("msg_1", "m", 1))
            message = printer.whole(blocks_of(events, end), end, Usage(1, 5, 6))
            [call] = msgspec.json.decode(msgspec.json.encode(message))["content"]
            assert call["input"] == expected
