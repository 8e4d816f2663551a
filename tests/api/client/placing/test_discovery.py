"""Where the members of a fleet are."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from threading import Event, Thread

import pytest
from tests.helpers.patience import Patience

from slipstream.client.endpoints import check_member
from slipstream.client.placing.discovery import (
    DnsMembers,
    MemberSource,
    RayMembers,
    member_source,
    names_fleet,
)
from slipstream_ipc.errors import BadRequest
from slipstream_ipc.transport.curve import Access

check = partial(check_member, access=Access(insecure=True))


@pytest.mark.parametrize(
    ("address", "is_fleet"),
    [
        ("ipc:///a", False),
        ("tcp://a:1", False),
        ("ipc:///a,ipc:///b", True),
        ("file:/list", True),
        ("dns://name:1", True),
        ("ray://name", True),
    ],
)
def test_which_addresses_name_a_fleet(address: str, is_fleet: bool) -> None:
    assert names_fleet(address) is is_fleet


def test_a_list_without_repetitions() -> None:
    source = member_source("ipc:///a, tcp://127.0.0.1:5,ipc:///a", check)
    assert source.addresses(0.0) == ("ipc:///a", "tcp://127.0.0.1:5")


@pytest.mark.parametrize(
    "address",
    [
        "ipc:///a,",
        "ipc:///a,http://b",
        "tcp://10.0.0.1:5,ipc:///a",  # insecure is for this machine alone
        ",".join([f"ipc:///{number}" for number in range(65)]),
        "file:/nowhere",
        "dns://localhost",
        "dns://localhost:0",
        "dns://10.0.0.1:5",
    ],
)
def test_what_is_refused(address: str) -> None:
    with pytest.raises(BadRequest):
        member_source(address, check)


def write(path: Path, text: str) -> None:
    """Replace a file as editors do."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


def test_a_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "members"
    write(path, "ipc:///a  # the first\n\n# none\nipc:///b\n")
    source = member_source(f"file:{path}", check)
    assert source.addresses(0.0) == ("ipc:///a", "ipc:///b")
    write(path, "ipc:///c\n")
    assert source.addresses(1.0) == ("ipc:///c",)


def test_a_file_that_cannot_be_read_is_named_with_what_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(BadRequest) as raised:
        member_source(f"file:{tmp_path}/none", check)
    assert "an address to a line" in str(raised.value)
    assert "No such file" in str(raised.value)
    assert "Errno" not in str(raised.value)


def test_a_pipe_is_no_file_of_addresses(tmp_path: Path) -> None:
    """It would be waited for."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(BadRequest, match="not of another kind"):
            member_source(f"file:{path}", check)
    path = tmp_path / "members"
    write(path, "ipc:///a\n")
    source = member_source(f"file:{path}", check)
    os.replace(tmp_path / "pipe", path)
    assert source.addresses(1.0) == ("ipc:///a",)


@pytest.mark.parametrize(
    "fault",
    [
        "http://x\n",
        None,
        "\udcff",
        "",  # as it is while it is written in place
        "# none\n",
        "ipc:///c\n" + "#" * 2**16,  # too long, so that an address may be cut
    ],
)
def test_a_file_that_cannot_be_used_changes_nothing(tmp_path: Path, fault: str | None) -> None:
    path = tmp_path / "members"
    write(path, "ipc:///a\n")
    source = member_source(f"file:{path}", check)
    if fault is None:
        path.unlink()
    else:
        path.write_bytes(fault.encode("utf-8", "surrogateescape"))
    assert source.addresses(1.0) == ("ipc:///a",)
    write(path, "ipc:///b\n")
    assert source.addresses(2.0) == ("ipc:///b",)


def test_a_fault_of_a_file_is_logged_once(tmp_path: Path, caplog) -> None:
    """A source is asked several times a second."""
    path = tmp_path / "members"
    write(path, "ipc:///a\n")
    source = member_source(f"file:{path}", check)
    for content in ("http://x\n", "http://y\n", "ipc:///b\n", "http://y\n"):
        write(path, content)
        for second in range(10):
            source.addresses(float(second))
    faults = [record.getMessage().partition(", allowed")[0] for record in caplog.records]
    assert [fault[-10:-1] for fault in faults] == ["'http://x", "'http://y", "'http://y"]
    path.unlink()
    for second in range(10):
        source.addresses(float(second))
    assert len(caplog.records) == 4


def until(source: MemberSource, wanted: Sequence[str]) -> None:
    patience, now = Patience(), 0.0
    while source.addresses(now) != tuple(wanted):
        now += 10.0
        patience.check()


def test_a_name_is_resolved_again() -> None:
    answers = [["127.0.0.2", "127.0.0.1"], OSError("no such name"), [], ["::1"]]

    def resolve(host: str, port: int) -> Sequence[str]:
        assert (host, port) == ("localhost", 5)
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, OSError):
            raise answer
        return answer  # type: ignore[return-value]

    source = DnsMembers("dns://localhost:5", check, resolve)
    until(source, ["tcp://127.0.0.1:5", "tcp://127.0.0.2:5"])
    until(source, ["tcp://[::1]:5"])
    assert len(answers) == 1


def test_one_resolution_at_a_time() -> None:
    may_end, num = Event(), 0

    def resolve(host: str, port: int) -> Sequence[str]:
        nonlocal num
        num += 1
        assert may_end.wait(Patience().left_s)
        return ["127.0.0.1"]

    source = DnsMembers("dns://localhost:5", check, resolve)
    for second in range(100):
        assert source.addresses(10.0 * second) == ()
    assert num <= 1
    may_end.set()
    until(source, ["tcp://127.0.0.1:5"])


def test_a_name_that_cannot_be_encoded_leaves_the_members_as_they_were(caplog) -> None:
    members = DnsMembers(f"dns://{'a' * 70}.example:7001", lambda _: None)
    members._ask()
    assert members.addresses(0.0) == ()
    members._ask()
    [record] = caplog.records
    assert "stay as they were" in record.getMessage()


def test_a_resolution_for_which_there_is_no_thread_is_tried_again(
    caplog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Thread) -> None:
        raise RuntimeError("can't start new thread")

    source = DnsMembers("dns://localhost:5", check, lambda *_: ["127.0.0.1"])
    with monkeypatch.context() as patched:
        patched.setattr(Thread, "start", refuse)
        for second in range(10):
            assert source.addresses(10.0 * second) == ()
    [record] = caplog.records
    assert "can't start new thread" in record.getMessage()
    until(source, ["tcp://127.0.0.1:5"])


# ---- a process that knows the members ------------------------------------------------------------

# says one line after another, each in a life of its own, the last one for ever
TELLER = """
import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
path, name = sys.argv[1:]
assert name == "demo"
lines = open(path).read().splitlines()
with open(path, "w") as file:
    file.write("\\n".join(lines[1:] or lines[-1:]))
print(lines[0], flush=True)
if len(lines) == 1:
    threading.Event().wait()
"""


def teller(path: Path, *said: object) -> RayMembers:
    """The source of a fleet whose process says this, ends, and is started again."""
    path.write_text("\n".join(json.dumps(each) if each != "}" else "}" for each in said))
    return RayMembers("ray://demo", check, [sys.executable, "-c", TELLER, str(path)])


def test_a_process_tells_the_members_and_is_started_again(tmp_path: Path, caplog) -> None:
    said = (["tcp://127.0.0.1:1"], "Ray is away", [], "}", ["http://x"], ["tcp://127.0.0.1:2"])
    source = teller(tmp_path / "lines", *said)
    assert source.addresses(0.0) == ()
    with caplog.at_level(logging.WARNING):
        seen = set()
        patience = Patience()
        while ("tcp://127.0.0.1:2",) not in seen:
            seen.add(source.addresses(0.0))
            patience.wait(seen)
    assert seen <= {(), ("tcp://127.0.0.1:1",), ("tcp://127.0.0.1:2",)}
    for why in ("Ray is away", "it has none", "http://x", "no list of members"):
        assert why in caplog.text
    process = source._feed._process
    assert process is not None
    source.close()
    assert process.returncode == 0
    source.close()


def test_a_process_for_which_there_is_no_thread_is_tried_again(
    tmp_path: Path, caplog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Thread) -> None:
        raise RuntimeError("can't start new thread")

    source = teller(tmp_path / "lines", ["tcp://127.0.0.1:1"])
    with monkeypatch.context() as patched:
        patched.setattr(Thread, "start", refuse)
        for second in range(10):
            assert source.addresses(10.0 * second) == ()
        other = teller(tmp_path / "others", [])
        assert other.addresses(0.0) == ()
        other.close()  # there is nothing to wait for
    for record in caplog.records:
        assert "stay as they were: can't start new thread" in record.getMessage()
    assert len(caplog.records) == 2
    until(source, ["tcp://127.0.0.1:1"])
    source.close()


def test_a_source_that_is_not_asked_starts_nothing(tmp_path: Path) -> None:
    source = teller(tmp_path / "lines", [])
    source.close()
    assert source._feed._process is None


def test_a_process_that_cannot_be_started_changes_nothing(tmp_path: Path, caplog) -> None:
    source = RayMembers("ray://demo", check, [str(tmp_path / "none")])
    patience = Patience()
    while "cannot be started" not in caplog.text:
        assert source.addresses(0.0) == ()
        patience.wait()
    source.close()


@pytest.mark.parametrize("name", ["", "a b", "a/b", "-a", "127.0.0.1:10001", "a" * 65])
def test_a_fleet_on_ray_has_a_plain_name(name: str) -> None:
    with pytest.raises(BadRequest, match="ray://NAME"):
        RayMembers(f"ray://{name}", check, ["true"])


def test_ray_has_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.client.placing.discovery.has_ray", lambda: False)
    with pytest.raises(BadRequest, match=r"pip install 'slipstream\[ray\]'"):
        member_source("ray://demo", check)


@pytest.mark.parametrize("missing", ["ray", "slipstream_ray"])
def test_ray_is_of_no_use_without_what_asks_it(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines of a cluster have Ray, whatever else they have."""

    def find(name: str) -> ModuleSpec | None:
        return None if name == missing else ModuleSpec(name, None, origin=f"{name}/__init__.py")

    monkeypatch.setattr("importlib.util.find_spec", find)
    with pytest.raises(BadRequest, match=r"pip install 'slipstream\[ray\]'"):
        member_source("ray://demo", check)


def test_it_begins_until_the_process_has_said_something(tmp_path: Path) -> None:
    path = tmp_path / "go"
    os.mkfifo(path)
    says_later = "import sys; print(open(sys.argv[1]).read(), flush=True); sys.stdin.read()"
    source = RayMembers("ray://demo", check, [sys.executable, "-c", says_later, str(path)])
    assert not source.is_beginning
    assert source.addresses(0.0) == ()
    assert source.is_beginning
    path.write_text('["ipc:///a"]')
    patience = Patience()
    while not source.addresses(0.0):
        patience.wait()
    assert not source.is_beginning
    source.close()
