"""The ledger: what tests cost, and what they read when they last were green.

`tests/durations.json` has a line for each file of tests and one for each test that is long or
starts processes. `scripts/test --all` writes it.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
from tests.ledger.tools import tool_of

ROOT = Path(__file__).parents[2]
PATH = ROOT / "tests" / "durations.json"
AT_ONCE = 3  # as scripts/test runs them
CORES = 2
LONG_S = 5.0  # a test whose cases take more, on average, is `long`
_LISTED_S = 5.0  # tests below have no line of their own
QUICK_CPU_S = 2.0  # of one file's tests in the quick suite, which has the cheapest of them
_QUICK_CASES = 2  # of a test, in the quick suite
QUICK_SHARE = 0.25  # of a property's examples, there
_UNKNOWN_S = 0.5  # a case that is not in the ledger


class Entry(msgspec.Struct, omit_defaults=True):
    """What one test cost in all its cases, or one file in all its tests.

    wall, cpu: seconds; cpu counts ended children. cases: how many. starts: it starts processes; a
    file, where all of its tests do. quick: the wall seconds of its part of the quick suite. later:
    of a test, cheaper ones fill its file's part of the quick suite. pinned: marked `quick`, it
    never is later. digest: of a file, what it read when it last was green.
    """

    wall: float = 0.0
    cpu: float = 0.0
    cases: int = 0
    starts: bool = False
    quick: float = 0.0
    later: bool = False
    pinned: bool = False
    digest: str = ""

    @property
    def quick_cpu(self) -> float:
        """Seconds of the processors that its part of the quick suite takes."""
        return self.cpu * min(1.0, self.quick / self.wall) if self.wall else 0.0

    @property
    def is_long(self) -> bool:
        return self.wall > LONG_S * self.cases

    @property
    def is_quick(self) -> bool:
        return not (self.starts or self.is_long)


def test_of(nodeid: str) -> str:
    """A test without its case."""
    return nodeid.partition("[")[0]


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def quick_s(case_s: Sequence[float]) -> float:
    """Seconds that the quick suite spends on a test whose cases take so many each."""
    if not case_s:
        return 0.0
    return sum(case_s) / len(case_s) * min(_QUICK_CASES, len(case_s))


def later_of(tests: Mapping[str, Entry]) -> set[str]:
    """Those of a file's quick tests that the quick suite leaves out. It has those that are pinned,
    and beside them the cheapest that take `QUICK_CPU_S` together; one at least.
    """
    others = [name for name, each in tests.items() if not each.pinned]
    later: set[str] = set()
    taken_s, num_kept = 0.0, len(tests) - len(others)
    for name in sorted(others, key=lambda each: (tests[each].quick_cpu, each)):
        taken_s += tests[name].quick_cpu
        if num_kept and taken_s > QUICK_CPU_S:
            later.add(name)
        else:
            num_kept += 1
    return later


class Ledger:
    """Entries by file and by test (`FILE::NAME`)."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self.entries = dict(entries)

    @classmethod
    def read(cls, path: Path = PATH) -> Ledger:
        """The ledger of a file; an empty one where there is none."""
        if not path.exists():
            return cls({})
        return cls(msgspec.json.decode(path.read_bytes(), type=dict[str, Entry]))

    def dump(self) -> str:
        """A line an entry, sorted, so that two branches' lines merge."""
        lines = (
            f"{json.dumps(name)}: {msgspec.json.encode(entry, order='sorted').decode()}"
            for name, entry in sorted(self.entries.items())
        )
        return "{\n" + ",\n".join(lines) + "\n}\n"

    def files(self) -> dict[str, Entry]:
        return {name: entry for name, entry in self.entries.items() if "::" not in name}

    def is_marked(self, nodeid: str) -> tuple[bool, bool]:
        """Whether a case starts processes, and whether it is long."""
        entry = self.entries.get(test_of(nodeid)) or Entry()
        file = self.entries.get(file_of(nodeid)) or Entry()
        return file.starts or entry.starts, entry.is_long

    def is_later(self, nodeid: str) -> bool:
        """Whether the quick suite leaves a quick test out, as its file has cheaper ones."""
        entry = self.entries.get(test_of(nodeid))
        return entry is not None and entry.later

    def starting(self) -> set[str]:
        """The files with tests that start processes."""
        return {file_of(name) for name, entry in self.entries.items() if entry.starts}

    def seconds(self, nodeids: Iterable[str]) -> dict[str, float]:
        """Wall seconds that each case is expected to take; the cases of a test share its time, and
        tests without a line what is left of their file's.
        """
        expected: dict[str, float] = {}
        others: dict[str, list[str]] = {}
        for nodeid in nodeids:
            if entry := self.entries.get(test_of(nodeid)):
                expected[nodeid] = entry.wall / max(entry.cases, 1)
            else:
                others.setdefault(file_of(nodeid), []).append(nodeid)
        listed: dict[str, float] = {}
        for name, entry in self.entries.items():
            if "::" in name:
                listed[file_of(name)] = listed.get(file_of(name), 0.0) + entry.wall
        for file, cases in others.items():
            known = self.entries.get(file)
            left = max(0.0, known.wall - listed.get(file, 0.0)) if known else 0.0
            each = left / len(cases) if known else _UNKNOWN_S
            expected.update(dict.fromkeys(cases, each))
        return expected

    def replace(self, file: str, tests: Mapping[str, Entry], digest: str) -> None:
        """Put in what a whole run of a file has measured. No digest keeps the one before, as does
        a time that is within a half of the one before: lines are to change where facts do.
        """
        before = self.entries.get(file) or Entry()
        gone = [name for name in self.entries if name.startswith(f"{file}::")]
        old = {name: self.entries.pop(name) for name in gone}
        all_start = all(entry.starts for entry in tests.values())
        has_part = tool_of(file) is None
        quick = {
            name: each for name, each in tests.items() if has_part and each.is_quick and each.quick
        }
        later = later_of(quick)
        for name, entry in tests.items():
            if entry.wall >= _LISTED_S or (entry.starts and not all_start) or name in later:
                line = msgspec.structs.replace(entry, quick=0.0, later=name in later)
                self.entries[name] = _steadied(line, old.get(name) or Entry())
        whole = Entry(
            wall=sum(entry.wall for entry in tests.values()),
            cpu=sum(entry.cpu for entry in tests.values()),
            cases=sum(entry.cases for entry in tests.values()),
            starts=all_start,
            quick=sum(each.quick for name, each in quick.items() if name not in later),
            digest=digest or before.digest,
        )
        self.entries[file] = _steadied(whole, before)

    def replace_quick(self, file: str, tests: Mapping[str, Entry]) -> None:
        """Put in what a run of the quick suite has measured of a file that has been run whole:
        which of its tests are later, and what the others take.
        """
        if file not in self.entries:
            return
        quick = {name: each for name, each in tests.items() if each.quick}
        later = later_of(quick)
        for name, entry in quick.items():
            known = self.entries.get(name)
            if name in later:
                line = msgspec.structs.replace(known or entry, quick=0.0, later=True)
                self.entries[name] = line if known else _steadied(line, Entry())
            elif known and known.wall < _LISTED_S and not known.starts:
                del self.entries[name]
            elif known:
                self.entries[name] = msgspec.structs.replace(known, later=False)
        taken_s = sum(each.quick for name, each in quick.items() if name not in later)
        before = self.entries[file]
        quick_s = _steady(taken_s, before.quick)
        self.entries[file] = msgspec.structs.replace(before, quick=quick_s)


def _steadied(new: Entry, old: Entry) -> Entry:
    times = {
        name: _steady(getattr(new, name), getattr(old, name)) for name in ("wall", "cpu", "quick")
    }
    return msgspec.structs.replace(new, **times)


def _steady(new: float, old: float) -> float:
    return old if 2 * new <= 3 * old and 2 * old <= 3 * new else _rounded(new)


def _rounded(seconds: float) -> float:
    """Two digits, tenths at most."""
    return round(seconds, 1) if seconds < 10 else float(f"{seconds:.2g}")


def elapsed_s(entries: Iterable[Entry]) -> float:
    """Seconds that files take together on two cores, three at a time."""
    wall = cpu = 0.0
    for entry in entries:
        wall += entry.wall
        cpu += entry.cpu
    return max(wall / AT_ONCE, cpu / CORES)


def update(
    path: Path,
    files: Mapping[str, tuple[Mapping[str, Entry], str]],
    root: Path = ROOT,
    *,
    of_quick: bool = False,
) -> None:
    """Replace files' entries in a ledger on the disk: what each test took, and the file's digest.
    of_quick: the quick suite was run, of which no more is known.

    Runs that end at the same time take turns; what is no longer there loses its lines.
    """
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        ledger = Ledger.read(path) if path.stat().st_size else Ledger({})
        for name, (tests, digest) in files.items():
            if of_quick:
                ledger.replace_quick(name, tests)
            else:
                ledger.replace(name, tests, digest)
        kept = {
            name: entry for name, entry in ledger.entries.items() if (root / file_of(name)).exists()
        }
        file.seek(0)
        file.truncate()
        file.write(Ledger(kept).dump())
