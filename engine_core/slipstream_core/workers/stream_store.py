"""The streams of a core, and what it has of each by row: parts of the core share them."""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream_core.workers.possible_ends import PossibleEnds
from slipstream_core.workers.stream_table import CoreStreamTable
from slipstream_ipc.history.cursors import Cursors
from slipstream_ipc.history.logprob_log import LogprobLog
from slipstream_ipc.history.token_log import TokenLog


@dataclass(frozen=True, slots=True)
class CoreStreamStore:
    """The streams, their histories, how far each is sent, and which of its tokens may end it."""

    table: CoreStreamTable = field(default_factory=CoreStreamTable)
    tokens: TokenLog = field(default_factory=TokenLog)
    logprobs: LogprobLog = field(default_factory=LogprobLog)
    cursors: Cursors = field(default_factory=Cursors)
    possible_ends: PossibleEnds = field(default_factory=PossibleEnds)
