"""A stack in one thread whose model says what a test wrote, and eyes on what goes over its links.

`play` makes such a stack: after this prompt come these tokens, then FILLER without end. `catch_up`
lets the worker fall behind, so that many tokens reach it in one step. `Watch` keeps every message
of deltas as it came.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from slipstream_core.build import assemble_core
from slipstream_core.config import CoreConfig
from slipstream_core.runner.factory import load_runner
from slipstream_ipc.columns import u32
from slipstream_ipc.messages import Deltas, Step

FILLER = 92  # "x" in the demo model's vocabulary; a sample of ordinary text that ends nothing
EOS = 1  # special in that vocabulary; the simulated model has no end of its own

Prompt = tuple[int, ...]


def play(
    make_stack: Callable[..., Any],
    answers: Mapping[Prompt, Sequence[int]],
    *,
    eos: Sequence[int] = (EOS,),
    vocab_size: int = 4096,
    **settings: object,
) -> Any:
    """A stack whose model, also that of its next core, answers each prompt as it is written."""
    stack = make_stack(f"simulated:step_ms=0.2,prefill_us=0,vocab_size={vocab_size}", **settings)

    def start_core() -> None:
        config = CoreConfig(address=f"ipc://{stack.directory}/core", **stack._core_settings)
        runner: Any = load_runner(config)
        runner.info = dataclasses.replace(runner.info, eos_token_ids=tuple(eos))
        _write_script(runner.text, answers, runner.info.max_model_len)
        stack.core = assemble_core(config, runner, stack.context, stack.poller)

    stack.kill_worker()
    stack.kill_core()
    stack.start_core = start_core
    start_core()
    stack.start_worker()
    return stack


def _write_script(text: Any, answers: Mapping[Prompt, Sequence[int]], length: int) -> None:
    begins: dict[int, int] = {}
    source: list[int] = []
    for prompt, answer in answers.items():
        mixed = text.mix(np.array(prompt), np.arange(len(prompt)))
        begins[int(np.cumsum(mixed)[-1])] = len(source)
        source += [*answer, *[FILLER] * length]

    def start(*, outputs: Any, here: Any, prompt: Any, **_: Any) -> Any:
        begin = np.array([begins[int(each)] for each in prompt])
        return begin + outputs, here

    text._source = np.array(source)
    text.start = start
    text.logprobs = _logprobs


def _logprobs(chosen: Any, ids: Any, k: int) -> Any:
    """Every column tells whose it is: the token itself, then it plus 1, 2, ..."""
    ranks = np.concatenate([[0], np.arange(k)])
    columns = ids[:, None] + ranks
    return -columns.astype(np.float32), columns.astype(np.uint32)


class Watch:
    """Every message of deltas that a `RawClient` has taken, entry by entry."""

    def __init__(self, client: Any) -> None:
        self.messages: list[Deltas] = []
        take = client._take_deltas

        def keep(deltas: Deltas) -> None:
            self.messages.append(deltas)
            take(deltas)

        client._take_deltas = keep

    def of(self, handle: int) -> list[tuple[str, list[int]]]:
        """The stream's deltas: text and ids of each, in order."""
        found = []
        for deltas in self.messages:
            num = len(deltas.texts)
            counts = u32(deltas.counts).tolist() if deltas.counts else [1] * num
            ids, begin = u32(deltas.token_ids).tolist(), 0
            handles = u32(deltas.handles).tolist()
            for one, count, text in zip(handles, counts, deltas.texts, strict=True):
                if one == handle:
                    found.append((text, ids[begin : begin + count]))
                begin += count
        return found

    def num_ends(self, handle: int) -> int:
        """How often the stream's end was said."""
        return sum(
            u32(deltas.handles)[index] == handle
            for deltas in self.messages
            for index in u32(deltas.ended).tolist()
        )


def shown(it: Any, until: Callable[[Callable[[], bool]], None]) -> list[tuple[str, int]]:
    """Every state that the stream's reader has seen, to its end: the text, and how many tokens."""
    states: list[tuple[str, int]] = []

    def look() -> bool:
        state = (it.text, len(it.token_ids))
        if not states or states[-1] != state:
            states.append(state)
        return bool(it.is_over)

    until(look)
    return states


def catch_up(stack: Any, it: Any, num_tokens: int) -> list[int]:
    """Stop the worker until the core has so many outputs of a stream, then let it attach anew.

    The tokens that came to the worker in one step: more than one, or nothing was tested.
    `num_tokens` may be 60 more than the worker has; further ahead of it no core computes.
    """
    worker, stack.worker = stack.worker, None
    handler, tokens = stack.core.handler, stack.core.tokens
    stream = handler._streams.get(it.stream_id)
    stack.until(lambda: tokens.length(stream.row) - stream.prompt_len >= num_tokens)
    stack.worker = worker
    worker._core.attach(stack.now())  # what lies in the old socket is lost, and comes as one
    widest: list[int] = []
    handle = worker._from_core.handle

    def note(message: object) -> None:
        if isinstance(message, Step) and message.counts:
            rows, counts = u32(message.rows).tolist(), u32(message.counts).tolist()
            ends = np.cumsum(counts).tolist()
            if stream.row in rows:
                at = rows.index(stream.row)
                ids = u32(message.token_ids).tolist()[ends[at] - counts[at] : ends[at]]
                if len(ids) > len(widest):
                    widest[:] = ids
        handle(message)

    worker._from_core.handle = note
    known = worker.streams.get(it.stream_id)
    stack.until(
        lambda: known.output.end is not None or worker.columns.num_tokens(known) >= num_tokens
    )
    worker._from_core.handle = handle
    assert len(widest) > 1
    return widest
