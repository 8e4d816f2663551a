"""The worker's C; each part stands in a `.c` file beside the module that uses it."""

from collections.abc import Callable, Mapping
from typing import Any

from slipstream_ipc._native import TokenPages
from slipstream_ipc.transport.link import Link
from slipstream_ipc.transport.local_socket import LocalConnection
from slipstream_worker.streams.row_loops import Buffer, Entries

class RowLoops:
    """Loops over the rows of a step or a message."""

    def __init__(self, columns: Mapping[str, Any], texts: list[str], vocab_size: int) -> None: ...
    def append(self, rows: Buffer, counts: Buffer | None, token_ids: Buffer) -> list[int]:
        """Count `counts[i]` (i64; None: one) new tokens of each row. Returns the indices of the
        rows whose tokens have to pass through their outputs, a repetition apart.
        """

    def due(self, rows: Buffer, urgent: bool) -> tuple[bytes, bytes, list[int]]:
        """The fast ones of these rows that are due, the number of new tokens of each (empty: one
        each), and the slow rows that may have news. urgent: only first tokens are due.
        """

    def entries(self, rows: Buffer, counts: bytes, token_ids: bytes | None) -> Entries:
        """The columns of a message with the next `counts[i]` (empty: one) tokens of these fast
        rows: handles, characters before, tokens before, texts, ids, characters, and kinds (empty:
        all 0). token_ids: u32; None: the last one of each row.
        """

    def sent(
        self,
        rows: Buffer,
        starts: bytes,
        counts: bytes,
        num_chars: bytes,
        now: float,
        bounds: Buffer,
        buckets: Buffer,
        total: Buffer,
    ) -> list[tuple[int, int]]:
        """Record that such a message was sent: move the cursors, and add how long each row has
        waited to a histogram (f64 bounds, i64 buckets, f64 sum). Returns the rows that were sent
        their first tokens, with their number.
        """

class StepRelay:
    """Relays the steps of some rows."""

    step: int  # number of the latest step taken
    connection: LocalConnection  # to the core

    def __init__(
        self,
        core: Link[Any],
        client: Link[Any],
        loops: RowLoops,
        pages: TokenPages,
        table: Any,
        core_rows: Any,
        rows: tuple[Any, Any, Any, Any],
        report: Callable[[bytes], bool],
        deliver: Callable[[bytes], bool],
        receipt: list[Any],
        numbers: tuple[Any, Any, Any, Any],
        spans: tuple[Any, Any, Any],
        max_unacked: int,
        may_owe: int,
        connection: LocalConnection,
        logprobs: tuple[int, Any, int],
        budget: tuple[int, int, int],
    ) -> None:
        """rows: [n] of the worker, their order in a message, the client's others, and the prompts'
        lengths by row. numbers: the bounds, buckets and sum of a histogram, and what is counted.
        logprobs: the width, the columns that gather, and how many may. budget: the bytes of an
        entry, of a token, and of a message.
        """
    def take(self, message: bytes, now: float) -> int:
        """Process a core's message that has arrived; return its outcome: TAKEN, … or 0."""
