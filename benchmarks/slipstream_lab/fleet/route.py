"""`slipstream bench route`: the CPU time in which a router places a request.

Prompts are chats of about `prompt_chars` characters, several turns of many conversations, placed by
the product's own code on replicas whose loads differ. Apart from that: what a load costs that a
replica sends. CPU time of this thread; each row has medians over the requests of a run.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from slipstream.cli.options.parser import Parser
from slipstream.client.placing.member_load import MemberLoad
from slipstream.client.placing.placement import Placement
from slipstream.client.placing.prompt_keys import chat_key
from slipstream_bench.common.measures import Row
from slipstream_bench.common.options import Option, add, fill_in, integer, many
from slipstream_bench.common.report import (
    add_common,
    check_common,
    in_rounds,
    median_rows,
    print_rows,
)
from slipstream_ipc.messages import ChatMessage

_NUM_TURNS = 4
_PARTS = ("load_us", "key_us", "choose_us", "note_us")
_BY = ("replicas", "prompt_chars")
_COLUMNS = (
    *_BY,
    *("key_us", "choose_us", "note_us", "placing_us", "placing_p99_us", "load_us"),
    "runs",
)
_OPTIONS = (
    Option("replicas", many(integer(1, 4096)), "members of the fleet", (8, 64), (64,)),
    Option("prompt_chars", integer(64, 2**20), "length of a prompt", 8192),
    Option("requests", integer(10), "of a run", 4000, 1000),
)


def add_options(parser: Parser) -> None:
    """The benchmark's options."""
    add(parser.add_argument_group("load"), _OPTIONS)
    add_common(parser, runs=5)
    parser.set_defaults(run=bench_route)


def bench_route(arguments: argparse.Namespace) -> int:
    """Measure and report; exit code 0."""
    check_common(arguments)
    given = fill_in(arguments, _OPTIONS)

    def measure(replicas: int) -> list[Row]:
        return [measure_route(replicas, given["prompt_chars"], given["requests"])]

    rows = median_rows(in_rounds(arguments.runs, given["replicas"], measure), _BY)
    print(f"CPU time of placing a chat, medians; medians of {arguments.runs} runs.")
    print_rows(rows, arguments, _COLUMNS)
    return 0


def measure_route(num_replicas: int, prompt_chars: int, num_requests: int) -> Row:
    """The row of one run."""
    random = np.random.default_rng(1)
    placement = Placement()
    members = [MemberLoad(b"replica-%d" % at) for at in range(num_replicas)]
    stamps = np.empty((num_requests, len(_PARTS) + 1), np.int64)
    clock = time.thread_time_ns
    for number in range(num_requests):
        now = number / 100
        member = members[number % num_replicas]
        queued, running = random.integers(0, (9000, 60)).tolist()
        turns = _turns(number // _NUM_TURNS, number % _NUM_TURNS + 1, prompt_chars)
        begin = clock()
        member.note_load(now, running=running, queued_tokens=queued, kept_since_s=90.0)
        heard = clock()
        key = chat_key(turns, b"model")
        keyed = clock()
        chosen = placement.choose(key, key.prompt_len, members, now)
        placed = clock()
        placement.note_submitted(key, key.prompt_len, members[chosen[0]], now)
        stamps[number] = begin, heard, keyed, placed, clock()
    spent_us = np.diff(stamps) / 1e3
    placing_us = spent_us[:, 1:].sum(axis=1)
    medians = dict(zip(_PARTS, np.median(spent_us, axis=0).round(2).tolist(), strict=True))
    return {
        "benchmark": "route",
        "replicas": num_replicas,
        "prompt_chars": prompt_chars,
        **medians,
        "placing_us": round(float(np.median(placing_us)), 2),
        "placing_p99_us": round(float(np.percentile(placing_us, 99)), 2),
    }


def _turns(conversation: int, num_turns: int, prompt_chars: int) -> list[ChatMessage]:
    """A chat of `prompt_chars`, whose system prompt has a quarter of them."""
    found = [ChatMessage("system", "Answer in one sentence. " * (prompt_chars // 96))]
    own = 3 * prompt_chars // 4 // (2 * num_turns - 1)
    for turn in range(num_turns):
        text = f"{conversation} asks {turn}; "
        found.append(ChatMessage("user", (text * (own // len(text) + 1))[:own]))
        found.append(ChatMessage("assistant", (text * (own // len(text) + 1))[:own]))
    return found[:-1]
