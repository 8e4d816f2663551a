"""The ranks of one machine of a replica, in the process of a Ray actor.

- They wait for the replica's core, and for the next one after each core's end, as those of
  `slipstream serve --node-rank` do.
- When they cannot go on, the process ends after a pause: Ray starts the actor again.
- When the process is killed, the ranks end with it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

import msgspec

from slipstream.errors import SlipstreamError
from slipstream.stack.plan.node_plan import plan_node
from slipstream.stack.runtime_dir import new_runtime_dir
from slipstream.stack.settings import StackSettings
from slipstream.stack.supervisor_events import StackFailed
from slipstream.stack.supervisor_process import SupervisorProcess
from slipstream_ray.actor_messages import decoded

_PAUSE_S = 5.0
_CRASHED = 1  # exit code

logger = logging.getLogger(__name__)


class RankHost:
    """Starts the ranks of machine `node_rank` of the settings."""

    def __init__(
        self,
        settings: bytes,
        end: Callable[[int], object] = os._exit,
        pause_s: float = _PAUSE_S,
    ) -> None:
        """settings: StackSettings. end: ends the process. pause_s: before it does."""
        self._end, self._pause_s = end, pause_s
        self._supervisor: SupervisorProcess | None = None
        try:
            given = decoded(settings, StackSettings)
            self._supervisor = SupervisorProcess(
                plan_node(given, new_runtime_dir(), parent_pid=os.getpid()),
                removes_folder=True,
                log_format=given.log_format,
                verbose=True,
            )
        except (SlipstreamError, msgspec.MsgspecError, OSError) as error:
            self._report(str(error))
        name = "slipstream-ranks"
        threading.Thread(target=self._watch, name=name, daemon=True).start()

    @property
    def pid(self) -> int | None:
        """The process id of the ranks' supervisor; None where it could not be started."""
        return None if self._supervisor is None else self._supervisor.pid

    def _watch(self) -> None:
        supervisor = self._supervisor
        while supervisor is not None and not supervisor.has_told_all:
            supervisor.wait_for_events(None)
            for event in supervisor.events():
                if isinstance(event, StackFailed):
                    self._report(event.error)
        if supervisor is not None:
            supervisor.stop()  # removes what it has left
        time.sleep(self._pause_s)  # what is wrong may take a person to mend
        self._end(_CRASHED)

    @staticmethod
    def _report(why: str) -> None:
        logger.error("these ranks cannot take part: %s", " ".join(why.split()))
