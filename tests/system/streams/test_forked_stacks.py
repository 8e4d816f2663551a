"""Stacks of the tests' zygote: their processes are what they are where they are programs."""

from __future__ import annotations

import os
import signal

import psutil
import pytest
from tests.helpers.patience import Patience
from tests.helpers.stacks import spareless_stack
from tests.helpers.zygote import Zygote

from slipstream import Stack

pytestmark = pytest.mark.process


def start() -> Stack:
    return spareless_stack("simulated:step_ms=1", http_port=0)


def test_a_stacks_processes_are_its_own_and_end_with_it(session_zygote: Zygote) -> None:
    before = session_zygote.num_forks
    with start() as stack, stack.client() as client:
        assert session_zygote.num_forks == before + 1
        assert len(client.generate("one", max_tokens=3).token_ids) == 3
        pids = stack.pids
        supervisor = pids.pop("supervisor")
        assert psutil.Process(supervisor).ppid() == os.getpid()
        assert os.getsid(supervisor) == os.getpgid(supervisor) == supervisor
        for name, pid in pids.items():
            process = psutil.Process(pid)
            assert (process.ppid(), process.name()) == (supervisor, f"slip:{name}")
            assert (os.getpgid(pid), os.getsid(pid)) == (pid, supervisor)
        family = psutil.Process(supervisor).children(recursive=True)
        assert len(family) > len(pids)  # the worker's tokenizer process
    psutil.wait_procs(family, 0)
    assert not any(each.is_running() for each in family)
    assert not psutil.pid_exists(supervisor)


def test_all_die_with_a_supervisor_that_is_killed_and_none_is_left_to_us() -> None:
    with start() as stack:
        family = psutil.Process(stack.pids["supervisor"]).children(recursive=True)
        os.kill(stack.pids["supervisor"], signal.SIGKILL)
        patience = Patience()
        while any(each.is_running() for each in family):
            patience.wait(family)
        left = psutil.Process().children(recursive=True)
        assert not {each.pid for each in family} & {each.pid for each in left}


def test_a_core_that_is_killed_is_replaced_by_another_fork(session_zygote: Zygote) -> None:
    with start() as stack, stack.client() as client:
        before = stack.pids["core"]
        os.kill(before, signal.SIGKILL)
        assert len(client.generate("one", max_tokens=3).token_ids) == 3
        core = psutil.Process(stack.pids["core"])
        assert core.pid != before
        assert core.cmdline() == psutil.Process(stack.pids["supervisor"]).cmdline()


def test_a_stack_in_another_environment_is_made_of_programs(
    session_zygote: Zygote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOMETHING_THAT_A_MODULE_READS", "1")
    before = session_zygote.num_forks
    with start() as stack:
        assert session_zygote.num_forks == before
        for name, module in (("core", "slipstream_core.main"), ("http", "slipstream.http.main")):
            assert module in psutil.Process(stack.pids[name]).cmdline()
