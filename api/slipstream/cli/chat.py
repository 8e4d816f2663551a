"""`slipstream chat`: a conversation in the terminal, or with one line of standard input for a turn.

- Ctrl-C ends an answer, whose text so far stays in the conversation; Ctrl-D ends the conversation.
- On a terminal, lines that begin with `/` are commands, and lines are kept for the next time.
- Where the conversation outgrows the model's length, its oldest turns are dropped.
- Only answers go to standard output, and on a terminal the prompt.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from slipstream.cli.connection import add_client_options, connected
from slipstream.cli.parser import Parser, one_line
from slipstream.cli.sampling_options import add_sampling, sampling_params_of
from slipstream.client.client import Client
from slipstream.errors import BadRequestError, RequestError
from slipstream.spelling import did_you_mean
from slipstream_ipc.messages import ChatMessage, SamplingParams

_MAX_HISTORY = 1000  # lines
_COMMANDS = {
    "/help": "show this list",
    "/clear": "forget the conversation so far",
    "/system": "TEXT: set the system prompt, and forget the conversation; without TEXT: show it",
    "/exit": "end the conversation; so does Ctrl-D",
}


def add_chat(parser: Parser) -> None:
    """Add the command's options."""
    parser.introduce(
        "[MODEL] [options]",
        ("slipstream chat", 'slipstream chat --system "Be brief." --temperature 0'),
    )
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    add_sampling(parser, max_tokens=None)
    add_client_options(parser)
    parser.set_defaults(run=chat)


def chat(arguments: argparse.Namespace) -> int:
    """Answer each line of input until its end."""
    params = sampling_params_of(arguments)
    is_terminal = sys.stdin.isatty()
    with connected(arguments) as client, _line_history(is_terminal):
        conversation = Conversation(client, params, arguments.system)
        if is_terminal:
            _tell(f"{client.model.name}: Ctrl-C ends an answer; /help shows what else there is")
        while True:
            try:
                line = input("> " if is_terminal else "")
            except EOFError:
                break
            except KeyboardInterrupt:
                _tell("\nCtrl-D ends the conversation")
                continue
            if is_terminal and line.startswith("/"):
                if line.strip() == "/exit":
                    return 0
                conversation.obey(line)
            elif line.strip():
                conversation.answer(line)
    if is_terminal:
        _tell("")
    return 0


class Conversation:
    """The turns of a conversation, and the client that answers them."""

    def __init__(self, client: Client, params: SamplingParams, system: str | None) -> None:
        self._client = client
        self._params = params
        self._system = system
        self._turns: list[ChatMessage] = []  # user, assistant, user, assistant, …

    def obey(self, line: str) -> None:
        """Carry out a command other than /exit."""
        command, _, text = line.strip().partition(" ")
        text = text.strip()
        if command == "/help":
            for name, meaning in _COMMANDS.items():
                _tell(f"{name:<8} {meaning}")
        elif command == "/clear":
            self._turns.clear()
            _tell("(a new conversation)")
        elif command == "/system" and text:
            self._system = text
            self._turns.clear()
            _tell("(a new conversation with this system prompt)")
        elif command == "/system":
            _tell(self._system or "(no system prompt)")
        else:
            hint = did_you_mean(command, _COMMANDS) or "; /help shows what there is"
            _tell(f"no command {command}{hint}")

    def answer(self, line: str) -> None:
        """Stream the answer to `line` to standard output."""
        self._turns.append(ChatMessage("user", line))
        while True:
            try:
                text = self._stream()
            except BadRequestError as error:
                if error.field == "prompt" and len(self._turns) > 1:
                    del self._turns[:2]
                    _tell("(too long for the model: its oldest turn is forgotten)")
                    continue
                self._give_up(error)
            except RequestError as error:
                self._give_up(error)
            else:
                self._turns.append(ChatMessage("assistant", text))
            return

    def _give_up(self, error: RequestError) -> None:
        self._turns.pop()
        _tell(f"slipstream chat: {one_line(error)}")

    def _stream(self) -> str:
        pieces = []
        system = [] if self._system is None else [ChatMessage("system", self._system)]
        stream = self._client.stream([*system, *self._turns], self._params)
        try:
            for delta in stream:
                sys.stdout.write(delta.text)
                sys.stdout.flush()
                pieces.append(delta.text)
        except KeyboardInterrupt:
            stream.close()
        sys.stdout.write("\n")
        sys.stdout.flush()
        return "".join(pieces)


def history_path() -> Path:
    """The file with the lines typed earlier, in the user's state directory."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "slipstream" / "chat"


@contextlib.contextmanager
def _line_history(is_terminal: bool) -> Iterator[None]:
    """Let `input` edit lines, and recall those of earlier conversations.

    Only this user may read the file. Where it cannot be read or written, or Python has no readline,
    the conversation goes on without.
    """
    if not is_terminal:
        yield
        return
    try:
        import readline  # `input` uses it once it is imported
    except ImportError:
        yield
        return
    path = None
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: the user has no home
        path = history_path()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        path.chmod(0o600)
        readline.read_history_file(path)
    readline.set_history_length(_MAX_HISTORY)
    try:
        yield
    finally:
        if path is not None:
            with contextlib.suppress(OSError):
                readline.write_history_file(path)
                path.chmod(0o600)


def _tell(message: str) -> None:
    sys.stderr.write(f"{message}\n")
