"""`slipstream chat`: a conversation in the terminal, or with one line of standard input for a turn.

- Ctrl-C ends an answer, whose text so far stays in the conversation; Ctrl-D ends the conversation.
- Where the conversation outgrows the model's length, its oldest turns are dropped.
- Only answers go to standard output, and on a terminal the prompt.
"""

from __future__ import annotations

import argparse
import contextlib
import sys

from slipstream.cli.options import (
    add_connection,
    add_sampling,
    add_settings,
    connected,
    sampling_params_of,
)
from slipstream.cli.parser import Parser, one_line
from slipstream.client.client import Client
from slipstream.errors import BadRequestError, RequestError
from slipstream_ipc.messages import ChatMessage, SamplingParams


def add_chat(parser: Parser) -> None:
    """Add the command's options."""
    add_settings(parser)
    parser.add_argument("--system", metavar="TEXT", help="what the model is told beforehand")
    add_sampling(parser, max_tokens=None)
    add_connection(parser)
    parser.set_defaults(run=chat)


def chat(arguments: argparse.Namespace) -> int:
    """Answer each line of input until its end."""
    params = sampling_params_of(arguments)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (input() edits lines and keeps them once it is loaded)
    with connected(arguments) as client:
        conversation = Conversation(client, params, arguments.system)
        if is_terminal:
            _tell(f"{client.model.name}: Ctrl-C ends an answer, Ctrl-D the conversation")
        while True:
            try:
                line = input("> " if is_terminal else "")
            except EOFError:
                break
            except KeyboardInterrupt:
                _tell("\nCtrl-D ends the conversation")
                continue
            if line.strip():
                conversation.answer(line)
    if is_terminal:
        _tell("")
    return 0


class Conversation:
    """The turns of a conversation, and the client that answers them."""

    def __init__(self, client: Client, params: SamplingParams, system: str | None) -> None:
        self._client = client
        self._params = params
        self._system = [] if system is None else [ChatMessage("system", system)]
        self._turns: list[ChatMessage] = []  # user, assistant, user, assistant, …

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
        stream = self._client.stream([*self._system, *self._turns], self._params)
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


def _tell(message: str) -> None:
    sys.stderr.write(f"{message}\n")
