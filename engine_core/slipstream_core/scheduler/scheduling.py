"""The questions that the core's other parts ask of a scheduler: this project's or another engine's.

`Scheduler` implements it. The loop, what workers ask, and the counters know this protocol alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from slipstream_core.kvcache.snapshots import Snapshots
from slipstream_core.scheduler.launched_steps import Sampled
from slipstream_core.scheduler.request_table import Acked, NewRequest
from slipstream_core.step.plan import TurnT
from slipstream_ipc.arrays import Int64s
from slipstream_ipc.messages import Admit, Fault


class Scheduling(Protocol[TurnT]):
    """Decides what the next step computes, and takes in what it sampled."""

    def objection(self, admit: Admit) -> Fault | None:
        """The engine's objection to a registration, beyond what is checked for every engine."""

    @property
    def has_work(self) -> bool:
        """True if there is any request, running or waiting."""

    @property
    def has_suspects(self) -> bool:
        """True if a request has to run alone."""

    @property
    def max_num_seqs(self) -> int:
        """Requests that may run at the same time."""

    @property
    def max_in_step(self) -> int:
        """Requests that a step may compute at the most."""

    @property
    def num_running(self) -> int:
        """Requests that run."""

    @property
    def num_waiting(self) -> int:
        """Requests that do not run yet, or were preempted."""

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens that the waiting requests have to compute before their next output."""

    @property
    def num_prompt_tokens_left(self) -> int:
        """Tokens of running requests' prompts that no launched step computes."""

    @property
    def block_size(self) -> int:
        """Tokens in a block of the cache."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache, the null block included."""

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds."""

    @property
    def snapshots(self) -> Snapshots:
        """The prefix cache's copies of recurrent states; to be read only."""

    @property
    def num_preemptions(self) -> int:
        """Times that a request gave up its blocks."""

    @property
    def prefix_cache_queries(self) -> int:
        """Tokens of requests that were looked up in the prefix cache."""

    @property
    def prefix_cache_hits(self) -> int:
        """Tokens of requests that were found in the prefix cache, and not computed."""

    def adapters_in_use(self) -> tuple[Mapping[int, int], Mapping[int, int]]:
        """Numbers of requests by the place of their adapter: those that run, and that wait."""

    def eviction_age(self, now: float) -> float | None:
        """Seconds since the cached block that was evicted last was last used; None if unknown."""

    def waiting_of(self, tenant: bytes) -> tuple[int, int]:
        """The number of a tenant's requests that wait, and of the tokens that they have to
        compute.
        """

    def num_shared(self, row: int) -> int:
        """The number of a request's tokens that were in the prefix cache when it last began to
        run.
        """

    def take_admitted(self) -> list[int]:
        """The rows that began to run since the last call; preempted ones begin again.

        Asked once a step is launched, and again once it is collected.
        """

    def acks_moved_back(self) -> None:
        """A row's acknowledged position may be less than before."""

    def has_prompt_logprobs(self, row: int) -> None:
        """All log-probabilities of a row's prompt are here."""

    def add(self, request: NewRequest) -> None:
        """Queue a request whose tokens, its prompt and outputs so far, are in the history.

        Raises ValueError where its lengths do not fit the history.
        """

    def remove(self, row: int) -> None:
        """Remove a request, running or waiting. Does nothing if it is not here."""

    def schedule(self, acked: Acked) -> TurnT | None:
        """The next step, or None if no request can run.

        Every plan has to be launched, and answered by complete() or fail() in the same order.
        `acked`: see `request_table.Acked`.
        """

    def rows_of(self, plan: TurnT) -> Int64s:
        """The rows that a step in flight may compute."""

    def grammar_rows_of(self, plan: TurnT) -> Int64s:
        """The rows of a step in flight whose masks it awaits, [G]; NO_ROW for those that ended."""

    def prompt_rows_of(self, plan: TurnT) -> Int64s:
        """The rows of a step's `prompt`, [P]; NO_ROW for those that ended."""

    def complete(
        self,
        plan: TurnT,
        token_ids: npt.NDArray[np.integer],
        counts: Int64s | None = None,
        undefined: Int64s | None = None,
    ) -> Sampled:
        """Append what the oldest plan sampled to the histories of live requests.

        `token_ids`, `counts` and `undefined` are as in StepResult.
        """

    def fail(self, plan: TurnT) -> Int64s:
        """The oldest plan raised; returns the row at fault, if one was alone in it."""
