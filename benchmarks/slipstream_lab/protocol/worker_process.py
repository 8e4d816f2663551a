"""The worker process of the protocol benchmark, for the cumulative transport.

`python -m slipstream_lab.protocol.worker_process`: the product's worker with another codec
towards the core.
"""

from __future__ import annotations

from unittest.mock import patch

from slipstream_lab.protocol.cumulative import OnlyNew
from slipstream_worker import main as worker


def main() -> int:
    """Run until SIGTERM; returns the worker's exit code."""
    with patch("slipstream_worker.core_link.worker_codec", OnlyNew):
        return worker.main()


if __name__ == "__main__":
    raise SystemExit(main())
