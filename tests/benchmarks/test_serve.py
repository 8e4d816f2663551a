"""`slipstream bench serve` against a server of the tests' own, which can do everything wrong."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from tests.helpers.patience import PATIENCE_S
from tests.helpers.stacks import spareless_stack

from slipstream.cli.main import main

DONE = b"data: [DONE]\n\n"


@dataclass
class Call:
    """A request that the server was sent, and the way back."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    number: int  # among the requests for answers
    is_first: bool  # on its connection
    writer: asyncio.StreamWriter

    def head(self, status: int = 200, kind: str = "text/event-stream", **headers: str) -> None:
        fields = {"content_type": kind, "transfer_encoding": "chunked", **headers}
        lines = [f"{name.replace('_', '-')}: {value}" for name, value in fields.items() if value]
        self.writer.write("\r\n".join([f"HTTP/1.1 {status} X", *lines, "", ""]).encode())

    def chunk(self, data: bytes) -> None:
        """A chunk of the body, as HTTP frames it; nothing ends the body."""
        self.writer.write(b"%x\r\n%s\r\n" % (len(data), data))

    def send(self, data: bytes, status: int = 200, kind: str = "application/json") -> None:
        """A whole answer that is no stream."""
        self.head(status, kind, transfer_encoding="", content_length=str(len(data)))
        self.writer.write(data)

    async def stream(self, *events: bytes) -> None:
        """A whole answer, an HTTP chunk to an event."""
        self.head()
        for event in events:
            self.chunk(event)
        self.chunk(b"")

    @property
    def num_tokens(self) -> int:
        return self.body["max_tokens"]

    @property
    def wants_usage(self) -> bool:
        return self.body.get("stream_options", {}).get("include_usage", False)


Script = Callable[[Call], Awaitable[None]]


def event(text: str | None, finish: str | None = None, **fields: Any) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
    body = {"id": "cmpl-1", "choices": [choice], "usage": None, **fields}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion}


def usage_event(prompt: int, completion: int) -> bytes:
    body = {"id": "cmpl-1", "choices": [], "usage": usage(prompt, completion)}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def answer_to(call: Call) -> list[bytes]:
    """A token to an event, as servers answer."""
    events = [event(f" {number}") for number in range(call.num_tokens - 1)]
    events.append(event(" end", "length"))
    if call.wants_usage:
        events.append(usage_event(len(call.body["prompt"]), call.num_tokens))
    return [*events, DONE]


async def well(call: Call) -> None:
    """Answer as one should."""
    await call.stream(*answer_to(call))


class FakeOpenAI:
    """A server in a thread; `script` answers each request for an answer."""

    def __init__(self, script: Script) -> None:
        self.calls: list[Call] = []
        self.url = ""
        self._script = script
        self._errors: list[BaseException] = []
        self._loop = asyncio.new_event_loop()
        self._is_over = asyncio.Event()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(PATIENCE_S)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._is_over.set)
        self._thread.join(PATIENCE_S)
        assert not self._errors, self._errors

    def _run(self, started: threading.Event) -> None:
        async def run() -> None:
            server = await asyncio.start_server(self._connected, "127.0.0.1", 0, backlog=1024)
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            started.set()
            await self._is_over.wait()
            server.close()

        self._loop.run_until_complete(run())
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_first = True
        try:
            while not writer.is_closing():
                first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[:-2]
                headers = dict(line.lower().split(": ", 1) for line in lines)
                content = await reader.readexactly(int(headers.get("content-length", 0)))
                body = json.loads(content) if content else {}
                call = Call(first.split()[1], headers, body, len(self.calls), is_first, writer)
                if call.path.endswith("/v1/models"):
                    call.send(b'{"object": "list", "data": [{"id": "fake-1"}, {"id": "fake-2"}]}')
                else:
                    self.calls.append(call)
                    await self._script(call)
                    is_first = False
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        except BaseException as error:
            self._errors.append(error)
        finally:
            writer.transport.abort() if writer.is_closing() else writer.close()


@pytest.fixture
def serve() -> Iterator[Callable[[Script], FakeOpenAI]]:
    """Makes servers of scripts; they end with the test."""
    servers: list[FakeOpenAI] = []

    def start(script: Script) -> FakeOpenAI:
        servers.append(FakeOpenAI(script))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def rows(tmp_path):
    """Run the benchmark; its rows."""

    def run(*options: str, code: int = 0) -> list[dict[str, Any]]:
        path = tmp_path / "rows.json"
        common = ["--input-len", "7", "--output-len", "5", "--timeout", str(PATIENCE_S)]
        assert main(["bench", "serve", *common, *options, "--json", str(path)]) == code
        return json.loads(path.read_text())

    return run


# ---- what is measured ----------------------------------------------------------------------


def test_a_row_and_a_table(serve, rows, capsys):
    server = serve(well)
    (row,) = rows("--url", server.url, "--num-requests", "6", "--pid", str(os.getpid()))
    assert row["model"] == "fake-1"
    assert row["target"] == f"{server.url}/v1/completions"
    assert (row["completed_requests"], row["failed_requests"]) == (6, 0)
    assert (row["output_tokens"], row["prompt_tokens"]) == (30, 42)
    assert row["tokens_counted_by"] == "usage"
    assert row["chunks_per_token"] == 1.0
    assert row["request_rate"] is None
    assert 0 < row["ttft_mean_ms"] <= 1e3 * row["e2e_mean_s"]
    assert row["total_tokens_per_s"] > row["output_tokens_per_s"] > row["requests_per_s"] > 0
    assert row["client_cpu_us_per_token"] > 0
    assert row["server_cpu_us_per_token"] >= 0
    assert not any(isinstance(value, dict | list) for value in row.values())
    shown = capsys.readouterr().out
    assert "6 requests, all at once, 7 + 5 tokens, token ids, streamed" in shown
    for name in ("TTFT", "TPOT", "ITL", "E2E", "client CPU", "server CPU", "(usage)"):
        assert name in shown
    assert "failed" not in shown


def test_a_client_that_is_the_bottleneck_says_so(serve, rows, capsys, monkeypatch):
    monkeypatch.setattr("slipstream_bench.serve._BUSY_PERCENT", -1.0)
    rows("--url", serve(well).url, "--num-requests", "2")
    assert capsys.readouterr().err.count("the client was the bottleneck") == 1


def test_what_is_sent(serve, rows):
    server = serve(well)
    options = ["--temperature", "0.5", "--logprobs", "3", "--api-key", "secret", "--model", "mine"]
    rows("--url", f"{server.url}/prefix/v1/", "--num-requests", "3", "--warmup", "0", *options)
    probe, *calls = server.calls
    assert probe.num_tokens == 1
    for call in calls:
        assert call.path == "/prefix/v1/completions"
        assert call.headers["authorization"] == "bearer secret"
        prompt = call.body.pop("prompt")
        assert len(prompt) == 7
        assert all(100 <= token_id < 1000 for token_id in prompt)
        assert call.body == {
            "model": "mine",
            "max_tokens": 5,
            "temperature": 0.5,
            "logprobs": 3,
            "stream": True,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }


def test_chat_is_asked_with_words(serve, rows):
    async def script(call: Call) -> None:
        role = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
        deltas = [{"choices": [{"delta": {"content": " x"}}]}] * call.num_tokens
        deltas.append({"choices": [{"delta": {}, "finish_reason": "length"}]})
        told = [b"data: " + json.dumps(one).encode() + b"\n\n" for one in (role, *deltas)]
        await call.stream(*told, usage_event(19, call.num_tokens), DONE)

    server = serve(script)
    load = ["--num-requests", "2", "--endpoint", "chat", "--no-ignore-eos", "--logprobs", "2"]
    (row,) = rows("--url", server.url, *load)
    assert (row["prompt_form"], row["prompt_tokens"]) == ("text", 38)
    assert row["chunks_per_token"] == 1.0  # the role is no content
    call = server.calls[-1]
    assert call.path == "/v1/chat/completions"
    ((message),) = call.body["messages"]
    assert message["role"] == "user"
    assert len(message["content"].split()) == 7
    assert (call.body["logprobs"], call.body["top_logprobs"]) == (True, 2)
    assert "ignore_eos" not in call.body


class Clock:
    """Stands for the module `time` where answers are read: it stands still until it is set on."""

    def __init__(self) -> None:
        self._now_s = 1000.0
        self._was_read = threading.Semaphore(0)

    def perf_counter(self) -> float:
        self._was_read.release()
        return self._now_s

    def set_on(self, seconds: float) -> None:
        """Forget who has read it till now."""
        while self._was_read.acquire(blocking=False):
            pass
        self._now_s += seconds

    async def read(self) -> None:
        """Until somebody has read what it was set to."""
        assert await asyncio.to_thread(self._was_read.acquire, timeout=PATIENCE_S)


def test_latencies_are_those_of_chunks_with_content(serve, rows, monkeypatch):
    clock = Clock()
    monkeypatch.setattr("slipstream_bench.common.load.openai_target.time", clock)

    async def script(call: Call) -> None:
        call.head()
        for one in (event(""), event("a"), event("b"), event(None), event("", "length"), DONE):
            clock.set_on(0.02)
            call.chunk(one)
            await clock.read()
        call.chunk(b"")

    (row,) = rows("--url", serve(script).url, "--num-requests", "1", "--percentiles", "50,99.9")
    assert row["ttft_mean_ms"] == 40
    assert row["itl_mean_ms"] == 20
    assert row["itl_mean_ms"] == row["itl_p50_ms"] == row["itl_p99_9_ms"]  # one gap
    assert row["e2e_mean_s"] == 0.1
    assert row["tpot_mean_ms"] == 60 / 4
    assert row["chunks_per_token"] == 2 / 5
    assert row["tokens_counted_by"] == "requested"


def test_answers_that_are_no_streams(serve, rows):
    async def script(call: Call) -> None:
        assert call.body["stream"] is False
        assert "stream_options" not in call.body
        choices = [{"text": "a b c", "finish_reason": "length"}]
        call.send(json.dumps({"choices": choices, "usage": usage(7, call.num_tokens)}).encode())

    (row,) = rows("--url", serve(script).url, "--num-requests", "3", "--no-stream")
    assert (row["output_tokens"], row["is_streamed"]) == (15, False)
    assert row["e2e_mean_s"] > 0
    assert [row["ttft_mean_ms"], row["itl_p99_ms"], row["chunks_per_token"]] == [None] * 3


def test_events_are_read_however_they_are_cut(serve, rows):
    async def script(call: Call) -> None:
        body = b": keep-alive\n\n" + b"".join(answer_to(call)).replace(b"\n", b"\r\n")
        body = body.replace(b"data: {", b"event: x\r\ndata:{", 1)
        call.head()
        if call.number % 3 == 0:  # an HTTP chunk to a byte
            for byte in body:
                call.chunk(bytes([byte]))
        elif call.number % 3 == 1:  # all events in one
            call.chunk(body)
        else:  # a chunk over several segments
            call.writer.write(b"%x\r\n" % len(body))
            for start in range(0, len(body), 11):
                call.writer.write(body[start : start + 11])
                await call.writer.drain()
                await asyncio.sleep(0)
            call.writer.write(b"\r\n")
        call.chunk(b"")

    (row,) = rows("--url", serve(script).url, "--num-requests", "12")
    assert (row["completed_requests"], row["output_tokens"]) == (12, 60)
    assert row["chunks_per_token"] == 1.0


def test_tokens_are_counted_by_chunks_for_want_of_better(serve, rows, capsys):
    async def script(call: Call) -> None:
        await call.stream(event("a"), event("b", "stop"), DONE)

    (row,) = rows("--url", serve(script).url, "--num-requests", "2")
    assert (row["output_tokens"], row["tokens_counted_by"]) == (4, "chunks")
    assert "no usage, ended early" in capsys.readouterr().out


# ---- the load ------------------------------------------------------------------------------


def test_no_more_than_concurrency_at_a_time_on_connections_that_are_kept(serve, rows):
    here: list[asyncio.Event] = []
    most = 0
    connections = Counter()

    async def script(call: Call) -> None:
        nonlocal most
        connections[call.writer] += 1
        if call.num_tokens > 1:  # no probe
            gate = asyncio.Event()
            here.append(gate)
            most = max(most, len(here))
            if len(here) == 3:  # all go on when three are there: fewer would wait for ever
                for one in here:
                    one.set()
                here.clear()
            await gate.wait()
        await well(call)

    server = serve(script)
    load = ["--num-requests", "9", "--concurrency", "3", "--warmup", "0"]
    (row,) = rows("--url", server.url, *load)
    assert (row["completed_requests"], row["concurrency"], most) == (9, 3, 3)
    assert len(connections) == 3


def test_a_rate_spreads_the_requests(serve, rows, capsys):
    (row,) = rows("--url", serve(well).url, "--num-requests", "20", "--request-rate", "200")
    assert row["request_rate"] == 200
    assert row["completed_requests"] == 20
    assert "20 requests, 200.0 a second (Poisson)" in capsys.readouterr().out


def test_runs_have_prompts_of_their_own_and_their_medians_are_told(serve, rows, capsys):
    server = serve(well)
    load = ["--num-requests", "4", "--runs", "3", "--range-ratio", "0.5"]
    found = rows("--url", server.url, *load)
    assert [row["run"] for row in found] == [1, 2, 3, "median"]
    speeds = [row["output_tokens_per_s"] for row in found]
    assert speeds[-1] == sorted(speeds[:-1])[1]
    assert capsys.readouterr().out.startswith("medians of 3 runs")
    prompts = [call.body["prompt"] for call in server.calls]
    measured = prompts[-12:]
    assert all(measured.count(prompt) == 1 for prompt in measured)
    assert {len(prompt) for prompt in measured} <= set(range(3, 12))

    again = serve(well)
    rows("--url", again.url, *load)
    assert sorted(call.body["prompt"] for call in again.calls) == sorted(prompts)


def test_a_dataset(serve, tmp_path):
    path = tmp_path / "load.jsonl"
    lines = [{"prompt": "Once", "max_tokens": 2}, {"prompt": [5, 6]}]
    lines.append(
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "x"}]}
    )
    path.write_text("\n".join(json.dumps(line) for line in lines))
    server = serve(well)
    common = ["bench", "serve", "--url", server.url, "--output-len", "3", "--dataset", str(path)]
    assert main([*common, "--num-requests", "4", "--warmup", "0", "--concurrency", "1"]) == 0
    asked = [(call.body["prompt"], call.num_tokens) for call in server.calls[1:]]
    assert asked == [("Once", 2), ([5, 6], 3), ("Hi", 3), ("Once", 2)]
    assert main([*common, "--endpoint", "chat"]) == 2  # which takes no ids


# ---- servers that take less ----------------------------------------------------------------


def test_a_server_that_refuses_token_ids_is_asked_with_text(serve, rows, capsys):
    async def script(call: Call) -> None:
        if isinstance(call.body["prompt"], str):
            await call.stream(event("x", "length"), usage_event(8, call.num_tokens), DONE)
        else:
            call.send(b'{"error": {"message": "prompt must be a string"}}', 400)

    (row,) = rows("--url", serve(script).url, "--num-requests", "2")
    assert (row["prompt_form"], row["prompt_tokens"]) == ("text", 16)
    assert "text prompts" in capsys.readouterr().out


def test_a_server_that_refuses_usage_is_not_asked_for_it(serve, rows):
    async def script(call: Call) -> None:
        if "stream_options" in call.body:
            call.send(b'{"detail": "unknown field stream_options"}', 422)
        else:
            await well(call)

    (row,) = rows("--url", serve(script).url, "--num-requests", "2")
    assert (row["prompt_form"], row["tokens_counted_by"]) == ("token_ids", "requested")
    assert (row["output_tokens"], row["prompt_tokens"]) == (10, 14)


def test_a_server_that_refuses_everything(serve, capsys):
    async def script(call: Call) -> None:
        call.send(b'{"error": "never"}', 400)

    assert main(["bench", "serve", "--url", serve(script).url]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "http_400: " in shown.err
    assert "never" in shown.err
    assert shown.err.count("\n") == 1


def test_nobody_there(capsys):
    assert main(["bench", "serve", "--url", "http://127.0.0.1:1"]) == 1
    shown = capsys.readouterr().err
    assert "slipstream bench serve: no model's name from /v1/models (connect: " in shown
    assert shown.count("\n") == 1


# ---- requests that fail --------------------------------------------------------------------


async def refuse(call: Call) -> None:
    call.send(b'{"error": {"message": "too much to do"}}', 503)


async def break_down(call: Call) -> None:
    call.send(b"<html>oh</html>", 500, "text/html")


async def vanish_in_the_middle(call: Call) -> None:
    call.head()
    call.chunk(event("a"))
    await call.writer.drain()
    call.writer.close()


async def vanish_before_the_first_byte(call: Call) -> None:
    call.writer.close()


async def say_nonsense(call: Call) -> None:
    await call.stream(event("a"), b"data: {oops\n\n", DONE)


async def say_another_type(call: Call) -> None:
    await call.stream(b'data: {"choices": [{"text": 5}]}\n\n', DONE)


async def stop_short(call: Call) -> None:
    await call.stream(event("a"), event("b"))


async def tell_an_error(call: Call) -> None:
    await call.stream(event("a"), b'data: {"error": {"message": "engine died"}}\n\n', DONE)


async def abort(call: Call) -> None:
    await call.stream(event("a"), event("", "abort"), DONE)


async def speak_no_http(call: Call) -> None:
    call.writer.write(b"SSH-2.0-OpenSSH\r\n")


@pytest.mark.parametrize(
    ("fail", "reason", "said"),
    [
        (refuse, "http_503", "too much to do"),
        (break_down, "http_500", "<html>oh</html>"),
        (vanish_in_the_middle, "disconnected", "the connection was closed"),
        (vanish_before_the_first_byte, "disconnected", "the connection was closed"),
        (say_nonsense, "malformed", "{oops"),
        (say_another_type, "malformed", "Expected `str | null`, got `int`"),
        (stop_short, "incomplete", "neither a finish_reason nor [DONE]"),
        (tell_an_error, "error_event", "engine died"),
        (abort, "finish_abort", ""),
        (speak_no_http, "malformed", ""),
    ],
)
def test_failures_are_counted_by_reason_and_in_no_other_number(
    serve, rows, capsys, fail, reason, said
):
    async def script(call: Call) -> None:
        is_measured = call.num_tokens == 5
        await (fail if is_measured and (call.number % 2 or fail_always) else well)(call)

    fail_always = False
    (row,) = rows("--url", serve(script).url, "--num-requests", "8")
    assert (row["completed_requests"], row["failed_requests"]) == (4, 4)
    assert row[f"failed_{reason}"] == 4
    assert (row["output_tokens"], row["chunks_per_token"]) == (20, 1.0)
    shown = capsys.readouterr().out
    assert "failed requests, in none of the numbers: 4" in shown
    assert f"  {reason}: 4" in shown
    assert said in shown

    fail_always = True
    (row,) = rows("--url", serve(script).url, "--num-requests", "3", "--warmup", "0", code=1)
    assert (row["completed_requests"], row[f"failed_{reason}"]) == (0, 3)
    assert (
        row["output_tokens_per_s"] is row["ttft_mean_ms"] is row["client_cpu_us_per_token"] is None
    )


def test_an_answer_that_does_not_end_is_given_up(serve, rows):
    async def script(call: Call) -> None:
        if call.number % 2:
            call.head()
            call.chunk(event("a"))
            await asyncio.Event().wait()
        await well(call)

    load = ["--num-requests", "4", "--timeout", "1", "--warmup", "0"]
    server = serve(script)
    (row,) = rows("--url", server.url, *load)
    assert (row["completed_requests"], row["failed_timeout"]) == (2, 2)


def test_a_kept_connection_that_was_closed_is_no_failure(serve, rows):
    async def script(call: Call) -> None:
        if call.is_first:
            await well(call)
        else:
            call.writer.close()

    server = serve(script)
    (row,) = rows("--url", server.url, "--num-requests", "4", "--concurrency", "1")
    assert (row["completed_requests"], row["failed_requests"]) == (4, 0)


def test_a_body_that_ends_with_its_connection(serve, rows):
    async def script(call: Call) -> None:
        call.head(transfer_encoding="", connection="close")
        for one in answer_to(call):
            call.writer.write(one)
        await call.writer.drain()
        call.writer.close()

    (row,) = rows("--url", serve(script).url, "--num-requests", "4", "--concurrency", "2")
    assert (row["completed_requests"], row["output_tokens"]) == (4, 20)


# ---- our own address -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with spareless_stack("simulated:step_ms=1") as stack:
        yield stack.address


@pytest.mark.parametrize("options", [[], ["--endpoint", "chat"], ["--no-stream"]])
def test_the_same_report_of_our_own_address(address, rows, capsys, options):
    (row,) = rows("--address", address, "--num-requests", "6", "--concurrency", "3", *options)
    assert row["target"] == address
    assert row["model"].startswith("simulated")
    assert (row["completed_requests"], row["output_tokens"]) == (6, 30)
    assert row["tokens_counted_by"] == "tokens"
    assert (row["ttft_p99_ms"] is None) == ("--no-stream" in options)
    assert row["e2e_p99_s"] > 0
    assert "tokens were seen one by one" in capsys.readouterr().out


def test_our_own_address_refuses_what_cannot_be(address, capsys):
    options = ["--address", address, "--input-len", "1000000"]
    assert main(["bench", "serve", *options, "--num-requests", "1"]) == 2
    assert "slipstream bench serve: prompt: got " in capsys.readouterr().err


# ---- options that cannot be ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--num-requests", "0"], "--num-requests: got 0, allowed: an integer >= 1"),
        (["--request-rate", "0"], "--request-rate: got 0.0, allowed: "),
        (["--request-rate", "nan"], "--request-rate: got nan, allowed: "),
        (["--concurrency", "0"], "--concurrency: got 0, allowed: "),
        (["--range-ratio", "1"], "--range-ratio: got 1.0, allowed: a number >= 0 and < 1"),
        (["--percentiles", "50,100"], "--percentiles: got '50,100', allowed: "),
        (["--url", "localhost:8000"], "--url: got 'localhost:8000', allowed: http://HOST:PORT"),
        (["--url", "http://x:port"], "--url: got 'http://x:port', allowed: "),
        (
            ["--address", "ipc:///x", "--model", "m"],
            "--model: got 'm', allowed: nothing where --add",
        ),
        (["--dataset", "/none"], "--dataset: got '/none', allowed: a file that can be read"),
        (
            ["--dataset", "x", "--input-len", "5"],
            "--input-len: got 5, allowed: nothing where --data",
        ),
        (["--pid", "999999999"], "--pid: got 999999999, allowed: "),
    ],
)
def test_options_that_cannot_be_are_one_line_and_code_2(serve, capsys, options, said):
    url = [] if {"--url", "--address"} & set(options) else ["--url", serve(well).url]
    assert main(["bench", "serve", *url, *options]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"slipstream bench serve: {said}")
    assert shown.err.count("\n") == 1
