"""One Deltas message, read lazily: its columns become Python objects on first access.

- The columns are checked (`check_deltas`) before a DeltaBatch is made of them.
- Reading one entry converts the whole column, once: usually all entries are read, and a list slice
  costs a tenth of an array slice.
- Every value is a pure function of the message, so concurrent reads from two threads are safe.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from slipstream.compiled import EntryObjects
from slipstream.delta_objects import objects_of
from slipstream_ipc.columns import f32, pack_u32, u32
from slipstream_ipc.messages import AnswerEvent, Deltas, End, EventKind, LogprobColumns


class Logprob(Struct, frozen=True, gc=False):
    """One candidate token of one position.

    rank: 1 is the most likely token; for a token requested by `logprob_token_ids`, its place in
    that list.
    """

    logprob: float
    rank: int
    token_id: int


TokenLogprobs = dict[int, Logprob]  # by token id, the sampled token's first
_PART = 1024  # candidates
_KINDS = {int(kind): kind for kind in EventKind}


class EntryColumns(Struct, frozen=True, gc=False):
    """The columns of one entry of n tokens, each with `width` candidates."""

    token_ids: bytes  # u32 [n]
    width: int = 0  # 0 where the entry has no log-probabilities, or no tokens
    values: bytes = b""  # f32 [n, width]
    ids: bytes = b""  # u32 [n, width]
    ranks: bytes = b""  # u32 [n], of the tokens themselves


class StreamPosition(NamedTuple):
    """A position in a stream: how many characters and tokens precede it."""

    num_chars: int
    num_tokens: int


class CandidateSpan(NamedTuple):
    """The range of an entry's candidates in a message's columns, `width` to a token."""

    begin: int
    end: int
    width: int
    rank_begin: int  # ranks have one value to a token


class _Layout(NamedTuple):
    widths: list[int]  # [entries]
    firsts: Sequence[int]  # [entries + 1], offsets into values and ids
    rank_firsts: Sequence[int]  # [entries + 1], offsets into ranks


class DeltaBatch:
    """The columns of one Deltas message.

    first_at, last_at: when the message arrived, in seconds of the monotonic clock; of a joined one,
    when the first and the last of its tokens did.
    """

    # fields, which `delta_relay.c` sets and `delta_objects.c` reads, and the cached properties
    __slots__ = (
        "__dict__",
        "__weakref__",
        "_objects",
        "ends",
        "first_at",
        "has_events",
        "has_one_each",
        "last_at",
        "message",
    )

    def __init__(self, message: Deltas, ends: Mapping[int, End], at: float = 0.0) -> None:
        """ends: the End of each entry that has one, by entry. at: when the message arrived."""
        self.message = message
        self.first_at = self.last_at = at
        self.ends = ends
        self.has_one_each = not message.counts  # each entry has one token id
        # some entry is of a stream that is read as events
        self.has_events = bool(message.kinds or message.event_entries)
        self._objects: EntryObjects | None = None  # cached_property of Python 3.11 takes a lock

    @cached_property
    def counts(self) -> list[int] | None:
        """The number of token ids of each entry; None where each has one."""
        counts = self.message.counts
        return u32(counts).tolist() if counts else None

    def num_tokens(self, entry: int) -> int:
        """The number of an entry's token ids."""
        return 1 if self.counts is None else self.counts[entry]

    def end_of(self, entry: int) -> StreamPosition:
        """The position in its stream at which an entry ends."""
        message, at = self.message, 4 * entry
        chars = int.from_bytes(message.chars[at : at + 4], "little")
        tokens = int.from_bytes(message.tokens[at : at + 4], "little")
        return StreamPosition(chars + len(message.texts[entry]), tokens + self.num_tokens(entry))

    def token_ids(self, entry: int, skip: int) -> list[int]:
        """An entry's token ids without the first `skip`."""
        firsts = self._firsts
        return self.ids[firsts[entry] + skip : firsts[entry + 1]]

    def logprobs(self, entry: int, skip: int) -> list[TokenLogprobs] | None:
        """An entry's log-probabilities without its first `skip` tokens; None if it has none."""
        if self.message.logprobs is None:
            return None
        widths, firsts, _ = self._layout
        width, end = widths[entry], firsts[entry + 1]
        if not width:
            return None
        begin = firsts[entry] + skip * width
        candidates = self._candidates
        return [
            {candidate.token_id: candidate for candidate in candidates[at : at + width]}
            for at in range(begin, end, width)
        ]

    def span(self, entry: int, skip: int) -> CandidateSpan | None:
        """The range of an entry's candidates without its first `skip` tokens; None if empty."""
        if self.message.logprobs is None:
            return None
        widths, firsts, rank_firsts = self._layout
        width, end = widths[entry], firsts[entry + 1]
        begin = firsts[entry] + skip * width
        return CandidateSpan(begin, end, width, rank_firsts[entry] + skip) if begin < end else None

    def id_column(self, entry: int, skip: int) -> bytes:
        """An entry's token ids without the first `skip`, as a u32 column."""
        firsts = self._firsts
        return self.message.token_ids[4 * (firsts[entry] + skip) : 4 * firsts[entry + 1]]

    def cut(self, entry: int, skip: int) -> EntryColumns:
        """The columns of an entry without its first `skip` tokens."""
        token_ids = self.id_column(entry, skip)
        columns = self.message.logprobs
        if columns is None or not token_ids:
            return EntryColumns(token_ids)
        widths, firsts, rank_firsts = self._layout
        width = widths[entry]
        begin, end = 4 * (firsts[entry] + skip * width), 4 * firsts[entry + 1]
        ranks = columns.ranks[4 * (rank_firsts[entry] + skip) : 4 * rank_firsts[entry + 1]]
        return EntryColumns(
            token_ids, width, columns.values[begin:end], columns.ids[begin:end], ranks
        )

    def events(self, entry: int, skip: int, text: str) -> tuple[AnswerEvent, ...]:
        """An entry's events. Text that is not read as events is content.

        text: of the entry, without what the reader has received before, and `skip` its tokens. An
        entry with events of its own is new as a whole, or all of its events are old.
        """
        own = self.own_events.get(entry)
        if own is not None:
            return () if skip or len(text) < len(self.message.texts[entry]) else own
        if not text:
            return ()
        kind = self.kinds[entry] if self.message.kinds else EventKind.CONTENT
        return (AnswerEvent(_KINDS.get(kind & 0xFF, EventKind.CONTENT), text, kind >> 8),)

    @cached_property
    def read_entries(self) -> dict[int, int]:
        """The kind of the text of each entry that is read as events, by entry; 0 where it lists its
        events.
        """
        kinds = u32(self.message.kinds)
        read = np.flatnonzero(kinds)
        found = dict(zip(read.tolist(), kinds[read].tolist(), strict=True))
        return found | dict.fromkeys(self.own_events, 0)

    @cached_property
    def own_events(self) -> dict[int, tuple[AnswerEvent, ...]]:
        """The events of the entries that list theirs, by entry."""
        message = self.message
        if not message.event_entries:
            return {}
        return dict(zip(u32(message.event_entries).tolist(), message.events, strict=True))

    @cached_property
    def kinds(self) -> list[int]:
        """The kind of each entry's text (see `Deltas.kinds`); empty where none has one."""
        return u32(self.message.kinds).tolist()  # type: ignore[no-any-return]

    @cached_property
    def _firsts(self) -> Sequence[int]:
        if self.counts is None:
            return range(len(self.message.texts) + 1)
        return list(accumulate(self.counts, initial=0))

    @cached_property
    def ids(self) -> list[int]:
        """The token ids of all entries."""
        ids: list[int] = u32(self.message.token_ids).tolist()
        return ids

    @cached_property
    def _layout(self) -> _Layout:
        columns = self.message.logprobs
        assert columns is not None
        num = len(self.message.texts)
        if self.counts is None and columns.width and not columns.widths:
            width = columns.width
            return _Layout([width] * num, range(0, width * num + 1, width), range(num + 1))
        counts = self.counts or [1] * num
        widths = u32(columns.widths).tolist() if columns.widths else [columns.width] * num
        sizes = [count * width for count, width in zip(counts, widths, strict=True)]
        ranks = [count if width else 0 for count, width in zip(counts, widths, strict=True)]
        return _Layout(
            widths, list(accumulate(sizes, initial=0)), list(accumulate(ranks, initial=0))
        )

    @property
    def objects(self) -> EntryObjects:
        """The objects that make `token_ids` and `logprobs` in C."""
        if self._objects is None:
            self._objects = objects_of(self.message, Logprob)
        return self._objects

    @property
    def token_widths(self) -> npt.NDArray[np.int64]:
        """The number of candidates of each token, over all entries; int64."""
        widths = np.array(self._layout.widths, np.int64)
        return widths if self.counts is None else np.repeat(widths, self.counts)

    @cached_property
    def _candidates(self) -> list[Logprob]:
        columns = self.message.logprobs
        assert columns is not None
        widths = self.token_widths
        widths = widths[widths > 0]
        own = np.cumsum(widths) - widths  # the offset of each token's own candidate
        ids = u32(columns.ids)
        ranks = np.arange(len(ids)) - np.repeat(own, widths)  # the likeliest follow it, in order
        ranks[own] = u32(columns.ranks)
        return list(map(Logprob, f32(columns.values).tolist(), ranks.tolist(), ids.tolist()))


def batch_of(columns: LogprobColumns) -> DeltaBatch:
    """One entry of tokens that have these columns, of one width, and nothing else."""
    num = pack_u32([len(columns.ranks) // 4])
    return DeltaBatch(Deltas(b"", b"", b"", [""], b"", num, logprobs=columns), {})


def divided(columns: LogprobColumns) -> Iterator[LogprobColumns]:
    """The columns of tokens of one width, about _PART candidates at a time."""
    width, num = columns.width, len(columns.ranks) // 4
    step = max(1, _PART // width)
    for at in range(0, num, step):
        end = min(at + step, num)
        some, tokens = slice(4 * at * width, 4 * end * width), slice(4 * at, 4 * end)
        yield LogprobColumns(
            width,
            columns.values[some],
            columns.ids[some],
            columns.ranks[tokens],
        )


def columns_in_parts(columns: LogprobColumns) -> Iterator[list[TokenLogprobs]]:
    """Each token's candidates, where all have equally many; about _PART candidates at a time."""
    for part in divided(columns):
        yield batch_of(part).logprobs(0, 0) or []
