"""Prompts of streams on their way through the prompt process, and how many there may be.

Owns: which streams wait for which prompt. Does not know: how prompts are rendered, streams' lives.

Rules:
- Streams with the same prompt, as the `n` answers of a request have, wait for one rendering of it.
- Long prompts (see `long_prompts`) and short ones are bounded each by themselves: nobody's short
  one is turned away for the sake of somebody's long ones.
- What no stream waits for any more is withdrawn, and gives its place back at once. What is being
  rendered by then keeps it until that is done: work that goes on counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream_ipc.messages import Render
from slipstream_worker.long_prompts import is_long, size_of
from slipstream_worker.prompts import PromptSource
from slipstream_worker.streams import Stream

MAX_RENDERING = 16384  # streams that wait for short prompts, or for long ones; more are turned away
MAX_RENDERING_CHARS = 2**28  # of these prompts together


@dataclass(slots=True)
class _Load:
    num_streams: int = 0
    num_chars: int = 0


@dataclass(slots=True, eq=False)
class _Rendering:
    render: Render
    key: int  # the prompt process'
    size: int  # characters
    load: _Load  # that it is a part of
    streams: dict[Stream, None] = field(default_factory=dict)  # oldest first


class Renderings:
    """Prompts that are to be rendered, and who waits for them."""

    def __init__(self, prompts: PromptSource) -> None:
        self._prompts = prompts
        self._by_key: dict[int, _Rendering] = {}
        self._by_prompt: dict[Render, _Rendering] = {}
        self._by_stream: dict[Stream, _Rendering] = {}
        self._loads = {False: _Load(), True: _Load()}  # by whether prompts are long

    def why_full(self, render: Render) -> str:
        """Why no stream may wait for this prompt; empty where one may."""
        load = self._loads[is_long(render)]
        if load.num_streams >= MAX_RENDERING:
            return f"{load.num_streams} prompts wait to be tokenised already"
        if load.num_chars >= MAX_RENDERING_CHARS and render not in self._by_prompt:
            return f"prompts of {load.num_chars} characters wait to be tokenised already"
        return ""

    def ask(self, stream: Stream, render: Render) -> None:
        """Have a stream's prompt rendered (`render.key` is 0)."""
        rendering = self._by_prompt.get(render)
        if rendering is None:
            load = self._loads[is_long(render)]
            key = self._prompts.ask(render)
            rendering = _Rendering(render, key, size_of(render), load)
            self._by_key[key] = self._by_prompt[render] = rendering
            load.num_chars += rendering.size
        rendering.load.num_streams += 1
        rendering.streams[stream] = None
        self._by_stream[stream] = rendering

    def withdraw(self, stream: Stream) -> None:
        """A stream waits no more, if it did."""
        rendering = self._by_stream.get(stream)
        if rendering is None:
            return
        if len(rendering.streams) == 1 and not self._prompts.withdraw(rendering.key):
            return  # it keeps its place until there is an answer
        del self._by_stream[stream], rendering.streams[stream]
        rendering.load.num_streams -= 1
        if not rendering.streams:
            self._forget(rendering)

    def answered(self, key: int) -> list[Stream]:
        """The prompt process is done with a prompt; who has waited for it. Some may have left."""
        rendering = self._by_key.get(key)
        if rendering is None:
            return []
        self._forget(rendering)
        rendering.load.num_streams -= len(rendering.streams)
        for stream in rendering.streams:
            del self._by_stream[stream]
        return list(rendering.streams)

    def _forget(self, rendering: _Rendering) -> None:
        del self._by_key[rendering.key], self._by_prompt[rendering.render]
        rendering.load.num_chars -= rendering.size
