"""A module that the supervisor starts as a child, and its config."""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from slipstream.stack.children.process import ChildSpec
from slipstream_ipc.other_python import command


def child_spec(
    name: str, module: str, config: dict[str, Any], *, python: str | None = None, **traits: Any
) -> ChildSpec:
    """A process of one of our modules. config: its options; python: of another environment; traits:
    other fields of `ChildSpec`.
    """
    own = (sys.executable, "-P", "-m", module)
    argv = own if python is None else tuple(command(python, module))
    return ChildSpec(name, argv, msgspec.Raw(msgspec.json.encode(config)), **traits)
