"""A client that vanishes: it opens its streams, reads a delta of each, reports that, and is killed.

`python -m slipstream_bench.soak.vanishing ADDRESS NUM_STREAMS`. It ends with its standard input.
"""

from __future__ import annotations

import sys

from slipstream.client.client import Client
from slipstream_ipc.messages import SamplingParams

LONG = SamplingParams(max_tokens=2000)


def main() -> int:
    """Open the streams, report, and wait to be killed."""
    address, num_streams = sys.argv[1], int(sys.argv[2])
    with Client(address) as client:
        streams = [client.stream([100 + number], LONG) for number in range(num_streams)]
        for stream in streams:
            next(stream)
        print("ready", flush=True)
        sys.stdin.buffer.read()
    return 0


if __name__ == "__main__":
    sys.exit(main())
