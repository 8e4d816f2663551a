"""Says where the replicas of a fleet on Ray are: see `slipstream.client.placing.member_feed`.

It is a process of its own, started by a front or a client with the fleet's name, as Ray ends a
process whose cluster is lost.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

import msgspec

from slipstream.errors import SlipstreamError
from slipstream_ipc.process import name_process

_EVERY_S = 1.0


def main(name: str) -> int:
    """Print a line for each change. Returns when Ray is lost."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    name_process("slip:members")
    say = _speaker()
    last: list[str] | str | None = None
    try:
        from slipstream_ray.cluster import call, connect, find

        connect()
        while True:
            fleet = find(name)
            said: list[str] | str = f"Ray has no fleet {name!r}"
            if fleet is not None:
                said = call(fleet, "members").split()
            if said and said != last:
                say(said)
                last = said
            time.sleep(_EVERY_S)
    except SlipstreamError as error:
        say(str(error))
        return 1


def _end_with_parent() -> None:
    """End the process when its standard input ends."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(0)


def _speaker() -> Callable[[list[str] | str], None]:
    """Writes lines where standard output went; what Ray prints there goes nowhere."""
    said = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())

    def say(line: list[str] | str) -> None:
        said.write(msgspec.json.encode(line) + b"\n")

    return say


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
