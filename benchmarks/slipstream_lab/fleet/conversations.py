"""`slipstream bench conversations`: chats through a router to real replicas on simulated devices.

Answers are read and sent again with the next turn; some chats share their system prompts. For each
router the replicas are started anew, so their caches are empty, and the first 40 % of the time is
not counted.

- `slipstream`: `slipstream route`. `direct`: none, one replica after another in turn.
- `sglang-POLICY`: sglang-router of that policy, from an environment of its own (--sglang-python).

Hits are what the servers say was cached of the counted prompts; `hit_over_ideal` is relative to one
cache that forgets nothing and sees all prompts before.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import cycle
from urllib.parse import urlsplit

import msgspec
import numpy as np
import uvloop

from slipstream.cli.options.parser import Parser
from slipstream.demo_model import MODEL_PATH
from slipstream.errors import wrong_option
from slipstream.stack.stack import Stack
from slipstream_bench.common.load.http_client import (
    NO_HEADERS,
    EventSplitter,
    HttpClient,
    RequestFailedError,
)
from slipstream_bench.common.load.openai_target import StreamEvent
from slipstream_bench.common.measures import Row, cannot_measure
from slipstream_bench.common.options import Option, add, fill_in, integer, many, name_of, number
from slipstream_bench.common.pictures import grouped_bars
from slipstream_bench.common.report import (
    add_common,
    check_common,
    in_rounds,
    median_rows,
    print_rows,
)
from slipstream_lab.common.simulated_stack import simulation_note
from slipstream_lab.fleet.chat_workload import ChatWorkload, Conversation
from slipstream_lab.peers.server_process import free_port, server_process

_WARM_SHARE = 0.4  # of the time, before anything is counted
_STEP_MS = 12.0
_PREFILL_US = 200.0
_BLOCKS = 2500  # 40,000 tokens of cache
_PREFILL_TOKENS = 512  # in a step
_PAUSE_SHARE = 0.3  # of the pauses between turns
_MAX_MODEL_LEN = 20_000
_MODEL_NAME = "chats"
_SLIPSTREAM, _DIRECT, _SGLANG = "slipstream", "direct", "sglang-"
_SGLANG_POLICIES = ("cache_aware", "round_robin", "power_of_two", "random")
ROUTERS = (_SLIPSTREAM, _DIRECT, *[_SGLANG + policy for policy in _SGLANG_POLICIES])
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_PROMPT_TOKENS = "slipstream:prompt_tokens_total"
_COLUMNS = (
    *("router", "requests", "failed", "hit_percent", "hit_over_ideal", "most_over_mean"),
    *("ttft_p50_ms", "ttft_p95_ms", "ttft_p99_ms", "runs"),
)
_BY = ("router",)
_OPTIONS = (
    Option("replicas", integer(1, 16), "how many there are", 4, 2),
    Option(
        "routers",
        many(name_of(ROUTERS)),
        "what places the requests",
        (_SLIPSTREAM, _DIRECT),
        (_SLIPSTREAM,),
    ),
    Option(
        "seconds",
        number(lambda value: 5 <= value <= 3600, "in [5, 3600]"),
        "of chats; the first 40 %% are not counted",
        120.0,
        10.0,
    ),
    Option(
        "rate",
        number(lambda value: 0 < value <= 100, "in (0, 100]"),
        "conversations that begin in a second, for each replica",
        0.3,
    ),
    Option("seed", integer(0), "of the first run; each further run has the next one", 1),
)


def add_options(parser: Parser) -> None:
    """The benchmark's options."""
    load = parser.add_argument_group("load")
    add(load, _OPTIONS)
    load.add_argument(
        "--sglang-python", metavar="PYTHON", help="a Python with sglang-router, for its policies"
    )
    add_common(parser, runs=1)
    parser.set_defaults(run=bench_conversations)


def bench_conversations(arguments: argparse.Namespace) -> int:
    """Measure and report; exit code 0."""
    check_common(arguments)
    given = fill_in(arguments, _OPTIONS)
    has_peers = any(router.startswith(_SGLANG) for router in given["routers"])
    if has_peers and arguments.sglang_python is None:
        raise wrong_option("sglang_python", None, "a Python that has sglang-router")
    note = simulation_note()
    num_runs: dict[str, int] = {}

    def measure(router: str) -> list[Row]:
        seed = given["seed"] + num_runs.get(router, 0)
        num_runs[router] = num_runs.get(router, 0) + 1
        load = _Chats(given["rate"] * given["replicas"], given["seconds"], seed)
        with (
            _replicas(given["replicas"]) as stacks,
            _routed(router, stacks, arguments.sglang_python) as urls,
        ):
            uvloop.run(load.run(urls, stacks))
        return [load.row(router, given["replicas"]) | {"seed": seed}]

    rows = median_rows(in_rounds(arguments.runs, given["routers"], measure), _BY)
    print(
        f"{note} {given['replicas']} replicas, {given['rate']:g} conversations a second and "
        f"replica, {given['seconds']:g} s; medians of {arguments.runs}."
    )
    print_rows(rows, arguments, _COLUMNS)
    if arguments.png is not None:
        _draw(rows, given["replicas"], arguments.png)
    return 0


def _draw(rows: Sequence[Row], num_replicas: int, file: str) -> None:
    percentiles = ("p50", "p95", "p99")
    grouped_bars(
        file,
        percentiles,
        {
            f"{row['router']} ({row['hit_percent']} % of prompts cached)": [
                float(row[f"ttft_{each}_ms"] or 0) for each in percentiles
            ]
            for row in rows
        },
        title=f"Time to first token of chats over {num_replicas} replicas (simulated)",
        x_label="percentile",
        y_label="ms",
    )


@contextmanager
def _replicas(num: int) -> Iterator[list[Stack]]:
    model = f"simulated:step_ms={_STEP_MS:g},prefill_us={_PREFILL_US:g},tokenizer={MODEL_PATH}"
    with ExitStack() as stacks:
        yield [
            stacks.enter_context(
                Stack(
                    f"{model},mode=chain",
                    http_port=0,
                    served_model_name=_MODEL_NAME,
                    num_blocks=_BLOCKS,
                    max_model_len=_MAX_MODEL_LEN,
                    max_num_batched_tokens=_PREFILL_TOKENS,
                    spare_core=False,
                    spare_worker=False,
                )
            )
            for _ in range(num)
        ]


@contextmanager
def _routed(router: str, stacks: Sequence[Stack], python: str | None) -> Iterator[list[str]]:
    """The URLs to send requests to, one after another in turn."""
    urls = [f"{stack.http_address}" for stack in stacks]
    if router == _DIRECT:
        yield urls
        return
    port = free_port()
    where = ["--host", "127.0.0.1", "--port", str(port)]
    if router == _SLIPSTREAM:
        command = [sys.executable, "-m", "slipstream.cli.main", "route", *where]
        command += [stack.address for stack in stacks]
        path = "/ready"
    else:
        assert python is not None
        command = [python, "-m", "sglang_router.launch_router", *where]
        command += ["--policy", router.removeprefix(_SGLANG), "--worker-urls", *urls]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
        path = "/readiness"
    with server_process(router, command, port, {}, path):
        yield [f"http://127.0.0.1:{port}"]


_decoder = msgspec.json.Decoder(StreamEvent)


class ChatTurn:
    """One request, and what has come of its answer. ideal_share: of the prompt, what other prompts
    and answers began with before.
    """

    def __init__(self, ideal_share: float = 0.0) -> None:
        self.sent_s = time.monotonic()
        self.first_s: float | None = None
        self.answer = ""
        self.prompt_tokens = self.cached_tokens = 0
        self.ideal_share = ideal_share
        self.failure: str | None = None
        self._events = EventSplitter()

    def feed(self, piece: bytes) -> None:
        """Take in a part of the answer's body."""
        for data in self._events.feed(piece):
            if data == b"[DONE]":
                continue
            event = _decoder.decode(data)
            for choice in event.choices:
                if choice.delta is not None and choice.delta.content:
                    self.first_s = self.first_s or time.monotonic()
                    self.answer += choice.delta.content
            if event.usage is not None:
                details = event.usage.prompt_tokens_details
                self.prompt_tokens = event.usage.prompt_tokens or 0
                self.cached_tokens = (details and details.cached_tokens) or 0


class _Chats:
    """Conversations that begin at random times, and go on after each answer."""

    def __init__(self, rate: float, seconds: float, seed: int) -> None:
        self._rate = rate
        self._seconds = seconds
        self._workload = ChatWorkload(seed)
        self._words = np.random.default_rng(seed)
        self._systems: dict[int, str] = {}
        self._turns: list[ChatTurn] = []
        self._counts_from = 0.0
        self._num_prompt_tokens: list[list[float]] = []  # of each replica, at both times

    async def run(self, urls: Sequence[str], stacks: Sequence[Stack]) -> None:
        """Send everything, and wait for all answers. Raises: EngineError if all fail."""
        clients = [HttpClient(urlsplit(url), NO_HEADERS) for url in urls]
        targets = cycle(clients)
        begin = time.monotonic()
        end, self._counts_from = begin + self._seconds, begin + _WARM_SHARE * self._seconds
        metrics = [f"{stack.http_address}/metrics" for stack in stacks]

        async def converse(conversation: Conversation) -> None:
            messages, known = self._opening(conversation)  # known: characters, of others
            num_known = 0  # tokens, of the turns before
            while time.monotonic() < end:
                turn_len, answer_len = self._workload.turn(conversation)
                messages.append({"role": "user", "content": self._text(turn_len)})
                turn = ChatTurn(known / sum(len(each["content"]) for each in messages))
                await self._send(turn, next(targets), messages, answer_len)
                if num_known and turn.prompt_tokens:
                    turn.ideal_share = min(1.0, num_known / turn.prompt_tokens)
                num_known = turn.prompt_tokens + answer_len
                messages.append({"role": "assistant", "content": turn.answer})
                pause_s = self._workload.pause_s(conversation)
                if turn.failure is not None or pause_s is None:
                    return
                await asyncio.sleep(_PAUSE_SHARE * pause_s)

        async def count() -> None:
            await asyncio.sleep(_WARM_SHARE * self._seconds)
            self._num_prompt_tokens.append(await asyncio.to_thread(_prompt_tokens, metrics))

        async with asyncio.TaskGroup() as group:
            group.create_task(count())
            while time.monotonic() < end:
                group.create_task(converse(self._workload.conversation()))
                await asyncio.sleep(self._workload.time_to_next_s(self._rate))
        self._num_prompt_tokens.append(await asyncio.to_thread(_prompt_tokens, metrics))
        for client in clients:
            client.close()
        if all(turn.failure for turn in self._turns):
            raise cannot_measure(f"every request failed, the last one: {self._turns[-1].failure}")

    def row(self, router: str, num_replicas: int) -> Row:
        """The figures of the counted requests."""
        counted = [turn for turn in self._turns if turn.sent_s >= self._counts_from]
        good = [turn for turn in counted if turn.failure is None and turn.first_s is not None]
        first_ms = [1e3 * ((turn.first_s or 0.0) - turn.sent_s) for turn in good]
        p50, p95, p99 = np.percentile(first_ms, (50, 95, 99))
        num_prompt = sum(turn.prompt_tokens for turn in good)
        hits = sum(turn.cached_tokens for turn in good) / num_prompt
        ideal = sum(turn.ideal_share * turn.prompt_tokens for turn in good) / num_prompt
        before, after = np.array(self._num_prompt_tokens)
        per = after - before
        return {
            "benchmark": "conversations",
            "is_simulated": True,
            "router": router,
            "replicas": num_replicas,
            "requests": len(counted),
            "failed": len(counted) - len(good),
            "hit_percent": round(100 * hits, 2),
            "hit_over_ideal": round(hits / ideal, 3),
            "most_over_mean": round(float(per.max() / per.mean()), 3),
            "ttft_p50_ms": round(float(p50), 1),
            "ttft_p95_ms": round(float(p95), 1),
            "ttft_p99_ms": round(float(p99), 1),
        }

    async def _send(
        self,
        turn: ChatTurn,
        client: HttpClient,
        messages: Sequence[dict[str, str]],
        answer_len: int,
    ) -> None:
        body = {
            "model": _MODEL_NAME,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": answer_len,
            "ignore_eos": True,
            "temperature": 0,
        }
        content = msgspec.json.encode(body)
        self._turns.append(turn)
        try:
            await client.exchange("POST", "/v1/chat/completions", content, turn.feed)
        except RequestFailedError as error:
            turn.failure = str(error)

    def _opening(self, conversation: Conversation) -> tuple[list[dict[str, str]], int]:
        """The system prompt that it shares with others, or a first turn of its own; and how many of
        its characters others have sent before.
        """
        if conversation.system is None:
            own = {"role": "user", "content": self._text(conversation.length)}
            return [own, {"role": "assistant", "content": "Go on."}], 0
        is_known = conversation.system in self._systems
        if not is_known:
            self._systems[conversation.system] = self._text(conversation.length)
        text = self._systems[conversation.system]
        return [{"role": "system", "content": text}], len(text) if is_known else 0

    def _text(self, num_tokens: int) -> str:
        """Words of about so many tokens: one of three letters takes two."""
        letters = self._words.integers(0, len(_LETTERS), (max(1, num_tokens // 2), 3))
        return " ".join(["".join([_LETTERS[at] for at in word]) for word in letters.tolist()])


def _prompt_tokens(urls: Sequence[str]) -> list[float]:
    """How many tokens of prompts each replica has accepted so far. urls: of its metrics."""
    found = []
    for url in urls:
        with urllib.request.urlopen(url) as page:  # noqa: S310 - an address of this machine
            lines = page.read().decode().splitlines()
        values = [line.split()[-1] for line in lines if line.startswith(_PROMPT_TOKENS)]
        found.append(sum(map(float, values)))
    return found
