"""Forks that go on as programs: what they keep of their parent, how they end."""

from __future__ import annotations

import subprocess
import sys

import pytest

PREFACE = """
import os, signal, subprocess, sys, threading
from slipstream_ipc.child import fork
from slipstream_ipc.forked_process import CannotForkError
"""


def run(program: str) -> list[str]:
    """The lines that a program of its own writes: the tests' process has threads."""
    done = subprocess.run(
        [sys.executable, "-c", PREFACE + program], capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def test_a_fork_has_what_it_is_given_and_nothing_else() -> None:
    lines = run("""
os.environ["SECRET"] = "kept from it"
own, given = os.memfd_create("own"), os.memfd_create("given")
reading, writing = os.pipe()
os.write(given, b"text"); os.lseek(given, 0, 0)
sys.excepthook = None
def main():
    said = f"{sys.stdin.read()} {os.environ['NAME']} {os.environ.get('SECRET')} "
    said += f"{[fd for fd in range(64) if os.path.exists(f'/proc/self/fd/{fd}')]}"
    os.write(9, said.encode())
    return 3
child = fork(main, {0: given, 9: writing}, {"NAME": "child"}, unset=("SECRET",))
os.close(writing)
print(os.read(reading, 1000).decode(), child.wait(10.0), child.ended())
""")
    assert lines == ["text child None [0, 1, 2, 9] 3 3"]


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("raise SystemExit(7)", 7),
        ("raise SystemExit('words')", 1),
        ("raise ValueError('none may reach the caller')", 1),
        ("os.kill(os.getpid(), signal.SIGTERM)", -15),
    ],
)
def test_however_a_fork_ends_it_returns_to_no_caller(end: str, code: int) -> None:
    lines = run(f"""
signal.signal(signal.SIGTERM, lambda *_: None)  # not the child's
def main():
    {end}
    return 0
print(fork(main, {{}}, {{}}).wait())
""")
    assert lines == [str(code)]


def test_a_wait_has_a_limit() -> None:
    lines = run("""
def main():
    signal.pause()
    return 0
child = fork(main, {}, {})
try:
    child.wait(0.0)
except subprocess.TimeoutExpired:
    print(child.ended())
child.terminate()
print(child.wait(), child.wait(), child.ended())
child.kill()
""")
    assert lines == ["None", "-15 -15 -15"]


def test_two_threads_may_wait_for_one_end() -> None:
    lines = run("""
import threading
def main():
    signal.pause()
    return 0
child = fork(main, {}, {})
codes = []
waiting = [threading.Thread(target=lambda: codes.append(child.wait())) for _ in range(4)]
for each in waiting:
    each.start()
while child.ended() is None:
    child.terminate()
for each in waiting:
    each.join()
print(codes, child.wait(1.0))
""")
    assert lines == ["[-15, -15, -15, -15] -15"]


def test_no_signal_reaches_a_fork_while_it_has_our_handlers() -> None:
    """They would write to descriptors that are still ours as well."""
    lines = run("""
signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"handled\\n"))
really_fork = os.fork
def fork_and_signal():
    pid = really_fork()
    if pid == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    return pid
os.fork = fork_and_signal
child = fork(lambda: 0, {}, {})
print(child.wait(), signal.pthread_sigmask(signal.SIG_BLOCK, ()))
""")
    assert lines == ["-15 set()"]


def test_a_process_with_many_descriptors_waits_for_a_fork() -> None:
    lines = run("""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
def main():
    signal.pause()
    return 0
child = fork(main, {}, {})
held = [os.dup(0) for _ in range(1100)]  # connections of a worker
try:
    child.wait(0.0)
except subprocess.TimeoutExpired:
    print("waited")
child.terminate()
print(child.wait(10.0))
""")
    assert lines == ["waited", "-15"]


def test_what_a_fork_prints_is_written_when_it_ends() -> None:
    lines = run("""
def main():
    sys.stdout = open(1, "w", closefd=False)  # with a buffer, whatever the environment says
    sys.stdout.write("said\\n")
    return 0
print(fork(main, {}, {}).wait(), file=sys.stderr)
""")
    assert lines == ["said"]


def test_a_process_with_threads_is_not_forked() -> None:
    lines = run("""
is_over = threading.Event()
thread = threading.Thread(target=is_over.wait)
thread.start()
try:
    fork(lambda: 0, {}, {})
except CannotForkError as error:
    print(error)
is_over.set(); thread.join()
""")
    assert lines == ["it has 2 threads"]
