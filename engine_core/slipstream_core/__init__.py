"""The engine core: schedules and runs forward passes; knows only tokens."""

import slipstream_ipc  # noqa: F401 -- first: in a clone it compiles what has changed
