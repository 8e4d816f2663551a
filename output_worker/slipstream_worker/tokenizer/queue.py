"""Streams' prompts on their way through the tokenizer process, and the limits on them.

- Streams with the same prompt, such as the `n` answers of a request, wait for one rendering of it.
- Long prompts (see `long_prompts`) and short ones have separate limits: long prompts never cause a
  short one to be rejected.
- The total is bounded by twice what a single tenant may have, and a tenant may have at most as much
  as is left for all others: its prompts cause only its own to be rejected. A shared prompt is
  charged to the tenant that asked for it first.
- A prompt that no stream waits for is withdrawn and no longer counted. If it is being rendered, it
  counts until that is done.
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

# Limits of a tenant that is alone, and half of the total limits:
MAX_RENDERING = 16384  # streams that wait, for short prompts or for long ones
MAX_RENDERING_CHARS = 2**27  # total size of their prompts


@dataclass(slots=True)
class _QueueLoad:
    num_streams: int = 0
    num_chars: int = 0
    streams: Counter[bytes] = field(default_factory=Counter)  # by tenant
    chars: Counter[bytes] = field(default_factory=Counter)

    def count(self, tenant: bytes, num_streams: int, num_chars: int) -> None:
        """Add to the tenant's numbers, and to the total."""
        self.num_streams += num_streams
        self.num_chars += num_chars
        for counter, num in ((self.streams, num_streams), (self.chars, num_chars)):
            counter[tenant] += num
            if not counter[tenant]:
                del counter[tenant]


@dataclass(slots=True, eq=False)
class _Rendering(Generic[Waiter]):
    render: Render
    key: int  # in the tokenizer process
    size: int  # characters
    load: _QueueLoad  # the load it is counted in
    tenant: bytes  # charged with its characters
    streams: dict[Waiter, bytes] = field(default_factory=dict)  # with their tenants, oldest first


class RenderQueue(Generic[Waiter]):
    """Prompts that are to be rendered, and the streams that wait for each."""

    def __init__(self, prompts: RenderSource) -> None:
        self._prompts = prompts
        self._by_key: dict[int, _Rendering[Waiter]] = {}
        self._by_prompt: dict[Render, _Rendering[Waiter]] = {}
        self._by_stream: dict[Waiter, _Rendering[Waiter]] = {}
        self._loads = {False: _QueueLoad(), True: _QueueLoad()}  # keyed by `is_long`

    def why_full(self, render: Render, tenant: bytes = b"") -> str:
        """The reason to reject a stream of this tenant; empty if it may wait for this prompt."""
        load = self._loads[is_long(render)]
        if load.streams[tenant] >= 2 * MAX_RENDERING - load.num_streams:
            return f"{load.streams[tenant]} prompts are waiting to be tokenised already"
        is_full = load.chars[tenant] >= 2 * MAX_RENDERING_CHARS - load.num_chars
        if is_full and render not in self._by_prompt:
            return f"prompts of {load.chars[tenant]} characters are waiting to be tokenised already"
        return ""

    def ask(self, stream: Waiter, render: Render, tenant: bytes = b"") -> None:
        """Have the prompt of a tenant's stream rendered (`render.key` is 0)."""
        rendering = self._by_prompt.get(render)
        if rendering is None:
            load = self._loads[is_long(render)]
            key = self._prompts.ask(render, tenant)
            rendering = _Rendering(render, key, size_of(render), load, tenant)
            self._by_key[key] = self._by_prompt[render] = rendering
            load.count(tenant, 0, rendering.size)
        rendering.load.count(tenant, 1, 0)
        rendering.streams[stream] = tenant
        self._by_stream[stream] = rendering

    def withdraw(self, stream: Waiter) -> None:
        """A stream no longer waits, if it did."""
        rendering = self._by_stream.get(stream)
        if rendering is None:
            return
        if len(rendering.streams) == 1 and not self._prompts.withdraw(rendering.key):
            return  # it counts until it is answered
        del self._by_stream[stream]
        rendering.load.count(rendering.streams.pop(stream), -1, 0)
        if not rendering.streams:
            self._forget(rendering)

    def answered(self, key: int) -> list[Waiter]:
        """The streams that have waited for this answer; some may be gone."""
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
