"""The last change of each adapter's name. Pure.

Whoever has heard of two changes of a name goes by the later one, so all who have heard of the same
changes have the same records, in whichever order they came.
"""

from __future__ import annotations

from collections.abc import Iterable

from slipstream_ipc.messages import AdapterRecord, AdapterRef

_MAX_GONE = 256  # names that are served no longer and are remembered: those that changed last


class RecordTable:
    """The latest record of each name."""

    def __init__(self, records: Iterable[AdapterRecord] = ()) -> None:
        self._by_name: dict[str, AdapterRecord] = {}
        for each in records:
            self.take(each)

    @property
    def all(self) -> tuple[AdapterRecord, ...]:
        """The records, by name."""
        return tuple([self._by_name[name] for name in sorted(self._by_name)])

    @property
    def next_version(self) -> int:
        """The version of a change that is later than all that are known."""
        return 1 + max([each.version for each in self._by_name.values()], default=0)

    def get(self, name: str) -> AdapterRecord | None:
        """The record of a name; None: it was not changed."""
        return self._by_name.get(name)

    def take(self, record: AdapterRecord) -> bool:
        """Hear of a change; return True if it is later than the one that was known."""
        before = self._by_name.get(record.name)
        if before is not None and not is_later(record, before):
            return False
        self._by_name[record.name] = record
        gone = [each for each in self._by_name.values() if not each.path]
        for each in sorted(gone, key=_order)[:-_MAX_GONE]:
            del self._by_name[each.name]
        return True

    def not_done(
        self, theirs: RecordTable, served: Iterable[AdapterRef]
    ) -> tuple[AdapterRecord, ...]:
        """The changes that are still to be made by one that has other records and serves these."""
        digests = {each.name: each.digest for each in served}
        return tuple(
            [
                each
                for each in self.all
                if (before := theirs.get(each.name)) is None
                or is_later(each, before)
                or (before == each and digests.get(each.name, b"") != each.digest)
            ]
        )


def is_later(one: AdapterRecord, other: AdapterRecord) -> bool:
    """True if the first of two changes of a name counts."""
    return _order(one) > _order(other)


def _order(record: AdapterRecord) -> tuple[int, bytes]:
    return record.version, record.operation
