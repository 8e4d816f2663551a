"""Finds the cursor in a stream at which a reader's copy ends.

- A position that the stream has not reached yet is no error: after an attach the worker's copy may
  be behind the reader's. A position that the stream has passed without having a unit boundary there
  never appears: two different texts are never spliced.
- Units are a pure function of the token history. If the stream's log does not reach back to the
  position, the output is rebuilt from the whole history and replaces the stream's; the cursor of
  the current reader is moved to the new log.
"""

from __future__ import annotations

from slipstream_ipc.history.text_log import TextCursor
from slipstream_ipc.history.token_log import history_checksum, history_digest
from slipstream_worker.detokenizer.factory import DetokenizerFactory
from slipstream_worker.streams.registration import open_output
from slipstream_worker.streams.stream import ResumePoint, WorkerStream
from slipstream_worker.streams.stream_columns import StreamColumns


class Diverged(Exception):  # noqa: N818  (what the field, and the protocol, call it)
    """The reader's copy is not a prefix of this stream."""


def locate(
    columns: StreamColumns,
    stream: WorkerStream,
    position: ResumePoint,
    detokenizers: DetokenizerFactory,
) -> TextCursor | None:
    """The cursor at a position of a registered stream; None if the stream may still reach it.

    Raises Diverged. The row is slow afterwards, unless it is fast and has been sent exactly up to
    there.
    """
    if position.num_tokens <= columns.num_tokens(stream):
        if stream.logprobs_from > position.num_tokens:
            raise Diverged("the log-probabilities from there on were lost with an earlier server")
        if position.digest is not None or position.checksum is not None:
            copy = columns.token_ids(stream)[: position.num_tokens]
            if position.digest not in (None, history_digest(copy)) or (
                position.checksum not in (None, history_checksum(copy.astype("<u4").tobytes()))
            ):
                raise Diverged("the client's tokens are not this stream's")
        cursor = _cursor_at(columns, stream, position, detokenizers)
        if cursor is not None:
            return cursor
    output, admit = stream.output, stream.registration
    assert output is not None
    assert admit is not None
    is_past = output.end is not None or output.log.num_tokens > position.num_tokens
    if is_past or position.num_tokens > admit.derived.max_tokens:
        raise Diverged("the stream has no such position")
    return None


def _cursor_at(
    columns: StreamColumns,
    stream: WorkerStream,
    position: ResumePoint,
    detokenizers: DetokenizerFactory,
) -> TextCursor | None:
    worker_row, output = stream.worker_row, stream.output
    assert output is not None
    num_chars, num_tokens = position.num_chars, position.num_tokens
    if columns.is_fast[worker_row]:
        if (
            num_chars == columns.sent_chars[worker_row]
            and num_tokens == columns.sent_tokens[worker_row]
        ):
            return TextCursor(0, num_chars, num_tokens)
        columns.make_slow(stream, columns.num_tokens(stream))
    cursor = output.log.find(num_chars, num_tokens)
    if cursor is not None or output.log.starts_at_zero:
        return cursor
    assert stream.registration is not None
    whole = open_output(stream.registration, detokenizers, outputs=columns.token_ids(stream))
    if output.end is not None:
        if whole.end is None:
            whole.finish(output.end.reason, output.end.fault)
        whole.end = output.end  # it says more than the history does
        whole.repetition = None
    stream.output = whole
    reader = stream.reader
    if reader is not None and not reader.is_waiting:
        theirs = whole.log.find(reader.cursor.num_chars, reader.cursor.num_tokens)
        assert theirs is not None, "units are a function of the history"
        reader.cursor = theirs
    return whole.log.find(num_chars, num_tokens)
