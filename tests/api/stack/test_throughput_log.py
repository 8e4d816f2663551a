"""The line on a stack's throughput: when it is logged, and of what it is made."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.helpers.patience import Patience

from slipstream import Stack
from slipstream.stack.children.process import ChildSpec
from slipstream.stack.children.role_statistics import RoleStatistics
from slipstream.stack.children.roles import Role
from slipstream.stack.settings import SHORT_LIVED, settings_from
from slipstream.stack.throughput_log import ThroughputLog
from slipstream_ipc.telemetry.statistics import (
    CoreCounters,
    CoreGauges,
    CoreNumbers,
    WorkerCounters,
    WorkerNumbers,
)


class Played:
    """A child that reports what the test sets."""

    pid = 2**22 + 1
    last_beat_at = available_at = None

    def __init__(self, name: str) -> None:
        self.name = name
        self.numbers: object = None

    def activate(self, _activation: Any) -> None:
        """It serves."""


class Harness:
    """A log over a played core and a played worker."""

    def __init__(self, caplog: pytest.LogCaptureFixture, interval_s: float) -> None:
        caplog.set_level("INFO")
        self._caplog = caplog
        spec = [ChildSpec(name, ("nothing",), msgspec.Raw(b"{}")) for name in ("core", "worker")]
        self.roles = {each.name: Role(each, 10, 300.0) for each in spec}
        self.statistics = RoleStatistics(self.roles)
        self.log = ThroughputLog(self.statistics, interval_s)
        self.core, self.worker = self.start("core"), self.start("worker")

    def start(self, name: str) -> Any:
        child: Any = Played(name)
        self.roles[name].activate(child)
        return child

    def counted(self, prompt: int, sampled: int, running: int = 0, **more: int) -> None:
        gauges = CoreGauges(num_running=running, num_waiting=2 * running, num_blocks=8)
        gauges = msgspec.structs.replace(gauges, num_used_blocks=running)
        self.core.numbers = CoreNumbers(gauges, CoreCounters(num_sampled_tokens=sampled, **more))
        self.worker.numbers = WorkerNumbers(counters=WorkerCounters(num_prompt_tokens=prompt))

    def lines(self, *moments: float) -> list[str]:
        """What is logged over ticks at these moments."""
        self._caplog.clear()
        for now in moments:
            self.log.tick(now)
        return self._caplog.messages


def test_a_line_has_the_rates_since_the_last_one(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness(caplog, 5.0)
    harness.counted(0, 0)
    assert harness.lines(100.0) == []
    harness.counted(30, 20, running=2, num_prefix_queries=8, num_prefix_hits=2)
    assert harness.lines(101.0, 104.9) == []
    assert harness.lines(105.0, 106.0) == [
        (
            "Avg prompt throughput: 6.0 tokens/s, Avg generation throughput: 4.0 tokens/s, "
            "Running: 2 reqs, Waiting: 4 reqs, KV cache usage: 25.0%, Prefix cache hit rate: 25.0%"
        )
    ]
    harness.counted(30, 40, running=1, num_prefix_queries=8, num_prefix_hits=2)
    assert harness.lines(115.0) == [
        (
            "Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 2.0 tokens/s, "
            "Running: 1 reqs, Waiting: 2 reqs, KV cache usage: 12.5%, Prefix cache hit rate: 0.0%"
        )
    ]


def test_an_idle_stack_is_silent_and_its_idle_time_does_not_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    harness = Harness(caplog, 5.0)
    harness.counted(10, 10)
    assert len(harness.lines(100.0)) == 1, "tokens that came before the first look"
    assert harness.lines(106.0, 120.0, 500.0) == []
    harness.counted(20, 60)  # a burst, over before it is seen
    assert harness.lines(501.0) == []
    (line,) = harness.lines(505.0)
    assert "generation throughput: 10.0 tokens/s, Running: 0 reqs" in line
    assert harness.lines(510.0, 515.0) == []


def test_waiting_requests_are_work_though_no_token_comes(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness(caplog, 5.0)
    harness.counted(0, 0)
    harness.lines(100.0)
    harness.counted(0, 0, running=1)
    assert len(harness.lines(106.0, 107.0, 111.0, 112.0)) == 2


def test_a_worker_that_is_replaced_makes_no_rate_negative(
    caplog: pytest.LogCaptureFixture,
) -> None:
    harness = Harness(caplog, 5.0)
    harness.counted(1000, 1000, running=1)
    harness.lines(100.0)
    old = harness.worker
    harness.statistics._usages[old.pid] = harness.statistics._usage_of_child(old)
    harness.statistics.note_exit(old)
    harness.roles["worker"].active = None
    harness.worker = harness.start("worker")
    harness.counted(50, 1050, running=1)
    (line,) = harness.lines(110.0)
    assert "prompt throughput: 5.0 tokens/s, Avg generation throughput: 5.0 tokens/s" in line


def test_an_interval_of_zero_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness(caplog, 0.0)
    harness.counted(9, 9, running=1)
    assert harness.lines(100.0, 1000.0) == []
    assert settings_from(SHORT_LIVED).log_stats_interval_s == 0.0


def test_a_stack_with_work_logs_it(capfd: pytest.CaptureFixture[str]) -> None:
    settings: Any = {**SHORT_LIVED, "log_stats_interval_s": 0.01}
    with Stack("simulated:step_ms=1", verbose=True, **settings) as stack, stack.client() as client:
        client.generate([1, 2, 3], max_tokens=30)
        patience, err = Patience(), ""
        while "tokens/s, Running: " not in err:
            patience.check(err)
            stack.next_event(0.05)
            err += capfd.readouterr().err
    (line, *_) = [line for line in err.splitlines() if "tokens/s, Running: " in line]
    assert " supervisor INFO Avg prompt throughput: " in line
