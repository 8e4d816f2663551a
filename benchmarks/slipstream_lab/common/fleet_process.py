"""A fleet of replicas whose supervisor tells what happens in lines of JSON.

`python -m slipstream_lab.common.fleet_process`, with its config (JSON) as the first line on
standard input. It is what `slipstream serve --replicas` runs; SIGTERM ends it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from slipstream.stack.children.role_statistics import SUPERVISOR
from slipstream.stack.fleet_supervisor import FleetSupervisor
from slipstream.stack.plan.fleet_plan import plan_fleet
from slipstream.stack.settings import settings_from
from slipstream.stack.supervisor_events import StackEvent
from slipstream_ipc.telemetry.logs import configure_logging


class FleetConfig(msgspec.Struct, frozen=True):
    """A fleet to run. settings: as keyword arguments of a `Stack`."""

    settings: dict[str, Any]
    num_replicas: int
    runtime_dir: str


def main() -> int:
    """Run the fleet until a signal ends it; the supervisor's exit code."""
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=FleetConfig)
    settings = settings_from(config.settings)
    configure_logging(SUPERVISOR, settings.log_format)
    plan = plan_fleet(settings, Path(config.runtime_dir), config.num_replicas)
    return FleetSupervisor(plan, _tell).run()


def _tell(event: StackEvent) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(event) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
