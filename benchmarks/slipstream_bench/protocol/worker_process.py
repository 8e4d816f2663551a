"""The worker's process of the protocol benchmark, at the end of a cumulative transport.

`python -m slipstream_bench.protocol.worker_process`: the product's worker, its codec towards the
core another one.
"""

from __future__ import annotations

from unittest.mock import patch

from slipstream_bench.protocol.cumulative import OnlyNew
from slipstream_worker import main as worker


def main() -> int:
    """Run until SIGTERM; the worker's exit code."""
    with patch("slipstream_worker.core_link.worker_codec", OnlyNew):
        return worker.main()


if __name__ == "__main__":
    raise SystemExit(main())
