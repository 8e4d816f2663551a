"""Prompts of streams on their way through the prompt process, and how many there may be.

Owns: which streams wait for which prompt. Does not know: how prompts are rendered, streams' lives.

Rules:
- Streams with the same prompt, as the `n` answers of a request have, wait for one rendering of it.
- Long prompts (see `long_prompts`) and short ones are bounded each by themselves: nobody's short
  one is turned away for the sake of somebody's long ones.
- A tenant may have as much as is left to all others, of twice what one alone may have: its prompts
  turn away its own. A prompt that several share is that of the tenant which asked for it first.
- What no stream waits for any more is withdrawn, and gives its place back at once. What is being
  rendered by then keeps it until that is done: work that goes on counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from slipstream_ipc.messages import Render
from slipstream_worker.tokenizer.client import RenderSource
from slipstream_worker.tokenizer.long_prompts import is_long, size_of

Waiter = TypeVar("Waiter", bound=Hashable)  # a stream

# Of a tenant that is alone, and half of what all may have:
MAX_RENDERING = 16384  # streams that wait for short prompts, or for long ones; more are turned away
MAX_RENDERING_CHARS = 2**27  # of these prompts together


@dataclass(slots=True)
class _QueueLoad:
    num_streams: int = 0
    num_chars: int = 0
    streams: Counter[bytes] = field(default_factory=Counter)  # by tenant
    chars: Counter[bytes] = field(default_factory=Counter)

    def count(self, tenant: bytes, num_streams: int, num_chars: int) -> None:
        """So many more are a tenant's."""
        self.num_streams += num_streams
        self.num_chars += num_chars
        for counter, num in ((self.streams, num_streams), (self.chars, num_chars)):
            counter[tenant] += num
            if not counter[tenant]:
                del counter[tenant]


@dataclass(slots=True, eq=False)
class _Rendering(Generic[Waiter]):
    render: Render
    key: int  # the prompt process'
    size: int  # characters
    load: _QueueLoad  # that it is a part of
    tenant: bytes  # whose characters it has
    streams: dict[Waiter, bytes] = field(default_factory=dict)  # oldest first, with their tenants


class RenderQueue(Generic[Waiter]):
    """Prompts that are to be rendered, and who waits for them."""

    def __init__(self, prompts: RenderSource) -> None:
        self._prompts = prompts
        self._by_key: dict[int, _Rendering[Waiter]] = {}
        self._by_prompt: dict[Render, _Rendering[Waiter]] = {}
        self._by_stream: dict[Waiter, _Rendering[Waiter]] = {}
        self._loads = {False: _QueueLoad(), True: _QueueLoad()}  # by whether prompts are long

    def why_full(self, render: Render, tenant: bytes = b"") -> str:
        """Why no stream of this tenant may wait for this prompt; empty where one may."""
        load = self._loads[is_long(render)]
        if load.streams[tenant] >= 2 * MAX_RENDERING - load.num_streams:
            return f"{load.streams[tenant]} prompts wait to be tokenised already"
        is_full = load.chars[tenant] >= 2 * MAX_RENDERING_CHARS - load.num_chars
        if is_full and render not in self._by_prompt:
            return f"prompts of {load.chars[tenant]} characters wait to be tokenised already"
        return ""

    def ask(self, stream: Waiter, render: Render, tenant: bytes = b"") -> None:
        """Have the prompt of a tenant's stream rendered (`render.key` is 0)."""
        rendering = self._by_prompt.get(render)
        if rendering is None:
            load = self._loads[is_long(render)]
            key = self._prompts.ask(render)
            rendering = _Rendering(render, key, size_of(render), load, tenant)
            self._by_key[key] = self._by_prompt[render] = rendering
            load.count(tenant, 0, rendering.size)
        rendering.load.count(tenant, 1, 0)
        rendering.streams[stream] = tenant
        self._by_stream[stream] = rendering

    def withdraw(self, stream: Waiter) -> None:
        """A stream waits no more, if it did."""
        rendering = self._by_stream.get(stream)
        if rendering is None:
            return
        if len(rendering.streams) == 1 and not self._prompts.withdraw(rendering.key):
            return  # it keeps its place until there is an answer
        del self._by_stream[stream]
        rendering.load.count(rendering.streams.pop(stream), -1, 0)
        if not rendering.streams:
            self._forget(rendering)

    def answered(self, key: int) -> list[Waiter]:
        """The prompt process is done with a prompt; who has waited for it. Some may have left."""
        rendering = self._by_key.get(key)
        if rendering is None:
            return []
        self._forget(rendering)
        for stream, tenant in rendering.streams.items():
            rendering.load.count(tenant, -1, 0)
            del self._by_stream[stream]
        return list(rendering.streams)

    def _forget(self, rendering: _Rendering[Waiter]) -> None:
        del self._by_key[rendering.key], self._by_prompt[rendering.render]
        rendering.load.count(rendering.tenant, 0, -rendering.size)
