"""`slipstream chat`: one question, a conversation in the terminal, or one with a line of standard
input for a turn.

- Ctrl-C ends an answer, whose text so far stays in the conversation; Ctrl-D ends the conversation.
- Lines that are commands (`/clear`) are obeyed. On a terminal, every line that begins with `/` is
  taken for one, and lines are kept for the next time.
- Where the conversation outgrows the model's length, its oldest turns are dropped.
- Only answers go to standard output, and on a terminal the prompt. Elsewhere an empty line
  separates them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

from slipstream.cli.options.parser import Parser, one_line
from slipstream.cli.options.sampling_options import add_sampling, sampling_params_of
from slipstream.cli.options.stack_options import take_model
from slipstream.cli.server_choice import (
    add_client_options,
    connected,
    model_of_command,
    served_names,
)
from slipstream.client.client import Client
from slipstream.demo_model import MODEL_NAME
from slipstream.errors import (
    BadRequestError,
    RequestError,
    bad_request,
    missing_option,
    wrong_option,
)
from slipstream.request.media import data_of
from slipstream.spelling import did_you_mean
from slipstream.stack.plan.models.model_source import was_downloaded
from slipstream_ipc.errors import BadRequest
from slipstream_ipc.messages import ChatMessage, SamplingParams
from slipstream_ipc.validation.simulated_model import SIMULATED

_MAX_HISTORY = 1000  # lines
_COMMANDS = {
    "/help": "show this list",
    "/clear": "forget the conversation so far",
    "/system": "show the system prompt; with TEXT set it, and forget the conversation",
    "/exit": "end the conversation; so does Ctrl-D",
}


def add_chat(parser: Parser) -> None:
    """Add the command's options."""
    parser.introduce(
        "[MODEL] [QUESTION] [options]",
        (
            "slipstream chat",
            'slipstream chat "What is an assert statement?" --temperature 0',
            'slipstream chat Qwen/Qwen3-0.6B "What is an assert statement?"',
        ),
    )
    parser.add_argument(
        "first",
        nargs="?",
        metavar="MODEL",
        help="a model, as for `slipstream serve` (default: the running server's, "
        "else the bundled demo model)",
    )
    parser.add_argument(
        "second",
        nargs="?",
        metavar="QUESTION",
        help="answer this and end; alone it is no path or known model, and has no / or :",
    )
    parser.add_argument("-q", "--quick", metavar="TEXT", help="QUESTION as an option")
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="show it with the first question; repeatable",
    )
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    add_sampling(parser, max_tokens=None)
    add_client_options(parser, has_model_argument=False)
    listed = "\n".join(f"  {name:<8} {meaning}" for name, meaning in _COMMANDS.items())
    parser.epilog = f"In a conversation:\n{listed}\n\n{parser.epilog}"
    parser.set_defaults(run=chat)


def chat(arguments: argparse.Namespace) -> int:
    """Answer the question, or each line of input until its end."""
    question = _question_of(arguments)
    params = sampling_params_of(arguments)
    if question is None:
        return _converse(arguments, params)
    with _hinting(arguments), connected(arguments) as client:
        model = model_of_command(arguments, client)
        history = ChatHistory(
            client, params, arguments.system, model=model, images=_images_of(arguments)
        )
        answer = history.ask(question)
    if not answer:
        _tell("slipstream chat: the answer is empty: the model ended it at once")
    return 0


def _question_of(arguments: argparse.Namespace) -> str | None:
    """The question, where there is one; moves MODEL to its place. Raises: BadRequestError."""
    first, second, quick = arguments.first, arguments.second, arguments.quick
    if second is None and quick is None and first is not None and not _is_model(first, arguments):
        first, second = None, first
    if second is not None and quick is not None:
        raise wrong_option("quick", quick, f"one question; the argument is {second!r}")
    question: str | None = second if quick is None else quick
    if first is not None:
        take_model(arguments, first)
    if question is not None and not question.strip():
        raise missing_option("QUESTION", "the one given is empty")
    return question


def _is_model(text: str, arguments: argparse.Namespace) -> bool:
    """Return True if an argument alone is a model, not a question."""
    if not text or os.path.exists(text):
        return bool(text)
    if " " in text:
        return False
    is_spelled_so = "/" in text or ":" in text or text in (MODEL_NAME, SIMULATED.rstrip(":"))
    return is_spelled_so or was_downloaded(text) or text in served_names(arguments)


def _images_of(arguments: argparse.Namespace) -> list[bytes]:
    """The files of the images, read. Raises: BadRequestError."""
    try:
        return [data_of(Path(file), "image") for file in arguments.image]
    except BadRequest as error:
        raise bad_request(error) from None


@contextlib.contextmanager
def _hinting(arguments: argparse.Namespace) -> Iterator[None]:
    """Add to an error about MODEL that it may have been meant as a question, and to one about a
    missing chat template which command needs none.
    """
    try:
        yield
    except BadRequestError as error:
        if error.field == "model" and arguments.first is not None:
            hint = f"a question like this needs --quick: `slipstream chat -q {arguments.first}`"
        elif error.field == "messages":
            hint = "`slipstream generate TEXT` continues a text without one"
        else:
            raise
        message = f"{error}; {hint}"
        raise BadRequestError(structs.replace(error.fault, message=message)) from None


def _converse(arguments: argparse.Namespace, params: SamplingParams) -> int:
    is_terminal = sys.stdin.isatty()
    with (
        _hinting(arguments),
        connected(arguments) as client,
        _line_history(is_terminal),
    ):
        model = model_of_command(arguments, client)
        conversation = ChatHistory(
            client,
            params,
            arguments.system,
            model=model,
            separator="" if is_terminal else "\n",
            images=_images_of(arguments),
        )
        if is_terminal:
            _tell(f"{model}: Ctrl-C ends an answer; /help shows what else there is")
        while True:
            try:
                line = input("> " if is_terminal else "")
            except EOFError:
                break
            except KeyboardInterrupt:
                _tell("\nCtrl-D ends the conversation")
                continue
            command = line.strip().partition(" ")[0]
            if command == "/exit":
                return 0
            if command in _COMMANDS or (is_terminal and line.startswith("/")):
                conversation.obey(line)
            elif line.strip():
                conversation.answer(line)
    if is_terminal:
        _tell("")
    return 0


class ChatHistory:
    """The turns of a conversation, and the client that answers them.

    model: by its name; None: the only one. separator: what is written between two answers. images:
    files, which are shown with the first question that is answered.
    """

    def __init__(
        self,
        client: Client,
        params: SamplingParams,
        system: str | None,
        *,
        model: str | None = None,
        separator: str = "",
        images: Sequence[bytes] = (),
    ) -> None:
        self._client = client
        self._model = model
        self._separator = separator
        self._before = ""  # the next answer
        self._params = params
        self._system = system
        self._images = images
        # user, assistant, user, assistant, …
        self._turns: list[ChatMessage | Mapping[str, Any]] = []

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

    def ask(self, question: str) -> str:
        """Stream the answer to `question` to standard output, and return it.

        Raises: SlipstreamError.
        """
        self._turns.append(self._turn(question))
        text = self._stream()
        self._turns.append(ChatMessage("assistant", text))
        return text

    def answer(self, line: str) -> None:
        """Ask as `ask` does, within the conversation: errors are printed, and the oldest turns are
        dropped if it is too long.
        """
        self._turns.append(self._turn(line))
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
                self._images = ()  # else they are shown with the next question
            return

    def _turn(self, question: str) -> ChatMessage | Mapping[str, Any]:
        if not self._images:
            return ChatMessage("user", question)
        shown = [{"type": "image", "image": image} for image in self._images]
        return {"role": "user", "content": [*shown, {"type": "text", "text": question}]}

    def _give_up(self, error: RequestError) -> None:
        self._turns.pop()
        _tell(f"slipstream chat: {one_line(error)}")

    def _stream(self) -> str:
        pieces = []
        system = [] if self._system is None else [ChatMessage("system", self._system)]
        stream = self._client.stream([*system, *self._turns], self._params, model=self._model)
        try:
            for delta in stream:
                sys.stdout.write(self._before + delta.text)
                sys.stdout.flush()
                self._before = ""
                pieces.append(delta.text)
        except KeyboardInterrupt:
            stream.close()
        sys.stdout.write("\n")
        sys.stdout.flush()
        self._before = self._separator
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
