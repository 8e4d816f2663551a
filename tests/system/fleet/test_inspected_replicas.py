"""`/metrics?replicas=all` of a front over several replicas."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from tests.helpers.http_front import Front, Raw
from tests.helpers.patience import Patience
from tests.helpers.stacks import spareless_stack

from slipstream import Stack


@pytest.fixture
def stacks() -> Iterator[list[Stack]]:
    with ExitStack() as opened:
        yield [opened.enter_context(spareless_stack("simulated:step_ms=1")) for _ in range(2)]


def value(text: str, name: str, **labels: str) -> float | None:
    """The sample of a metric with these labels."""
    for line in text.splitlines():
        if line.startswith(f"slipstream:{name}{{"):
            found = dict(re.findall(r'(\w+)="([^"]*)"', line))
            if labels.items() <= found.items():
                return float(line.rpartition(" ")[2])
    return None


@pytest.mark.process
def test_metrics_of_all_replicas(stacks: list[Stack]) -> None:
    addresses = [stack.address for stack in stacks]
    for num, stack in enumerate(stacks):
        with stack.client() as client:
            client.generate([1, 2, 3], max_tokens=10 * (num + 1), ignore_eos=True)
    front = Front(",".join(addresses), is_router=True)
    try:
        with Raw(front.port) as raw:
            patience = Patience()
            while set(raw.get("/health").json["replicas"].values()) != {"serving"}:
                patience.wait()

            def tokens() -> list[float | None]:
                text = raw.get("/metrics?replicas=all").body.decode()
                where = [{"replica": address, "process": "core"} for address in addresses]
                return [value(text, "generation_tokens_total", **each) for each in where]

            while tokens() != [10.0, 20.0]:
                patience.wait()
            plain = raw.get("/metrics").body.decode()
            assert value(plain, "generation_tokens_total", process="core") is None
            os.kill(stacks[1].pids["worker"], signal.SIGSTOP)
            patience, inspected = Patience(), [1.0, 1.0]
            while inspected != [1.0, 0.0]:  # what was told before is shown for a second
                patience.wait()
                text = raw.get("/metrics?replicas=all").body.decode()
                inspected = [value(text, "replica_inspected", replica=each) for each in addresses]
            os.kill(stacks[1].pids["worker"], signal.SIGCONT)
            names = [value(text, "process_up", replica=each) for each in addresses]
            assert names == [1.0, None]
    finally:
        front.stop()
