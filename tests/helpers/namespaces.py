"""Two machines on this one: network namespaces with a link between them."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.helpers.processes import started

NEAR = "near"  # this namespace's end of the link

_TOOLS = ("ip", "unshare", "nsenter", "ss")


def skip_without_namespaces(what: str) -> None:
    """Skip the test, loudly, where no namespaces with links can be made. what: is not tested."""
    making = "ip link add near type veth peer name far"
    if all(map(shutil.which, _TOOLS)):
        done = subprocess.run(["unshare", "-n", *making.split()], capture_output=True, check=False)
        if done.returncode == 0:
            return
    why = f"no network namespaces with links can be made here: {what} is NOT tested"
    warnings.warn(why, stacklevel=2)
    pytest.skip(why)


def run(command: str) -> str:
    """Run a command that succeeds; what it prints."""
    done = subprocess.run(shlex.split(command), check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


@contextmanager
def linked_machine(here: str, there: str) -> Iterator[str]:
    """A namespace beside this process's own, which it may change; the words that run a command in
    it. here, there: the addresses of both ends of the link.
    """
    run("ip link set lo up")
    waiting = ["unshare", "-n", "sh", "-c", "echo; exec sleep 10000"]
    with started(waiting, stdout=subprocess.PIPE) as beside:
        assert beside.stdout is not None
        beside.stdout.readline()  # it is in its namespace
        inside = f"nsenter -t {beside.pid} -n"
        run(f"ip link add {NEAR} type veth peer name far netns {beside.pid}")
        run(f"ip addr add {here}/24 dev {NEAR}")
        run(f"ip link set {NEAR} up")
        for command in ("lo up", "far up"):
            run(f"{inside} ip link set {command}")
        run(f"{inside} ip addr add {there}/24 dev far")
        yield inside
