"""The fork server: what it forks is the supervisor's, and ends with it but not with the server."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
import pytest
from tests.helpers.patience import PATIENCE_S, Patience

# A supervisor in small: it starts a server, forks one child, and does what it is told.
PARENT = """
import os, select, signal, sys
import msgspec
from slipstream.stack.children.fork_client import ForkClient
from slipstream.stack.children.process import Child, ChildSpec
from slipstream_ipc.fork_server import Preload

def imported(server):
    select.select([server], [], [])
    server.read()

sys.path.insert(0, os.getcwd())
os.environ["PYTHONPATH"] = os.getcwd()
config = msgspec.Raw(b'{"folder": "' + os.getcwd().encode() + b'"}')
server = ForkClient([Preload("forked_child", config)])
spec = ChildSpec("child", (sys.executable, "-m", "forked_child"), config, forks="forked_child")
"""
CHILD = """
import json, os, select, sys
from slipstream_ipc.messages import Status
from slipstream_ipc.process import report, run_child, start_child

PRELOADED = []

def preload(config):
    PRELOADED.append(os.getpid())

def main():
    config, stop = start_child("child", dict)
    said = {"ppid": os.getppid(), "pgid": os.getpgid(0), "pid": os.getpid(),
            "preloaded": PRELOADED, "folder": config["folder"]}
    report(Status(last_words=json.dumps(said)))
    select.select([stop], [], [])  # unlike pause(), it misses no signal that came before
    return 0

if __name__ == "__main__":
    run_child(main)
"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[[str], list[str]]:
    (tmp_path / "forked_child.py").write_text(CHILD)

    def run(program: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-P", "-c", PARENT + program],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        return done.stdout.splitlines()

    return run


SAID = """
def said_by(child):
    while not child._last_words:
        select.select([child.status], [], [])
        child.read_status()
    return msgspec.json.decode(child._last_words)
"""


def test_a_forked_child_is_the_supervisors_own(run: Callable[[str], list[str]]) -> None:
    lines = run(
        SAID
        + """
assert server.is_awaited("forked_child")
imported(server)
assert not server.is_awaited("forked_child")
child = Child(spec, None, server)
said = said_by(child)
print(said["ppid"] == os.getpid(), said["pgid"] == said["pid"] == child.pid)
print(said["preloaded"] == [server.pid], said["folder"] == os.getcwd())
server.close()
print(child.has_ended())
child.terminate()
os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
print(child.reap().how.partition(" (")[0])
"""
    )
    assert lines == ["True True", "True True", "False", "exit code 0"]


def test_a_session_of_its_own_and_a_whole_environment(run: Callable[[str], list[str]]) -> None:
    """As a process that starts supervisors asks for: it is no reaper of what these leave."""
    lines = run(
        """
server.close()
server = ForkClient([Preload("forked_child", config)], stays_reaper=False)
imported(server)
import ctypes
is_reaper = ctypes.c_int(1)
def reaps():
    ctypes.CDLL(None).prctl(37, ctypes.byref(is_reaper), 0, 0, 0)
    return is_reaper.value
ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)
stdin, ours = os.pipe()
os.set_inheritable(ours, False)
environment = {"SLIPSTREAM_PARENT_PID": str(os.getpid()), "ONE": "1"}
given = {"is_whole": True, "leads_session": True}
child = server.fork("forked_child", environment, {0: stdin}, **given)
with open(f"/proc/{child.pid}/stat") as stat:
    fields = stat.read().rpartition(")")[2].split()
print(int(fields[1]) == os.getpid(), os.getsid(child.pid) == os.getpgid(child.pid) == child.pid)
print(reaps())
os.close(stdin)
child.kill()  # it waits for its config
print(child.wait())
os.close(ours)
server.close()
"""
    )
    assert lines == ["True True", "0", "-9"]


def test_an_environment_that_is_not_utf_8_is_left_to_programs(
    run: Callable[[str], list[str]],
) -> None:
    lines = run(
        """
imported(server)
from slipstream.stack.children.fork_client import ForkRefusedError
os.environb[b"LATIN_1"] = b"caf\\xe9"
try:
    server.fork("forked_child", os.environ, {0: 0}, is_whole=True, leads_session=True)
except ForkRefusedError:
    print("refused")
child = Child(spec, None, server)
print(os.getpgid(child.pid) == child.pid)
child.kill()
child.reap()
server.close()
"""
    )
    assert lines == ["refused", "True"]


HERE = """
server.close()
import forked_child
forked_child.PRELOADED.append(os.getpid())
"""


def test_a_supervisor_that_has_imported_a_module_forks_itself(
    run: Callable[[str], list[str]],
) -> None:
    lines = run(
        SAID
        + HERE
        + """
child = Child(spec)
print(os.getpgid(child.pid) == child.pid)
said = said_by(child)
print(said["ppid"] == os.getpid(), said["pgid"] == said["pid"] == child.pid)
print(said["preloaded"] == [os.getpid()], said["folder"] == os.getcwd())
print(os.readlink(f"/proc/{child.pid}/fd/1") == os.readlink("/proc/self/fd/2"))
child.terminate()
os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
print(child.reap().how.partition(" (")[0])
"""
    )
    assert lines == ["True", "True True", "True True", "True", "exit code 0"]


def test_a_fork_of_the_supervisor_dies_with_it(run: Callable[[str], list[str]]) -> None:
    lines = run(
        SAID
        + HERE
        + """
child = Child(spec)
print(said_by(child)["pid"], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    patience = Patience()
    while psutil.pid_exists(int(lines[0])):
        patience.wait("the child lives on")


def test_a_supervisor_with_threads_starts_a_program(run: Callable[[str], list[str]]) -> None:
    lines = run(
        SAID
        + HERE
        + """
import threading
end = threading.Event()
threading.Thread(target=end.wait).start()
child = Child(spec)
print(said_by(child)["preloaded"])
child.kill()
print(child.reap().how)
end.set()
"""
    )
    assert lines == ["[]", "signal SIGKILL"]


def test_a_child_that_is_not_imported_yet_is_a_program(run: Callable[[str], list[str]]) -> None:
    lines = run(
        SAID
        + """
child = Child(spec, None, server)
print(said_by(child)["preloaded"])
child.kill()
print(child.reap().how)
server.close()
"""
    )
    assert lines == ["[]", "signal SIGKILL"]


def test_a_module_that_cannot_be_imported_is_left_to_programs(
    run: Callable[[str], list[str]], tmp_path: Path
) -> None:
    (tmp_path / "forked_child.py").write_text(
        "import sys\nif 'fork_server' in sys.argv[0]: raise OSError('not here')\n" + CHILD
    )
    lines = run(
        SAID
        + """
imported(server)
child = Child(spec, None, server)
print(said_by(child)["preloaded"])
child.kill()
child.reap()
server.close()
"""
    )
    assert lines == ["[]"]


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_child_is_a_program_where_the_server_is_dead_or_stopped(
    run: Callable[[str], list[str]], how: str
) -> None:
    lines = run(
        SAID
        + f"""
from slipstream.stack.children import fork_client
imported(server)
server._socket.settimeout(0.2)
os.kill(server.pid, signal.{how})
child = Child(spec, None, server)
print(said_by(child)["preloaded"])
try:
    while True: imported(server)
except OSError:
    print("noticed")
child.kill()
child.reap()
server.close()
"""
    )
    assert lines == ["[]", "noticed"]


LATE = """
import os, sys
if any("slipstream_ipc.fork_server" in each for each in sys.orig_argv):
    write = os.write
    def write_and_die(fd, data):
        write(fd, data)
        if data == b"\\0":  # the fork goes on from here
            os.kill(os.getpid(), 9)
    os.write = write_and_die
"""


def test_a_server_that_dies_when_it_has_forked_leaves_no_second_child(
    run: Callable[[str], list[str]], tmp_path: Path
) -> None:
    """The fork and the program that is started instead would share one configuration."""
    (tmp_path / "sitecustomize.py").write_text(LATE)
    lines = run(
        SAID
        + """
imported(server)
child = Child(spec, None, server)
other = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT).si_pid
while other in (server.pid, child.pid):
    os.waitpid(other, 0)
    other = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT).si_pid
said = said_by(child)
print(said["pid"] == child.pid != other, said["preloaded"], child.error)
child.kill()
print(child.reap().how)
"""
    )
    assert lines == ["True [] ", "signal SIGKILL"]


FULL = """
import os, sys
if any("slipstream_ipc.fork_server" in each for each in sys.orig_argv):
    fork, server = os.fork, os.getpid()
    def fork_once():
        if os.getpid() != server and not os.path.exists("was_full"):
            open("was_full", "w").close()
            raise BlockingIOError("no processes left")
        return fork()
    os.fork = fork_once
"""


def test_a_fork_that_fails_half_way_leaves_one_server_which_forks_the_next(
    run: Callable[[str], list[str]], tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(FULL)
    lines = run(
        SAID
        + """
imported(server)
child = Child(spec, None, server)
print(said_by(child)["preloaded"])
child.kill()
child.reap()
child = Child(spec, None, server)
print(said_by(child)["preloaded"] == [server.pid])
child.kill()
child.reap()
server.close()
from slipstream.stack.children.process_usage import children_of
print(children_of(os.getpid()))
"""
    )
    assert lines == ["[]", "True", "[]"]


@pytest.mark.parametrize("is_forked", [False, True])
def test_a_child_that_ends_as_it_is_told_to_is_left_to_be_reaped(
    run: Callable[[str], list[str]], is_forked: bool
) -> None:
    """A signal to a whole group ends children before the supervisor passes it on."""
    lines = run(
        SAID
        + f"""
imported(server)
child = Child(spec, None, server if {is_forked} else None)
said_by(child)
os.kill(child.pid, signal.SIGTERM)
os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
child.terminate()
print(child.has_ended(), child.reap().how.partition(" (")[0])
server.close()
"""
    )
    assert lines == ["True exit code 0"]


def test_nothing_outlives_the_supervisor(run: Callable[[str], list[str]]) -> None:
    lines = run(
        SAID
        + """
imported(server)
child = Child(spec, None, server)
said_by(child)
print(child.pid, server.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    for pid in map(int, lines[0].split()):
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        assert select.select([pidfd], [], [], PATIENCE_S)[0], psutil.Process(pid)
        os.close(pidfd)


def test_a_server_with_threads_forks_nothing(
    run: Callable[[str], list[str]], tmp_path: Path
) -> None:
    thread = "import threading; threading.Thread(target=threading.Event().wait).start()"
    program = CHILD.replace("    PRELOADED.append", f"    {thread}\n    PRELOADED.append")
    (tmp_path / "forked_child.py").write_text(program)
    lines = run(
        SAID
        + """
imported(server)
child = Child(spec, None, server)
print(said_by(child)["preloaded"])
child.kill()
child.reap()
server.close()
"""
    )
    assert lines == ["[]"]


def test_what_a_request_says_is_what_the_server_reads() -> None:
    from slipstream_ipc.fork_server import Fork, ForkServerRequest

    request = Fork("module", {"NAME": "value"}, (0, 7))
    encoded = msgspec.json.encode(request)
    assert msgspec.json.decode(encoded, type=ForkServerRequest) == request
