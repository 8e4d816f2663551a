"""One answer, streamed: from one server, from several replicas, or from replicas on Ray.

    python examples/ask.py "In Python,"

The program is the same for all of them: it talks to `slipstream serve` on this machine, with or
without `--replicas`, or to $SLIPSTREAM_ADDRESS with $SLIPSTREAM_KEYS, such as `ray://slipstream`.
"""

from __future__ import annotations

import sys

import slipstream


def main(prompt: str) -> None:
    with slipstream.Client() as client:
        for delta in client.stream(prompt, max_tokens=60, temperature=0):
            print(delta.text, end="", flush=True)
    print()


if __name__ == "__main__":
    main(sys.argv[1])
