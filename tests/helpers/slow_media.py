"""A media process whose decoder never comes to an end."""

from __future__ import annotations

import os

from slipstream_core.media import media_process


def _for_ever(*_: object) -> object:
    while True:
        pass


def main() -> int:
    """As of the process itself."""
    media_process.MAX_CPU_S = 0.2
    media_process.prepared = _for_ever  # type: ignore[assignment]
    return media_process.main()


if __name__ == "__main__":
    os._exit(main())
