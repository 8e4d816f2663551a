"""`python -m slipstream` is the command `slipstream`."""

from __future__ import annotations

import sys

from slipstream.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
