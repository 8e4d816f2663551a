"""Where in its grammar one stream is.

Owns: the library's matcher of one stream and how many outputs it has seen. Does not know: rows,
plans, why a stream is here again.

Rules:
- The state is a function of the outputs: they are taken in once each, in order, whenever the next
  mask is wanted. So a preemption is nothing to it, and one that was lost is made again from them.
- An answer may end where the grammar is complete, by any of the stream's own ends. Where nothing
  else may follow, only they are allowed; behind one of them, too: a step may be in flight already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]


class GrammarBroken(Exception):  # noqa: N818  (an outcome of one stream)
    """The stream cannot go on in its grammar; says why, without quoting the answer."""


class GrammarState:
    """A stream in its grammar, at the start."""

    __slots__ = ("_end_ids", "_end_mask", "_grammars_own", "_is_over", "_matcher", "num_taken")

    def __init__(self, matcher: Any, end_ids: frozenset[int], end_mask: Int32s, ends: Int32s):
        """`matcher` is the stream's own. `end_mask` allows `end_ids`; `ends` are those ids by which
        the library would let an answer end. Masks are [ceil(vocab / 32)].
        """
        self._matcher = matcher
        self._end_ids = end_ids
        self._end_mask = end_mask
        self._grammars_own = ~ends
        self._is_over = False
        self.num_taken = 0  # outputs

    def take(self, token_ids: Sequence[int]) -> None:
        """The next outputs. Raises GrammarBroken where the grammar does not allow one of them."""
        for token_id in token_ids:
            if self._is_over:
                break
            if token_id in self._end_ids:
                self._is_over = True
            elif not self._matcher.consume_token(token_id):
                place = f"output token {self.num_taken}"
                raise GrammarBroken(f"the grammar does not allow {place} of the stream")
            self.num_taken += 1

    def fill(self, mask: Int32s) -> None:
        """Write what may come next. Raises GrammarBroken where that is nothing.

        `mask` [ceil(vocab / 32)] lies in one piece.
        """
        if self._is_over:
            mask[:] = self._end_mask
            return
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            raise GrammarBroken("the grammar became too complex to follow")
        mask &= self._grammars_own
        if self._matcher.is_accepting():
            mask |= self._end_mask
        if not mask.any():
            raise GrammarBroken("no token of the model's vocabulary goes on in the grammar")
