"""What a benchmark does when a process of its stack ends."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys

import pytest
from tests.helpers.patience import PATIENCE_S
from tests.helpers.processes import started

from slipstream.errors import EngineError
from slipstream_lab.common.simulated_stack import RunningStack, while_all_run

READS = [sys.executable, "-c", "import sys; sys.exit(len(sys.stdin.read()))"]


def running(process: subprocess.Popen[str]) -> RunningStack:
    return RunningStack("", {"core": process.pid})


def test_the_result_comes_while_all_processes_run():
    async def work() -> int:
        return 5

    with started(READS, stdin=subprocess.PIPE, text=True) as process:
        assert asyncio.run(while_all_run(running(process), work())) == 5


@pytest.mark.parametrize("how", ["exited with code 3", "was ended by SIGKILL"])
def test_a_process_that_ends_ends_the_wait_and_is_named(how):
    with started(READS, stdin=subprocess.PIPE, text=True) as process:

        async def waited() -> None:
            async def work() -> None:
                if "SIGKILL" in how:
                    process.send_signal(signal.SIGKILL)
                else:
                    process.stdin.write("abc")
                    process.stdin.close()
                await asyncio.Event().wait()

            await asyncio.wait_for(while_all_run(running(process), work()), PATIENCE_S)

        with pytest.raises(EngineError, match=f"core {how} while it was measured"):
            asyncio.run(waited())
        assert process.wait(PATIENCE_S) in (3, -signal.SIGKILL)
