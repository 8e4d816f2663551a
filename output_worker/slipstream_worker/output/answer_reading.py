"""Opens the reader of a stream whose answer is read as events."""

from __future__ import annotations

from functools import lru_cache

from slipstream_ipc.formats.answer_format import digest
from slipstream_ipc.formats.table import find_format
from slipstream_ipc.formats.tool_types import decode_tool_types
from slipstream_ipc.messages import AnswerSettings
from slipstream_worker.formats.answer_reader import AnswerReader
from slipstream_worker.formats.compiled_format import CompiledFormat, compile_format

__all__ = ["UnknownFormat", "open_reader"]

DelimiterIds = tuple[tuple[str, int], ...]  # literals of added tokens, and their ids


class UnknownFormat(Exception):  # noqa: N818  (says what is wrong)
    """A stream's format is not in the table, or its entry is another one."""


def open_reader(
    settings: AnswerSettings, delimiter_ids: DelimiterIds, stream_id: bytes = b""
) -> tuple[AnswerReader, frozenset[int]]:
    """The reader at the start of a stream's answer, and the ids that it takes as delimiters.

    stream_id: what ids of calls are made of, where the format asks for a form of its own.

    Raises UnknownFormat.
    """
    compiled, its_digest = _compiled(settings.format, delimiter_ids)
    if its_digest != settings.digest:
        raise UnknownFormat(f"format {settings.format!r}: the table has another entry")
    tools = decode_tool_types(settings.tools)
    reader = compiled.reader(tools, settings.options, settings.start, stream_id)
    return reader, compiled.delimiter_ids


@lru_cache(64)
def _compiled(name: str, delimiter_ids: DelimiterIds) -> tuple[CompiledFormat, bytes]:
    """The compiled format of this name, shared by all streams, and the digest of its entry."""
    entry = find_format(name)
    if entry is None:
        raise UnknownFormat(f"format {name!r} is not in the table")
    return compile_format(entry, dict(delimiter_ids)), digest(entry)
