"""The output worker: accepts clients' requests, and turns the core's tokens into their text."""

import slipstream_ipc  # noqa: F401 -- first: in a clone it compiles what has changed
