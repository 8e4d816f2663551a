"""The slow way of a stream's tokens: through its output, those alone that have to be looked at.

Owns: which of some tokens pass through the output one by one, and which are taken in by the texts
of the vocabulary's table. Does not know: histories, readers, what an end leads to.

Rules:
- Behind a settled output a token that is plain for its row (see `stream_columns`) is what it is on
  the fast way: whole, and nothing hangs on it. So of several that come together, as they do where
  whoever reads them is behind, only those are looked at that hold text back, and what follows them
  until the output is settled again. Otherwise a worker that is late would do more for each token
  than one that is not, and be later still.
- What was looked at behind a settled output may turn out to be harmless (`StreamColumns.learn`).
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream_worker.streams.stream import WorkerStream
from slipstream_worker.streams.stream_columns import StreamColumns, is_settled


def push_slow(columns: StreamColumns, stream: WorkerStream, token_ids: Sequence[int]) -> bool:
    """Take in the last tokens of a stream's history; whether they end it. It is slow then."""
    output, worker_row, fast = stream.output, stream.worker_row, columns.fast
    assert output is not None
    if columns.is_fast[worker_row]:
        columns.slow_down(stream, columns.num_tokens(stream) - len(token_ids))
    first, most_tokens = columns.cells.firsts[worker_row], columns.cells.max_tokens[worker_row]
    at, num = 0, len(token_ids)
    while at < num:
        begin = at
        if fast is not None and is_settled(output):
            num_left = most_tokens - output.num_tokens - 1  # that do not end it by their number
            stop = min(num, begin + num_left)
            while at < stop and columns.is_plain_for(fast, worker_row, token_ids[at]):
                at += 1
            if at > begin:
                output.take_whole([fast.texts[first + id_] for id_ in token_ids[begin:at]])
                continue
            columns.learn(stream, token_ids[at])
        if output.push(token_ids[at : at + 1]):
            return True
        at += 1
    return False
