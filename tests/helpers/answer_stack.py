"""Stacks in one thread whose answers are read as events, of all kinds."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tests.helpers.mini_stack import MiniStack

from slipstream_ipc.formats.answer_format import digest
from slipstream_ipc.formats.table import find_format
from slipstream_ipc.messages import AnswerSettings
from slipstream_worker.detokenizer.factory import TableDetokenizerFactory
from slipstream_worker.detokenizer.table import TokenTable

PIECES = [
    b"",
    b"<think>",
    b"</think>",
    b"<tool_call>",
    b"</tool_call>",
    b'<tool_call>\n{"name": "f", "arguments": {"x": "',
    b'"}}\n</tool_call>',
    b"a",
    b" b",
    b"\n",
    b"<",
    "\u00e9".encode()[:1],
    "\u00e9".encode()[1:],
]
# the calls are written as text, since that makes more of them
DELIMITERS = {"<think>": 1, "</think>": 2}
MODEL = f"simulated:step_ms=0.2,prefill_us=0,vocab_size={len(PIECES)},mode=chain"
_FORMAT = find_format("qwen3+hermes")
assert _FORMAT is not None
ANSWER = AnswerSettings(_FORMAT.name, digest(_FORMAT))
PROMPTS = [f"Chapter {n}" for n in range(8)]


class _Letters:
    """A tokenizer whose ids are those of `PIECES`, and mean nothing."""

    def encode(self, text: str) -> Any:
        return SimpleNamespace(ids=[ord(letter) % len(PIECES) for letter in text])


def of_read_answers(make_stack: Callable[..., MiniStack]) -> Callable[..., MiniStack]:
    """`make_stack` for stacks whose model writes `PIECES`, at random."""
    detokenizers = TableDetokenizerFactory(
        TokenTable("bytelevel", tuple(PIECES), (0, 1, 2)), DELIMITERS
    )
    return lambda **settings: make_stack(
        MODEL, detokenizers=detokenizers, tokenizer=_Letters(), **{"answer": ANSWER, **settings}
    )


def kill_and_replace(stack: MiniStack, what: str) -> None:
    """Kill the worker, the core, or both, and start others."""
    if what != "worker":
        stack.kill_core()
    if what != "core":
        stack.kill_worker()
        stack.start_worker()
    if what != "worker":
        stack.start_core()
