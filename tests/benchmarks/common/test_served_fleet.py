"""The events of a fleet's supervisor while the fleet starts."""

from __future__ import annotations

import os
from collections import deque

import msgspec

from slipstream.stack.children.line_pipe import LineReader
from slipstream.stack.supervisor_events import ProcessStarted, SpareReady, StackEvent, StackReady
from slipstream_lab.common.served_fleet import ServedFleet


def test_a_spare_that_is_ready_before_all_replicas_are_is_told() -> None:
    spare = SpareReady("replica-1: worker-0", 7, 0.5)
    told: list[StackEvent] = [ProcessStarted("replica-1", 5), spare, StackReady("ipc:///a")]
    reading, writing = os.pipe()
    fleet = ServedFleet.__new__(ServedFleet)
    fleet._events, fleet._pids, fleet._unread = LineReader(reading), {}, deque()
    with open(writing, "wb") as lines:
        lines.writelines(msgspec.json.encode(each) + b"\n" for each in told)
    fleet._wait_until_ready()
    assert fleet.next_event(0.0) == spare
    assert fleet.next_event(0.0) is None
    fleet._events.close()
