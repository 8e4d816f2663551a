"""The rows whose next token depends on their reasoning, and from where on they need masks.

- A step is planned while the token before is in flight, as if that token changed nothing. Where it
  does, what is in flight for the row was sampled without the mask that it needs, and is dropped.
- A step without a token that is watched costs one look-up for each of its tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from slipstream_core.grammar.reasoning.reasoning_state import NEVER, ReasoningState
from slipstream_core.scheduler.request_table import RequestTable
from slipstream_ipc.arrays import Bools, Int64s


class ReasoningRows:
    """The states of the rows of `requests` whose reasoning is followed."""

    def __init__(self, requests: RequestTable) -> None:
        self._requests = requests
        self.by_row: dict[int, ReasoningState] = {}
        self._masks_ids: dict[int, bool] = {}  # whether it may mask ids
        self._is_watched: Bools = np.zeros(0, np.bool_)  # by token id: for some row, at some time
        self._watching_all: set[int] = set()  # rows whose next token has to be looked at

    def __len__(self) -> int:
        return len(self.by_row)

    def add(self, row: int, state: ReasoningState, stop_ids: Collection[int]) -> None:
        """A request of the table starts on `row`; `state` has taken its outputs. stop_ids: not
        sampled while it `masks_ids`.
        """
        self.by_row[row] = state
        watched = np.array(sorted(state.watched_ids), np.int64)
        size = int(watched.max(initial=-1)) + 1
        if size > len(self._is_watched):
            self._is_watched = np.concatenate(
                [self._is_watched, np.zeros(size - len(self._is_watched), np.bool_)]
            )
        self._is_watched[watched] = True
        if stop_ids:
            self._requests.set_stop_ids(row, stop_ids)
        self._masks_ids[row] = bool(stop_ids)
        self._update(row, state)

    def remove(self, rows: Int64s) -> None:
        """The requests of these rows are gone."""
        for row in rows.tolist():
            self.by_row.pop(row, None)
            self._masks_ids.pop(row, None)
            self._watching_all.discard(row)

    def watches(self, rows: Int64s, token_ids: npt.NDArray[np.integer]) -> bool:
        """True if some of these new tokens of `rows` may change the state of its row."""
        known = token_ids[token_ids < len(self._is_watched)]
        if self._is_watched[known].any():
            return True
        return bool(self._watching_all) and not self._watching_all.isdisjoint(rows.tolist())

    def take(self, row: int, token_ids: Sequence[int], position: int) -> int:
        """Take the tokens that a step sampled for `row` from `position` of its history on; returns
        how many count. The first had the mask that it needed; those behind it had none.
        """
        state, requests = self.by_row.get(row), self._requests
        for num, token_id in enumerate(token_ids):
            if num and position + num >= requests.masked_from[row]:
                return num
            if state is not None and not state.is_final:
                was_masking = state.masks_ids
                state.take(token_id, position + num - int(requests.prompt_len[row]))
                self._update(row, state)
                if state.masks_ids and not was_masking:
                    return num + 1
        return len(token_ids)

    def take_masked(self, row: int, token_ids: Sequence[int], position: int) -> None:
        """Take what a step gave to a row that `follows_grammar`, each with the mask that it needed.
        Only the last one may complete a call, as no draft does.
        """
        state = self.by_row[row]
        if not state.is_final:
            first = position - int(self._requests.prompt_len[row])
            for index, token_id in enumerate(token_ids, first):
                state.take(token_id, index)
            self._update(row, state)

    def _update(self, row: int, state: ReasoningState) -> None:
        requests = self._requests
        prompt_len = int(requests.prompt_len[row])
        requests.masked_from[row] = min(state.masked_from, NEVER - prompt_len) + prompt_len
        if self._masks_ids[row]:
            # where it has a mask, that alone decides: it knows the tokens that a plan does not
            requests.masked_until[row] = requests.masked_from[row] if state.masks_ids else 0
        if state.watches_all:
            self._watching_all.add(row)
        else:
            self._watching_all.discard(row)
