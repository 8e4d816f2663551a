"""Reads a worker's reports that say nothing but up to which step everything is checked: from the
bytes as they came (`report_reader.c`), where messages come as bytes.
"""

from __future__ import annotations

from typing import Any, Protocol

from slipstream_core import _native
from slipstream_ipc.transport.link import Link


class ReportReader(Protocol):
    """Reads the reports of one attach. step: up to which the worker has reported its check."""

    step: int

    def take(self, data: bytes, now: float) -> bool:
        """Receive an encoded frame if it is nothing but an acknowledgement, or (in C) the next
        report, without ends. Returns False, without effect, for any other, which has to be decoded.
        """
        ...


class AckReader:
    """Leaves reports to be decoded."""

    def __init__(self, link: Link[Any], step: int) -> None:
        self._link = link
        self.step = step

    def take(self, data: bytes, now: float) -> bool:
        """See `ReportReader`."""
        return self._link.take_ack(data, now)


def report_reader(link: Link[Any], step: int, *, is_local: bool) -> ReportReader:
    """The reader of an attach. is_local: messages come as bytes."""
    return _native.ReportReader(link, step) if is_local else AckReader(link, step)
