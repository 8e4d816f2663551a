"""docs/walk.md against a request: each function that it names is there, and is called."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import shutil
import sys
import tempfile
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import msgspec
import pytest
import zmq
from tests.helpers.front_app import app_over
from tests.helpers.mini_stack import MODEL, MiniStack
from tests.helpers.pages import ROOT
from tests.helpers.played_prompts import Child
from tokenizers import Tokenizer

from slipstream import Client
from slipstream.client.connection.loop_io import LoopIO
from slipstream.demo_model import MODEL_PATH
from slipstream.http.config import Limits
from slipstream.http.server.server import Server
from slipstream.stack.children.listeners import Listeners
from slipstream_ipc.messages import Render
from slipstream_worker.detokenizer.compiler import compile_table
from slipstream_worker.detokenizer.factory import TableDetokenizerFactory
from slipstream_worker.tokenizer.client import TokenizerClient
from slipstream_worker.tokenizer.process import TokenizerConfig, chat_traits, prepare
from slipstream_worker.tokenizer.prompt_rendering import render

PAGE = (ROOT / "docs" / "walk.md").read_text()
WALKED, _, OTHERS = PAGE.partition("\n## Other ways\n")
PACKAGES = ["api", "ipc", "engine_core", "output_worker"]
FILES = [
    each.relative_to(ROOT)
    for package in PACKAGES
    for each in (ROOT / package).rglob("*.py*")
    if each.suffix != ".pyc"
]
MESSAGES = [{"role": "user", "content": "What are lambdas?"}]
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
LIMITS: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "temperature": 0}


def named(text: str) -> list[tuple[str, str]]:
    """The functions and classes that a part of the page names: the end of a path, and the name."""
    found = re.findall(r"`([\w/]+\.pyi?)::([\w.]+)`", text)
    return list(dict.fromkeys(found))


def file_of(end: str) -> Path:
    """The one file whose path ends so, from the root."""
    [file] = [each for each in FILES if f"/{each.as_posix()}".endswith(f"/{end}")]
    return file


def names_in(file: Path) -> set[str]:
    """Of its functions, classes and their methods."""
    tree = ast.parse((ROOT / file).read_bytes())
    names = set()
    for each in tree.body:
        if isinstance(each, FUNCTION | ast.ClassDef):
            names.add(each.name)
        if isinstance(each, ast.ClassDef):
            methods = [it for it in each.body if isinstance(it, FUNCTION)]
            names |= {f"{each.name}.{method.name}" for method in methods}
    return names


class WalkedStack(MiniStack):
    """A stack whose worker asks a tokenizer process, which is stepped like the rest."""

    def start_worker(self) -> None:
        address = f"ipc://{self.directory}/prompts"
        config = TokenizerConfig(
            tokenizer=str(MODEL_PATH), address=address, cache_dir=str(self.directory)
        )
        self._loaded, ready = prepare(config)
        assert not ready.error
        self._traits = chat_traits(self._loaded, ready)
        with mock.patch.object(TokenizerClient, "_start", return_value=Child(1)):
            self.prompts = TokenizerClient(self.context, address, {})  # type: ignore[assignment]
        self._socket = self.context.socket(zmq.PAIR)
        self._socket.connect(address)
        self._socket.send(msgspec.msgpack.encode(msgspec.structs.replace(ready, pid=1)))
        super().start_worker()

    def step(self) -> None:
        super().step()
        while self._socket.poll(0):
            request = msgspec.msgpack.decode(self._socket.recv(), type=Render)
            answer = render(self._loaded, request, self._traits)
            self._socket.send(msgspec.msgpack.encode(answer))

    def close(self) -> None:
        self._socket.close(linger=0)
        super().close()


class Calls:
    """The functions that are called, in all threads that start meanwhile."""

    def __init__(self) -> None:
        self._codes: set[CodeType] = set()

    def __enter__(self) -> Calls:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            self._codes.add(frame.f_code)

    def names(self) -> set[tuple[str, str]]:
        """Of the packages: file, from the root, and qualified name."""
        found = set()
        for code in self._codes:
            path = Path(code.co_filename)
            if path.is_relative_to(ROOT):
                found.add((path.relative_to(ROOT).as_posix(), code.co_qualname))
        return found


async def _walk(stack: MiniStack, calls: Calls) -> tuple[bytes, str]:
    """What a chat over HTTP answers, and one from Python."""
    is_over = asyncio.Event()

    async def step() -> None:
        while not is_over.is_set():
            stack.step()
            await asyncio.sleep(0)

    def ask() -> str:
        with Client(stack.client_address) as client:
            return "".join(delta.text for delta in client.stream(MESSAGES, **LIMITS))

    io = LoopIO(stack.client_address, 10.0)
    server = Server(app_over(io, str(MODEL_PATH)), Limits())
    listeners = Listeners.at("127.0.0.1", 0)
    server.listen(listeners)
    stepping = asyncio.ensure_future(step())
    try:
        await io.connect()
        server.begin_waiting()
        body: dict[str, Any] = {"messages": MESSAGES, "stream": True, "stop": ["~~"], **LIMITS}
        content = json.dumps(body).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(content)
        with calls:
            reader, writer = await asyncio.open_connection("127.0.0.1", listeners.port)
            writer.write(head + content)
            streamed = await reader.read()
            writer.close()
            text = await asyncio.to_thread(ask)
    finally:
        is_over.set()
        await stepping
        server.stop_listening()
        await io.close()
        await server.close()
    return streamed, text


@pytest.fixture(scope="module")
def called() -> set[tuple[str, str]]:
    """The functions of the packages that a chat over HTTP and one from Python call."""
    folder = Path(tempfile.mkdtemp(prefix="walk-"))
    tokenizer: Any = Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))
    detokenizers = TableDetokenizerFactory(compile_table(tokenizer))
    stack = WalkedStack(folder, MODEL, tokenizer, detokenizers)
    calls = Calls()
    try:
        streamed, text = asyncio.run(_walk(stack, calls))
    finally:
        stack.close()
        shutil.rmtree(folder)
    assert streamed.startswith(b"HTTP/1.1 200 ")
    assert b'"finish_reason":"length"' in streamed
    assert b"data: [DONE]" in streamed
    assert text
    return calls.names()


def test_the_page_names_enough_to_be_a_walk() -> None:
    assert len(named(WALKED)) > 70
    assert len(PAGE.splitlines()) <= 120


@pytest.mark.parametrize(("end", "name"), named(PAGE))
def test_what_the_page_names_is_there(end: str, name: str) -> None:
    assert name in names_in(file_of(end))


@pytest.mark.parametrize(("end", "name"), named(WALKED))
def test_a_request_calls_what_the_page_says(
    end: str, name: str, called: set[tuple[str, str]]
) -> None:
    assert (file_of(end).as_posix(), name) in called
