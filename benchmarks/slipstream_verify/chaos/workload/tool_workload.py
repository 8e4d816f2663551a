"""The requests of a chaos run with played answers: chats with tools, some with forced calls, and
the answers, with reasoning and tool calls. Pure: the same seed gives the same requests.

- Every request has an answer of its own, which its last words choose.
- Some answers are not as their format asks: something is missing, or they break off.
- A request over HTTP may be unstreamed; it is then repeated from its beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import structs

from slipstream_ipc.messages import ChatMessage, SamplingParams
from slipstream_lab.formats.cases import MADE_CASES
from slipstream_lab.formats.rendering import RENDERINGS, SampleCall, can_render, render
from slipstream_verify.chaos.workload.chaos_workload import (
    ChaosRequest,
    ChatSettings,
    WorkloadShape,
    client_of,
    make_text,
    pauses_of,
    pick,
    stops_of,
)
from slipstream_verify.chaos.workload.played_formats import PlayedFormat

_TOOLS = tuple(MADE_CASES[0].tools)
_TYPES = MADE_CASES[0].types
_HTTP_SHARE = 0.35
_UNARY_SHARE = 0.4  # of those over HTTP
_FORCED_SHARE = 0.3
_BROKEN_SHARE = 0.12
_MAX_CALLS = 4
_TOKENS_PER_WORD = 2  # of the bundled tokenizer, about
_OTHER_ANSWER = {"text": "No request asks for this answer."}


def make_tool_requests(
    seed: int, shape: WorkloadShape, played: PlayedFormat
) -> tuple[list[ChaosRequest], list[dict[str, str]]]:
    """All requests of a run, and the lines of the file of answers."""
    requests: list[ChaosRequest] = []
    lines = [_OTHER_ANSWER]
    for index in range(shape.num_requests):
        random = np.random.default_rng((seed, 3, index))
        request, answer = _request(random, index, shape, played)
        requests.append(request)
        lines.append({"text": answer, "when": _key(index)})
    return requests, lines


def _key(index: int) -> str:
    return f" Task {index}."


def _request(
    random: np.random.Generator, index: int, shape: WorkloadShape, played: PlayedFormat
) -> tuple[ChaosRequest, str]:
    is_http = random.random() < _HTTP_SHARE
    is_unary = is_http and random.random() < _UNARY_SHARE
    kind = pick(random, ("text", "chat", *["tools"] * 8))
    is_forced = kind == "tools" and random.random() < _FORCED_SHARE
    num_tokens = int(random.integers(shape.min_len, shape.max_len + 1))
    answer, calls = _answer(random, played, num_tokens // _TOKENS_PER_WORD, is_forced=is_forced)
    params = _params(random, shape, is_http=is_http, is_forced=is_forced)
    prompt = make_text(random, int(random.integers(1, 40))) + _key(index)
    text, chat = None, None
    messages: tuple[ChatMessage, ...] = ()
    if kind == "text":
        text = prompt
    else:
        earlier = ("user", "assistant")[: pick(random, (0, 0, 2))]
        turns = tuple(ChatMessage(role, make_text(random, 8)) for role in earlier)
        messages = (*turns, ChatMessage("user", prompt))
        chat = ChatSettings(
            _TOOLS if kind == "tools" else (),
            _choice(random, calls) if is_forced else "auto",
            random.random() < 0.7,
            "all" if random.random() < 0.2 else "content",
        )
        if chat.tools and not chat.parallel_tool_calls:  # refused together
            params = structs.replace(params, min_tokens=0)
    request = ChaosRequest(
        index,
        random.bytes(16).hex(),
        params,
        text,
        (),
        messages,
        "http" if is_http else "client",
        client_of(random, shape, is_http=is_http),
        () if is_http else pauses_of(random, params),
        chat,
        not is_unary,
    )
    return request, answer


def _choice(random: np.random.Generator, calls: Sequence[SampleCall]) -> Any:
    if len(calls) == 1 and random.random() < 0.5:
        return {"type": "function", "function": {"name": calls[0].name}}
    return "required"


def _answer(
    random: np.random.Generator, played: PlayedFormat, num_words: int, *, is_forced: bool
) -> tuple[str, tuple[SampleCall, ...]]:
    """An answer of about so many words."""
    parts = random.dirichlet((1, 1, 1)) * num_words
    of_reasoning, of_content, of_calls = (1 + int(part) for part in parts)
    calls = _calls(random, played, of_calls, is_forced=is_forced)
    may_reason = played.has_tokens or not is_forced
    reasoning = make_text(random, of_reasoning) if may_reason and random.random() < 0.8 else ""
    has_content = not is_forced and (not calls or random.random() < 0.5)
    content = make_text(random, of_content) if has_content else ""
    text = render(played.rendering, calls, content=content, reasoning=reasoning)
    rendering = RENDERINGS[played.rendering]
    if played.opens_reasoning:
        opening = rendering.before_reasoning
        text = text.removeprefix(opening) if reasoning else rendering.after_reasoning + text
    if not is_forced and random.random() < _BROKEN_SHARE:
        begin, end = sorted(random.integers(0, len(text) + 1, 2).tolist())
        # something is missing, or the rest is
        text = text[:begin] + text[min(end, begin + 9) :] if random.random() < 0.5 else text[:begin]
    return text, calls


def _calls(
    random: np.random.Generator, played: PlayedFormat, num_words: int, *, is_forced: bool
) -> tuple[SampleCall, ...]:
    """Calls that the format can write."""
    num_calls = int(random.integers(1 if is_forced else 0, _MAX_CALLS))
    known = [call for case in MADE_CASES for call in case.calls]
    calls: list[SampleCall] = []
    while len(calls) < num_calls:
        if random.random() < 0.5:
            call = pick(random, known)
        else:
            text = make_text(random, 1 + num_words // num_calls)
            call = SampleCall("write_file", {"path": "a.txt", "text": text})
        if can_render(played.rendering, [call], _TYPES):
            calls.append(call)
    return tuple(calls)


def _params(
    random: np.random.Generator, shape: WorkloadShape, *, is_http: bool, is_forced: bool
) -> SamplingParams:
    is_cut = random.random() < 0.15
    max_tokens = int(random.integers(1, shape.max_len + 1)) if is_cut else shape.max_len
    params = SamplingParams(
        temperature=pick(random, (0.0, 1.0)),
        seed=int(random.integers(2**62)),
        max_tokens=max_tokens,
        logprobs=pick(random, (None, None, 0, 5)) if not is_http else None,
        skip_special_tokens=random.random() < 0.8,
        stream_interval=pick(random, (1, 1, 1, 4, 16)),
    )
    if is_forced:
        return params
    has_stops = random.random() < 0.3
    return structs.replace(
        params,
        stop=stops_of(random) if has_stops else (),
        include_stop_str_in_output=has_stops and random.random() < 0.3,
        ignore_eos=random.random() < 0.05,
        min_tokens=int(random.integers(max_tokens + 1)) if random.random() < 0.05 else 0,
    )
