"""Reasoning of a scheduler's rows, as far as the scheduler follows it."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream_core.grammar.reasoning.reasoning_state import NEVER


class WatchedReasoning:
    """Reasoning that a token ends; all tokens behind that need masks. Stands for ReasoningState."""

    masks_ids = watches_all = follows_grammar = False

    def __init__(self, end: int, outputs: Sequence[int] = ()) -> None:
        """outputs: those that the request has when it comes."""
        self.watched_ids = frozenset([end])
        self.masked_from = NEVER
        self.is_final = False
        for index, token_id in enumerate(outputs):
            if not self.is_final:
                self.take(token_id, index)

    def take(self, token_id: int, index: int) -> None:
        """Take the output at this index."""
        if token_id in self.watched_ids:
            self.masked_from, self.is_final = index + 1, True
