"""`slipstream run-batch`: answers a file of requests, in OpenAI's batch format.

Requests are parsed and answered by the endpoints of the HTTP front (`http.endpoints`), without a
server.

- Answers are appended one line at a time, in the order of completion. A killed run leaves complete
  lines and at most one partial line, which the next run removes; requests with a line are skipped.
- A rejected or failed request gets an answer, too, with the status that a server would send.
- A line that cannot be written completely (full disk) is removed, and the run ends with the error.
- A run locks its output file.
- What is wrong with the files, the address or the model is reported before a stack is started and
  before any request is run; an output file made for such a run is removed.
- Where the engine is overloaded or restarting, a request waits and is tried again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import os
import secrets
import stat
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal

import msgspec
import uvloop
from msgspec import Raw, Struct
from tqdm import tqdm

from slipstream.cli.options.parser import Parser
from slipstream.cli.server_choice import access_of, add_client_options, running_or_started
from slipstream.client.connection.loop_io import LoopIO
from slipstream.client.endpoints import server_endpoint
from slipstream.client.placing.discovery import names_fleet
from slipstream.errors import BadRequestError, EngineError, wrong_option
from slipstream.http.api_errors import bad_field
from slipstream.http.auth import ApiKeys
from slipstream.http.config import Limits
from slipstream.http.endpoints.model_endpoints import ModelEndpoints
from slipstream.http.logprobs.vocabulary import TextsByModel
from slipstream.http.planning.served_model import tokenizer_of
from slipstream.http.response_encoding import Response
from slipstream_ipc.messages import Fault
from slipstream_ipc.transport.addresses import IPC
from slipstream_ipc.validation.field_types import field_error

URLS = ("/v1/completions", "/v1/chat/completions")

_CONCURRENCY = 256
_START_S = 60.0  # how long to wait for the engine, at the start and when it is lost
_PAUSE_S = 0.5  # before a rejected request is tried again
_MOST_PAUSES = 1200
_UNAVAILABLE = 503
_FIRST_ERROR = 400  # of HTTP's statuses
_SOME_FAILED = 3  # an exit code: all requests have answers, and some are errors
_MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # what a decoder raises


class BatchLine(Struct, frozen=True):
    """One line of the input file: a request."""

    custom_id: str
    method: Literal["POST"]
    url: str
    body: Raw


class _BatchStreams(Struct, frozen=True):
    """The field of a request body that is checked here."""

    stream: Any = None


class _BatchAnswer(Struct, frozen=True):
    status_code: int
    request_id: str
    body: Raw


class _Done(Struct, frozen=True):
    """One line of the output file: an answer."""

    id: str
    custom_id: str
    response: _BatchAnswer
    error: None = None


class _Status(Struct, frozen=True):
    status_code: int


class _Answered(Struct, frozen=True):
    """The fields that are read from a line of the output file."""

    custom_id: str
    response: _Status


def add_run_batch(parser: Parser) -> None:
    """Add the command's options."""
    parser.introduce(
        "IN OUT [MODEL] [options]",
        (
            "slipstream run-batch requests.jsonl answers.jsonl",
            "slipstream run-batch requests.jsonl answers.jsonl Qwen/Qwen3-0.6B --max-num-seqs 64",
        ),
    )
    parser.add_argument(
        "input",
        metavar="IN",
        help="requests in OpenAI's batch format: a line of JSON with custom_id, method, url, body",
    )
    parser.add_argument(
        "output",
        metavar="OUT",
        help="file for the answers; requests that have an answer there are skipped",
    )
    parser.add_argument(
        "--concurrency",
        type=int,
        metavar="N",
        default=_CONCURRENCY,
        help="number of requests that run at the same time (default: %(default)s)",
    )
    add_client_options(parser, addresses="ipc://PATH")
    parser.set_defaults(run=run_batch)


def run_batch(arguments: argparse.Namespace) -> int:
    """Answer the requests without an answer. Returns 0, or 3 if the answers of some are errors.

    Raises: BadRequestError, SlipstreamError, OSError.
    """
    if arguments.concurrency < 1:
        raise wrong_option("concurrency", arguments.concurrency, "an integer >= 1")
    if arguments.address is not None:
        _check_local(server_endpoint(arguments.address, **access_of(arguments)).address)
    ids = _checked_ids(Path(arguments.input))
    path = Path(arguments.output)
    is_new = not path.exists()
    with _opened_output(path, Path(arguments.input)) as output:
        _lock(output)
        done = set(_statuses(output))
        if not ids <= done:
            with contextlib.ExitStack() as server:
                try:
                    address = server.enter_context(running_or_started(arguments))
                    _check_local(server_endpoint(address, **access_of(arguments)).address)
                except BaseException:
                    if is_new:
                        path.unlink(missing_ok=True)
                    raise
                uvloop.run(_answer_all(arguments, address, output, ids, done))
        statuses = _statuses(output)
    num_failed = sum(statuses[custom_id] >= _FIRST_ERROR for custom_id in ids)
    if not num_failed:
        return 0
    sys.stderr.write(f"{arguments.prog}: {num_failed} of {len(ids)} failed: see {path}\n")
    return _SOME_FAILED


def _check_local(address: str) -> None:
    """Raises: BadRequestError for an address of another machine, or of several servers."""
    if not address.startswith(IPC) or names_fleet(address):
        raise wrong_option(
            "address", address, "one ipc:// address: a batch is run where the stack is"
        )


def read_lines(path: Path) -> Iterator[tuple[int, BatchLine]]:
    """The requests of a file with their line numbers. Raises: BadRequestError."""
    decoder = msgspec.json.Decoder(BatchLine)
    try:
        is_file = stat.S_ISREG(path.stat().st_mode)
        lines = open(path, "rb") if is_file else None  # noqa: SIM115 - closed below
    except OSError as error:
        raise wrong_option("IN", str(path), f"a file to read ({error.strerror})") from None
    if lines is None:  # it is read twice
        raise wrong_option("IN", str(path), "a regular file")
    with lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                request = decoder.decode(line)
            except msgspec.ValidationError as error:
                what = f"{where}: {field_error(error, BatchLine)}"
                raise BadRequestError(Fault("bad_request", what)) from None
            except _MALFORMED as error:
                allowed = f"JSON with custom_id, method (POST), url and body ({error})"
                given = line.decode(errors="replace").strip()
                raise wrong_option(where, given, allowed) from None
            if not bytes(request.body).startswith(b"{"):
                given = str(request.body, "utf-8", "replace")[:80]
                raise wrong_option(f"{where}: body", given, "an object")
            yield number, request


def _checked_ids(path: Path) -> set[str]:
    """The ids of all requests; checks the whole file. Raises: BadRequestError."""
    seen: set[str] = set()
    for number, line in read_lines(path):
        if line.custom_id in seen:
            where = f"{path}, line {number}: custom_id"
            raise wrong_option(where, line.custom_id, "one that no line before it has")
        seen.add(line.custom_id)
    return seen


def _opened_output(path: Path, given: Path) -> IO[bytes]:
    """The output file, unbuffered. Raises: BadRequestError."""
    if path.exists() and path.samefile(given):
        raise wrong_option("OUT", str(path), "another file than IN")
    try:
        return open(path, "a+b", buffering=0)
    except OSError as error:
        allowed = f"a file to write, in a folder that there is ({error.strerror})"
        raise wrong_option("OUT", str(path), allowed) from None


def _lock(output: IO[bytes]) -> None:
    """Lock the file for as long as it is open. Raises: BadRequestError."""
    try:
        fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise wrong_option("OUT", output.name, "a file that no other run writes to") from None


def append_line(output: IO[bytes], line: bytes) -> None:
    """Append a line completely or not at all.

    output: an unbuffered file to which only this process writes. Raises: OSError.
    """
    end = output.seek(0, os.SEEK_END)
    rest = memoryview(line)
    try:
        while rest:
            rest = rest[output.write(rest) :]
    except OSError:
        output.truncate(end)
        raise


def _statuses(output: IO[bytes]) -> dict[str, int]:
    """The statuses of the answers by id; removes a partial last line. Raises: BadRequestError."""
    decoder = msgspec.json.Decoder(_Answered)
    statuses: dict[str, int] = {}
    end = 0
    output.seek(0)
    with open(output.fileno(), "rb", closefd=False) as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                break
            end += len(line)
            try:
                answered = decoder.decode(line)
                statuses[answered.custom_id] = answered.response.status_code
            except _MALFORMED:
                what = f"{output.name}, line {number}"
                raise wrong_option(what, line[:80], "an answer, or no such file") from None
    output.truncate(end)
    return statuses


async def _answer_all(
    arguments: argparse.Namespace, address: str, output: IO[bytes], ids: set[str], done: set[str]
) -> None:
    io = LoopIO(address, _START_S)
    places = asyncio.Semaphore(arguments.concurrency)
    failures: list[BaseException] = []
    try:
        await io.connect()
        texts = TextsByModel(partial(tokenizer_of, io, None))
        endpoints = ModelEndpoints(io, ApiKeys(()), texts, Limits())
        with tqdm(total=len(ids), initial=len(done & ids), unit="request") as bar:

            async def one(line: BatchLine) -> None:
                try:
                    response = await _answer(endpoints, line)
                    answer = _BatchAnswer(response.status, f"req_{_name()}", Raw(response.body))
                    done_line = _Done(f"batch_req_{_name()}", line.custom_id, answer)
                    append_line(output, msgspec.json.encode(done_line) + b"\n")
                    bar.update()
                except Exception as error:
                    failures.append(error)
                finally:
                    places.release()

            async with asyncio.TaskGroup() as tasks:
                for _, line in read_lines(Path(arguments.input)):
                    if line.custom_id in done:
                        continue
                    await places.acquire()
                    if failures:
                        break
                    tasks.create_task(one(line))
        if failures:
            raise failures[0]
    finally:
        await io.close()


async def _answer(endpoints: ModelEndpoints, line: BatchLine) -> Response:
    """Answer one request. Raises: EngineError where the engine is unavailable for too long."""
    if line.url not in URLS:
        message = f"url: got {line.url[:100]!r}, allowed: {', '.join(URLS)}"
        return bad_field("url", message).response()
    try:
        if msgspec.json.decode(line.body, type=_BatchStreams).stream:
            message = "stream: got true, allowed: false or null: a batch has whole answers"
            return bad_field("stream", message).response()
    except _MALFORMED:
        pass  # the endpoint reports the error
    for _ in range(_MOST_PAUSES):
        response = await endpoints.answer(line.url, bytes(line.body))
        if response.status != _UNAVAILABLE:
            return response
        await asyncio.sleep(_PAUSE_S)
    why = "the engine takes no requests; run the command again to continue"
    raise EngineError(Fault("engine", why))


def _name() -> str:
    return secrets.token_hex(12)
