"""What a message says of its end."""

from __future__ import annotations

from typing import get_args

import pytest

from slipstream.http.anthropic.message_printer import _stop
from slipstream_ipc.messages import End, FinishReason

ALLOWED = {"end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn", "refusal"}


@pytest.mark.parametrize("reason", sorted({*get_args(FinishReason)} - {"error", "abort"}))
@pytest.mark.parametrize("stop", [None, "x"])
def test_an_answer_that_was_not_aborted_has_a_stop_reason_that_clients_know(
    reason: str, stop: str | None
) -> None:
    found = _stop((), End(reason, 3, stop))  # type: ignore[arg-type]
    assert found.stop_reason in ALLOWED
