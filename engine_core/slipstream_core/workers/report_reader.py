"""Reads a worker's reports that say nothing but up to which step everything is checked.

`ReportReader` exists twice: here, where reports are left to be decoded, and in C
(`report_reader.c`), where they are taken from the bytes as they came.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from slipstream_ipc._native import LinkNumbers
from slipstream_ipc.native.extension import IPC_HEADERS, load_extension
from slipstream_ipc.transport.link import Link

_SOURCE = Path(__file__).with_name("report_reader.c")


class ReportReader:
    """Reads the reports of one attach. step: up to which the worker has reported its check."""

    def __init__(self, link: Link[Any], step: int) -> None:
        self._link = link
        self.step = step

    def take(self, data: bytes, now: float) -> bool:
        """Receive an encoded frame if it is nothing but an acknowledgement, or (in C) the next
        report, without ends. Returns False, without effect, for any other, which has to be decoded.
        """
        return self._link.take_ack(data, now)


def report_reader(link: Link[Any], step: int, *, is_local: bool) -> ReportReader:
    """The reader of an attach, in C where that can be had. is_local: messages come as bytes."""
    native = native_report_reader() if is_local else None
    reader: ReportReader = ReportReader(link, step) if native is None else native(link, step)
    return reader


@cache
def native_report_reader() -> Any:
    """`ReportReader` in C, prepared; None where it, or a link in C, is not to be had."""
    native: Any = load_extension("report_reader", _SOURCE, IPC_HEADERS)
    if native is None:
        return None
    native.prepare(LinkNumbers)
    return native.ReportReader
