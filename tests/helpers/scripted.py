"""A single-threaded stack whose model follows a script, and tools to observe its messages.

`play` makes the stack: each prompt is followed by its scripted tokens, then by FILLER forever.
`catch_up` lets the worker fall behind, so that many tokens reach it in one step. `Watch` keeps all
messages of deltas.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from slipstream_core.config import CoreConfig
from slipstream_core.engine.build import assemble_core
from slipstream_core.runner.factory import load_runner
from slipstream_ipc.columns import u32
from slipstream_ipc.messages import Deltas, Step

FILLER = 92  # "x" in the demo model's vocabulary: ordinary text that ends nothing
EOS = 1  # a special token of that vocabulary; the simulated model has no end token

Prompt = tuple[int, ...]


def play(
    make_stack: Callable[..., Any],
    answers: Mapping[Prompt, Sequence[int]],
    *,
    eos: Sequence[int] = (EOS,),
    vocab_size: int = 4096,
    **settings: object,
) -> Any:
    """A stack whose model answers each prompt as scripted, also after a restart of the core."""
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
    """Log-probabilities that identify their token: candidates are its id, then id + 0, 1, ..., each
    with the negated id as its value.
    """
    ranks = np.concatenate([[0], np.arange(k)])
    columns = ids[:, None] + ranks
    return -columns.astype(np.float32), columns.astype(np.uint32)


class Watch:
    """Keeps every Deltas message that a `RawClient` takes."""

    def __init__(self, client: Any) -> None:
        self.messages: list[Deltas] = []
        take = client._take_deltas

        def keep(deltas: Deltas) -> None:
            self.messages.append(deltas)
            take(deltas)

        client._take_deltas = keep

    def of(self, handle: int) -> list[tuple[str, list[int]]]:
        """Text and token ids of each delta of a stream, in order."""
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
        """How many times the end of a stream was sent."""
        return sum(
            u32(deltas.handles)[index] == handle
            for deltas in self.messages
            for index in u32(deltas.ended).tolist()
        )


def shown(it: Any, until: Callable[[Callable[[], bool]], None]) -> list[tuple[str, int]]:
    """Step until a stream is over. Returns each state that its reader saw: text, token count."""
    states: list[tuple[str, int]] = []

    def look() -> bool:
        state = (it.text, len(it.token_ids))
        if not states or states[-1] != state:
            states.append(state)
        return bool(it.is_over)

    until(look)
    return states


def catch_up(stack: Any, it: Any, num_tokens: int) -> list[int]:
    """Stop the worker until the core has `num_tokens` outputs of a stream, then reattach it.

    Returns the tokens that reached the worker in one step, which have to be several for the test to
    mean anything. `num_tokens` may exceed the worker's by 60; no core computes further ahead.
    """
    worker, stack.worker = stack.worker, None
    handler, tokens = stack.core.handler, stack.core.tokens
    stream = handler._streams.get(it.stream_id)
    stack.until(lambda: tokens.length(stream.row) - stream.prompt_len >= num_tokens)
    stack.worker = worker
    worker._core.attach(stack.now())  # messages in the old socket are lost, and sent again as one
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
