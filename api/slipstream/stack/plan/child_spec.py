"""A module that the supervisor starts as a child, and its config."""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from slipstream.stack.children.process import ChildSpec


def child_spec(name: str, module: str, config: dict[str, Any], **traits: Any) -> ChildSpec:
    """A process of one of our modules. config: its options; traits: other fields of `ChildSpec`."""
    argv = (sys.executable, "-P", "-m", module)
    return ChildSpec(name, argv, msgspec.Raw(msgspec.json.encode(config)), **traits)
