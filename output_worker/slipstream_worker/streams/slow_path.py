"""The slow path: a stream's tokens pass through its output one by one, where they have to.

- After a settled output, a token that is plain for its row (see `fast_path`) needs no check, as on
  the fast path. When several tokens arrive together, only those that hold text back pass through
  the output, and those that follow until it is settled again. Otherwise a worker that has fallen
  behind would do more work per token than one that has not, and fall further behind.
- A token that was checked after a settled output may prove harmless
  (`StreamColumns.record_harmless`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slipstream_worker.detokenizer.factory import DetokenizerFactory
from slipstream_worker.output.answer_output import AnswerOutput
from slipstream_worker.output.stream_output import StreamOutput
from slipstream_worker.streams.registration import open_output
from slipstream_worker.streams.stream import WorkerStream
from slipstream_worker.streams.stream_columns import StreamColumns, is_settled


def push_slow(columns: StreamColumns, stream: WorkerStream, token_ids: Sequence[int]) -> bool:
    """Process the last tokens of a stream's history; returns whether they end it. The row ends up
    slow.
    """
    assert stream.output is not None
    columns.make_slow(stream, columns.num_tokens(stream) - len(token_ids))
    return _push(columns, stream, stream.output, token_ids)


def whole_output(stream: WorkerStream, detokenizers: DetokenizerFactory) -> StreamOutput:
    """The output of an ended stream if it has all units, else a new one to `catch_up` with it."""
    assert stream.output is not None
    assert stream.registration is not None
    if stream.output.log.starts_at_zero:
        return stream.output
    return open_output(stream.registration, detokenizers, outputs=np.zeros(0, np.uint32))


def catch_up(
    columns: StreamColumns, stream: WorkerStream, output: StreamOutput, max_tokens: int
) -> bool:
    """Pass up to `max_tokens` of an ended stream's tokens through another output of it; return True
    if it has ended, too.
    """
    if output.end is None:
        ids = columns.token_ids(stream)[output.num_tokens :]
        _push(columns, stream, output, ids[:max_tokens].tolist())
        if output.end is None and len(ids) <= max_tokens:
            assert stream.output is not None
            assert stream.output.end is not None
            output.finish(stream.output.end.reason, stream.output.end.fault)
    return output.end is not None


def _push(
    columns: StreamColumns, stream: WorkerStream, output: StreamOutput, token_ids: Sequence[int]
) -> bool:
    """Pass the next tokens through an output of the stream; returns whether they end it."""
    worker_row, fast, repetition = stream.worker_row, columns.fast, output.repetition
    most_tokens = columns.max_tokens(worker_row)
    at, num = 0, len(token_ids)
    while at < num:
        begin = at
        if fast is not None and is_settled(stream, output):
            if isinstance(output, AnswerOutput):
                columns.follow_mode(stream, output)
            num_left = most_tokens - output.num_tokens - 1  # before the length limit
            stop = min(num, begin + num_left)
            while at < stop and columns.is_plain_for(fast, worker_row, token_ids[at]):
                num_tokens = output.num_tokens + at - begin + 1
                if repetition is not None and repetition.ends_with(num_tokens, token_ids[at]):
                    break
                at += 1
            if at > begin:
                output.append_whole(columns.texts(fast, worker_row, token_ids[begin:at]))
                continue
            columns.record_harmless(stream, output, token_ids[at])
        if output.push(token_ids[at : at + 1]):
            return True
        at += 1
    return False
