"""A format compiled for a vocabulary: what is shared by the streams that are read by it."""

from __future__ import annotations

from collections.abc import Mapping

from slipstream_ipc.formats.answer_format import AnswerFormat
from slipstream_ipc.formats.tool_types import ToolTypes
from slipstream_ipc.messages.answer import AnswerOptions
from slipstream_worker.formats.answer_reader import AnswerReader
from slipstream_worker.formats.delimiter_tables import FormatTables


class CompiledFormat:
    """A format and a vocabulary. delimiter_ids: the tokens that are fed to `feed_delimiter`."""

    def __init__(self, tables: FormatTables) -> None:
        self._tables = tables
        self.format = tables.format
        self.delimiter_ids = frozenset(tables.literals)

    def reader(
        self,
        tools: ToolTypes | None,
        options: AnswerOptions,
        state: bytes = b"",
        stream_id: bytes = b"",
    ) -> AnswerReader:
        """A reader of a new answer, or of one that goes on from `state`. tools: None: unknown.
        stream_id: what ids of calls are made of; empty: none are made.
        """
        return AnswerReader(self._tables, tools, options, state, stream_id)


def compile_format(answer_format: AnswerFormat, token_ids: Mapping[str, int]) -> CompiledFormat:
    """`token_ids`: literal to id of the added tokens of the vocabulary. Raises ValueError for a
    format whose literals cannot be told apart.
    """
    return CompiledFormat(FormatTables(answer_format, token_ids))
