"""The processes of ranks, seen from their core."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil
from tests.helpers.patience import Patience

from slipstream_core.ranks.processes import StoppedProcesses


def test_one_that_stays_stopped_is_found_while_this_process_runs() -> None:
    processes = [
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2)
    ]
    try:
        stopped = StoppedProcesses([each.pid for each in processes], timeout_s=3.0)

        def found(begin: float) -> list[float]:
            """When they count as stopped, with a beat every half second."""
            return [at for at in (begin + 0.5 * turn for turn in range(10)) if stopped.look(at)]

        assert found(100.0) == []
        processes[1].send_signal(signal.SIGSTOP)
        patience, process = Patience(), psutil.Process(processes[1].pid)
        while process.status() != psutil.STATUS_STOPPED:
            patience.wait()
        assert found(105.0) == [108.0, 108.5, 109.0, 109.5]
        assert found(200.0) == [203.5, 204.0, 204.5], "this process was stopped, too"
        processes[1].send_signal(signal.SIGCONT)
        while process.status() == psutil.STATUS_STOPPED:
            patience.wait()
        assert found(205.0) == []
    finally:
        for each in processes:
            each.kill()
            each.communicate()
