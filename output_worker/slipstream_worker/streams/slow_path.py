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

from slipstream_worker.output.answer_output import AnswerOutput
from slipstream_worker.streams.stream import WorkerStream
from slipstream_worker.streams.stream_columns import StreamColumns, is_settled


def push_slow(columns: StreamColumns, stream: WorkerStream, token_ids: Sequence[int]) -> bool:
    """Process the last tokens of a stream's history; returns whether they end it. The row ends up
    slow.
    """
    output, worker_row, fast = stream.output, stream.worker_row, columns.fast
    assert output is not None
    repetition = output.repetition
    if columns.is_fast[worker_row]:
        columns.make_slow(stream, columns.num_tokens(stream) - len(token_ids))
    first, most_tokens = columns.cells.firsts[worker_row], columns.cells.max_tokens[worker_row]
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
                output.append_whole([fast.texts[first + id_] for id_ in token_ids[begin:at]])
                continue
            columns.record_harmless(stream, token_ids[at])
        if output.push(token_ids[at : at + 1]):
            return True
        at += 1
    return False
