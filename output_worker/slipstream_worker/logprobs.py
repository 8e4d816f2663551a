"""Log-probability columns of a step, cut into what belongs to each stream.

Owns: the cutting. Does not know: streams, what the numbers mean. The columns were checked already.
"""

from __future__ import annotations

from slipstream_ipc.columns import u32
from slipstream_ipc.messages import LogprobColumns

TokenLogprobs = tuple[bytes, bytes, int]  # values (f32) and ids (u32) of one token, its rank


def split_logprobs(
    columns: LogprobColumns | None, counts: list[int] | None, num_entries: int
) -> list[list[TokenLogprobs]] | None:
    """For each entry of the batch, its tokens' log-probabilities; None where there are none."""
    if columns is None:
        return None
    widths = u32(columns.widths).tolist() if columns.widths else [columns.width] * num_entries
    ranks = u32(columns.ranks).tolist()
    values, ids = columns.values, columns.ids
    result: list[list[TokenLogprobs]] = []
    at = rank_at = 0
    for i, width in enumerate(widths):
        entry: list[TokenLogprobs] = []
        if width:
            for _ in range(1 if counts is None else counts[i]):
                end = at + 4 * width
                entry.append((values[at:end], ids[at:end], ranks[rank_at]))
                at = end
                rank_at += 1
        result.append(entry)
    return result
