"""`slipstream chat` on a terminal: a pseudo-terminal with a real process at its other end."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.helpers.patience import PATIENCE_S
from tests.helpers.stacks import spareless_stack

from slipstream import Client
from slipstream.cli import chat as chat_command
from slipstream.cli.chat import ChatHistory
from slipstream.cli.main import main
from slipstream.cli.options.parser import Parser
from slipstream.demo_model import MODEL_NAME
from slipstream.errors import RequestError
from slipstream_ipc.messages import ChatMessage, Fault, SamplingParams

pytestmark = pytest.mark.process

BRIEF = ("--max-tokens", "5", "--temperature", "0")


@pytest.fixture(scope="module")
def address():
    with spareless_stack("simulated:step_ms=1,mode=chain") as stack:
        yield stack.address


class Chat:
    """A chat on a terminal. state: $XDG_STATE_HOME."""

    def __init__(self, address: str, state: Path, *options: str) -> None:
        self._fd, end = pty.openpty()
        self._text = ""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "slipstream", "chat", "--address", address, *options],
            stdin=end,
            stdout=end,
            stderr=end,
            start_new_session=True,
            env={**os.environ, "XDG_STATE_HOME": str(state), "TERM": "dumb"},
        )
        os.close(end)

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def await_text(self, text: str) -> str:
        """Read until `text` comes; returns what came before it."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in self._text:
            left = deadline - time.monotonic()
            assert select.select([self._fd], [], [], max(0.0, left))[0], self._text
            self._text += os.read(self._fd, 4096).decode().replace("\r\n", "\n")
        before, _, self._text = self._text.partition(text)
        return before

    def end(self) -> int:
        """The exit code, once it has ended."""
        return self._process.wait(PATIENCE_S)

    def close(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(PATIENCE_S)
        os.close(self._fd)


@pytest.fixture
def chat(address, tmp_path) -> Iterator[Chat]:
    running = Chat(address, tmp_path, *BRIEF)
    yield running
    running.close()


def answer(address: str, *turns: dict[str, str]) -> str:
    with Client(address) as client:
        return client.generate(list(turns), max_tokens=5, temperature=0).text


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_commands_on_a_terminal(chat, address, tmp_path):
    chat.await_text("/help shows what else there is\n> ")
    chat.type("/help\n")
    shown = chat.await_text("\n> ")
    assert all(command in shown for command in ("/help", "/clear", "/system", "/exit"))
    chat.type("hello\n")
    first = answer(address, said("user", "hello"))
    assert chat.await_text("\n> ") == f"hello\n{first}"
    chat.type("again\n")
    second = answer(address, said("user", "hello"), said("assistant", first), said("user", "again"))
    assert chat.await_text("\n> ") == f"again\n{second}"
    chat.type("/clear\n")
    chat.await_text("(a new conversation)\n> ")
    chat.type("hello\n")
    assert chat.await_text("\n> ") == f"hello\n{first}"
    chat.type("/system Be brief.\n")
    chat.await_text("(a new conversation with this system prompt)\n> ")
    chat.type("hello\n")
    brief = answer(address, said("system", "Be brief."), said("user", "hello"))
    assert chat.await_text("\n> ") == f"hello\n{brief}"
    chat.type("/system\n")
    chat.await_text("Be brief.\n> ")
    chat.type("/claer\n")
    chat.await_text("no command /claer; did you mean /clear?\n> ")
    chat.type("/exit\n")
    assert chat.end() == 0
    history = tmp_path / "slipstream" / "chat"
    assert history.stat().st_mode & 0o777 == 0o600
    assert "hello" in history.read_text().splitlines()


def test_lines_of_earlier_conversations_come_back_with_the_arrow_keys(chat, address, tmp_path):
    chat.await_text("\n> ")
    chat.type("hello\n")
    chat.await_text("\n> ")
    chat.type("\x04")  # Ctrl-D
    assert chat.end() == 0
    later = Chat(address, tmp_path, *BRIEF)
    try:
        later.await_text("\n> ")
        later.type("\x1b[A\n")  # arrow up
        later.await_text(answer(address, said("user", "hello")) + "\n")
    finally:
        later.close()


def test_a_history_that_cannot_be_written_is_no_hindrance(address, tmp_path):
    (tmp_path / "slipstream").write_text("a file where the folder would be")
    chat = Chat(address, tmp_path, "--max-tokens", "5")
    try:
        chat.await_text("\n> ")
        chat.type("/exit\n")
        assert chat.end() == 0
    finally:
        chat.close()


def run(address: str, *words: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """A chat beside a terminal: `given` is its standard input."""
    return subprocess.run(
        [sys.executable, "-m", "slipstream", "chat", *words, "--address", address, *BRIEF],
        input=given,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def test_commands_in_a_file_are_obeyed_and_its_paths_are_not(address):
    done = run(address, given="/system Be brief.\n/etc/hosts\n/clear\nhello\n/exit\nnever\n")
    brief = said("system", "Be brief.")
    path = answer(address, brief, said("user", "/etc/hosts"))
    assert done.stdout == f"{path}\n\n{answer(address, brief, said('user', 'hello'))}\n"
    assert done.stderr.splitlines() == [
        "(a new conversation with this system prompt)",
        "(a new conversation)",
    ]


@pytest.mark.parametrize("words", [["hello there"], ["-q", "hello there"], ["hello"]])
def test_a_question_is_answered_once(address, words):
    done = run(address, *words, given="never\n")
    text = answer(address, said("user", words[-1]))
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{text}\n", "")


def test_a_question_may_follow_the_model():
    parser = Parser(prog="slipstream chat", target="slipstream.cli.chat:add_chat")
    for words in (["gpt2", "hello"], ["gpt2", "-q", "hello"], ["--model", "gpt2", "hello there"]):
        arguments = parser.parse_args(words)
        question = chat_command._question_of(arguments)
        assert (arguments.model, question) == ("gpt2", words[-1])


@pytest.mark.parametrize(
    "text", ["a/b", "./hello", "simulated:step_ms=1", "simulated", "demo", "one"]
)
def test_what_is_spelled_as_a_model_or_is_served_is_one(text: str, monkeypatch) -> None:
    monkeypatch.setattr(chat_command, "served_names", lambda _: ("one",))
    parser = Parser(prog="slipstream chat", target="slipstream.cli.chat:add_chat")
    arguments = parser.parse_args([MODEL_NAME if text == "demo" else text])
    assert chat_command._question_of(arguments) is None


def test_a_model_that_was_downloaded_is_one(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    parser = Parser(prog="slipstream chat", target="slipstream.cli.chat:add_chat")
    words = ["gpt2", "--new-stack"]
    assert chat_command._question_of(parser.parse_args(words)) == "gpt2"
    folder = tmp_path / "models--gpt2" / "snapshots" / "1"
    folder.mkdir(parents=True)
    (folder / "config.json").touch()
    assert chat_command._question_of(parser.parse_args(words)) is None


def test_a_folder_with_a_space_in_its_name_is_a_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my model").mkdir()
    parser = Parser(prog="slipstream chat", target="slipstream.cli.chat:add_chat")
    arguments = parser.parse_args(["my model"])
    assert chat_command._question_of(arguments) is None
    assert arguments.model == "my model"


def test_a_word_that_is_no_model_may_be_a_question(capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["chat", "./hello", "--new-stack"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("slipstream chat: MODEL: got './hello', allowed: ")
    assert "`slipstream chat -q ./hello`" in shown


def test_images_are_shown_until_a_question_with_them_is_answered(capsys) -> None:
    asked: list[list[Any]] = []

    class Overloaded:
        """A client of a server that has no room at first."""

        def stream(self, turns: list[Any], *_: object, **__: object) -> list[Any]:
            asked.append(turns)
            if len(asked) == 1:
                raise RequestError(Fault("overloaded", "no room"))
            return [SimpleNamespace(text="A cat.")]

    client: Any = Overloaded()
    history = ChatHistory(client, SamplingParams(), None, images=[b"a file"])
    for question in ("What is it?", "What is this?", "Sure?"):
        history.answer(question)
    assert "no room" in capsys.readouterr().err
    shown = {"type": "image", "image": b"a file"}
    assert [turns[-1] for turns in asked] == [
        said_with(shown, "What is it?"),
        said_with(shown, "What is this?"),
        ChatMessage("user", "Sure?"),
    ]
    assert len(asked[-1]) == 3


def said_with(shown: dict[str, Any], text: str) -> dict[str, Any]:
    return {"role": "user", "content": [shown, {"type": "text", "text": text}]}
