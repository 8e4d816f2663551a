"""The questions that a scheduler asks of a drafter: which tokens may follow those of a row.

A draft is right where it equals the token that is sampled at its place, so text does not depend on
drafters: they may foresee anything.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from slipstream_ipc.arrays import Int64s, UInt32s
from slipstream_ipc.history.token_log import TokenLog
from slipstream_ipc.row_set import RowSet


class Drafts(NamedTuple):
    """Drafts of n rows, at least one in all."""

    lens: Int64s  # [n]
    token_ids: Int64s  # [sum(lens)] row by row


class Drafter(Protocol):
    """Foresees the tokens of rows."""

    @property
    def awaits_tokens(self) -> bool:
        """True if the next step will probably have drafts, so that it pays to plan it only once
        the tokens of the step in flight are known.
        """

    def open(self, row: int, root: bytes, prompt_len: int, prediction: UInt32s) -> None:
        """Foresee the tokens of a row, whose prompt and outputs are in the history. root: of its
        prefixes in the cache; what rows of other roots say must not show in its drafts.
        prediction: what it will probably say, [n]; none, [0].
        """

    def close(self, rows: Int64s) -> None:
        """Forget rows, whose histories are still there; nothing where they are not open."""

    def observe(self, rows: RowSet, ids: UInt32s, counts: Int64s | None, tokens: TokenLog) -> None:
        """A step gave `counts` tokens (None: one each) to n rows, open or not; their histories have
        them already. ids: [sum(counts)] row by row.
        """

    def propose(self, rows: RowSet, most: Int64s, num_beside: int) -> Drafts | None:
        """The drafts of these n rows, at most `most` [n] of each; None where a step without drafts
        gives more tokens a second. All tokens of the rows are in the history. num_beside: tokens of
        prompts that the step computes besides.
        """
