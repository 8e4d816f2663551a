"""A change of adapters on its way to all replicas of a model, or to none. Pure.

- All are asked whether they could make it. Where one could not, or has other files at the path than
  another, none makes it, and the answer names those.
- Then all are told to make it. From the first one that does it is the record of the name, so it
  comes to all others too, whatever dies: any client that hears of it tells those that lack it.
- A replica that has died since the first stage may read again, and refuse. Then what the name was
  before becomes the next record.
- Replicas that are away take no part: they are told when they are back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from slipstream_ipc.messages import (
    AdapterChanged,
    AdapterRecord,
    AdapterRef,
    ChangeAdapter,
    ErrorCode,
    Fault,
)

_MAX_NAMED = 3  # replicas in a message


@dataclass(frozen=True, slots=True)
class Ask:
    """A query to the replicas of these numbers, all of whose answers are wanted."""

    query: ChangeAdapter
    members: tuple[int, ...]


class StagedChange:
    """One change. Ask what `begin` returns, then give the answers to `go_on`, until it returns the
    answer to the change.
    """

    def __init__(
        self,
        change: ChangeAdapter,
        names: Mapping[int, str],
        num_away: int,
        before: AdapterRef | None,
        undo: bytes,
    ) -> None:
        """names: of the replicas that take part, for messages. num_away: those that do not. before:
        what the name is. undo: the operation by which it becomes that again.
        """
        self._change = change
        self._names = dict(names)
        self._num_away = num_away
        self._before = before
        self._undo = undo
        self._is_committing = False
        self._warning = ""
        self._refused: AdapterChanged | None = None  # by a replica, and it is being undone

    @property
    def name(self) -> str:
        """The adapter's."""
        return self._change.name

    @property
    def operation(self) -> bytes:
        """The change's."""
        return self._change.operation

    def begin(self) -> Ask:
        """The first query."""
        return Ask(replace(self._change, stage="prepare"), tuple(self._names))

    def go_on(
        self, answers: Mapping[int, AdapterChanged | None], next_version: int
    ) -> Ask | AdapterChanged:
        """The next query, or the answer to the change. answers: to the last query; None: the
        replica is away. next_version: of a record that is later than all that are known.
        """
        if self._refused is not None:
            return self._refused
        for number, answer in answers.items():
            if answer is None:
                del self._names[number]
                self._num_away += 1
        given = {number: each for number, each in answers.items() if each is not None}
        if not given:
            known = "it may have been made, and is then told to all" if self._is_committing else ""
            why = f"no replica has answered{f': {known}' if known else ''}"
            return AdapterChanged(0, Fault("overloaded", why))
        if self._is_committing:
            return self._committed(given, next_version)
        return self._prepared(given, next_version)

    def _prepared(
        self, given: Mapping[int, AdapterChanged], next_version: int
    ) -> Ask | AdapterChanged:
        refused = {number: each for number, each in given.items() if each.fault is not None}
        if not self._change.path and any(each.why != "missing" for each in given.values()):
            # those that joined meanwhile may lack what the others are to forget
            refused = {number: each for number, each in refused.items() if each.why != "missing"}
        if refused:
            return self._refusal(refused)
        holders: dict[bytes, list[int]] = {}
        for number, each in given.items():
            if each.fault is None:
                holders.setdefault(each.digest, []).append(number)
        if len(holders) > 1:
            groups = " differ from those of ".join(map(self._named, holders.values()))
            message = f"lora_path: the files at {self._change.path!r} of {groups}"
            return AdapterChanged(0, Fault("bad_request", message, "lora_path"))
        self._warning = next((each.warning for each in given.values() if each.warning), "")
        self._is_committing = True
        [digest] = holders
        ref = AdapterRef(self.name, self._change.path, digest) if digest else None
        return self._commit(ref, self.operation, next_version)

    def _commit(self, ref: AdapterRef | None, operation: bytes, version: int) -> Ask:
        path, digest = ("", b"") if ref is None else (ref.path, ref.digest)
        record = AdapterRecord(self.name, version, operation, path, digest)
        return Ask(commit_of(record), tuple(self._names))

    def _committed(
        self, given: Mapping[int, AdapterChanged], next_version: int
    ) -> Ask | AdapterChanged:
        refused = {number: each for number, each in given.items() if each.fault is not None}
        if refused:
            self._refused = self._refusal(refused)
            # later than the commit also where no replica's list of records has come yet
            return self._commit(self._before, self._undo, next_version + 1)
        warnings = [self._warning] if self._warning else []
        if self._num_away:
            are = "replica is" if self._num_away == 1 else "replicas are"
            warnings.append(f"{self._num_away} {are} away, and told later")
        num_streams = sum([each.num_streams for each in given.values()])
        return AdapterChanged(0, num_streams=num_streams, warning="; ".join(warnings))

    def _refusal(self, refused: Mapping[int, AdapterChanged]) -> AdapterChanged:
        """The answer of those that refuse; they are named where they are not all, or differ."""
        faults = {number: each.fault for number, each in refused.items() if each.fault is not None}
        whys = {each.why for each in refused.values()}
        first = next(iter(faults.values()))
        messages: dict[str, list[int]] = {}
        for number, fault in faults.items():
            messages.setdefault(fault.message, []).append(number)
        message, field = first.message, first.field
        if len(messages) > 1 or len(faults) < len(self._names):
            said = [f"{self._named(them)}: {what}" for what, them in messages.items()]
            message = f"no replica has changed anything, as {'; '.join(said[:_MAX_NAMED])}"
        is_busy = {fault.code for fault in faults.values()} == {"overloaded"}
        code: ErrorCode = "overloaded" if is_busy else "bad_request"
        why = refused[next(iter(refused))].why if len(whys) == 1 else ""
        return AdapterChanged(0, Fault(code, message, field), why)

    def _named(self, numbers: Sequence[int]) -> str:
        named = ", ".join([self._names[number] for number in numbers[:_MAX_NAMED]])
        more = len(numbers) - _MAX_NAMED
        return f"{named} and {more} more" if more > 0 else named


def commit_of(record: AdapterRecord) -> ChangeAdapter:
    """The query by which a replica comes to have a record."""
    return ChangeAdapter(
        0,
        record.operation,
        record.name,
        record.path,
        stage="commit",
        version=record.version,
        digest=record.digest,
    )
