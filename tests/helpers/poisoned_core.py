"""Stacks whose core is whole, but for what its device makes of one prompt or one image."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import msgspec

from slipstream.stack.plan.process_plan import plan_stack
from slipstream.stack.supervisor_events import SupervisorConfig

POISON = [9] * 57  # its length gives it away
_CORE = """
import os, sys
from slipstream_core import main
from slipstream_core.runner.simulated.simulated_runner import SimulatedRunner
launch = SimulatedRunner.launch
def poisoned_launch(self, plan):
    while (plan.prompt_lens == {length}).any(): {what}
    launch(self, plan)
SimulatedRunner.launch = poisoned_launch
sys.exit(main.main())
"""
_SEEING_CORE = """
import os, signal, sys
from slipstream_core import main
from slipstream_core.media.encoder import ModelEncoder
encode = ModelEncoder.encode
def deadly_encode(self, data, max_pixels):
    if data == {image!r}: os.kill(os.getpid(), signal.SIGSEGV)
    return encode(self, data, max_pixels)
ModelEncoder.encode = deadly_encode
sys.exit(main.main())
"""


def with_poisoned_core(what: str) -> Callable[..., SupervisorConfig]:
    """In place of `plan_stack`. what: a statement, run over and over when a step has the prompt."""
    return _with_core(_CORE.format(length=len(POISON), what=what))


def with_deadly_image(image: bytes) -> Callable[..., SupervisorConfig]:
    """In place of `plan_stack`: the core dies of a signal when it encodes this file."""
    return _with_core(_SEEING_CORE.format(image=image))


def _with_core(code: str) -> Callable[..., SupervisorConfig]:
    def plan(*args: Any, **kwargs: Any) -> SupervisorConfig:
        config = plan_stack(*args, **kwargs)
        children = tuple(
            msgspec.structs.replace(child, argv=(sys.executable, "-P", "-c", code), forks=None)
            if child.name == "core"
            else child
            for child in config.children
        )
        return msgspec.structs.replace(config, children=children)

    return plan
