"""`slipstream demo kill`: kills the worker and then the core while streams are running.

- The same requests run undisturbed first. The exit code is 0 only if all texts are identical and
  both processes were killed.
- A process is killed after a number of tokens, not seconds, so that each run shows the same but for
  the times.
- Where standard output is not a terminal, the output is plain lines instead of a screen, with the
  answers during which a process died.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import queue
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct, field

from slipstream.cli.options.parser import Parser
from slipstream.client.client import Client
from slipstream.demo import screen
from slipstream.demo.gaps import GapSpan, longest_gap
from slipstream.demo.screen import Pane, ScreenView
from slipstream.errors import EngineError, SlipstreamError, wrong_option
from slipstream.outputs import RequestOutput
from slipstream.progress import Progress
from slipstream.stack.plan.log_level import log_level
from slipstream.stack.stack import Stack
from slipstream.stack.supervisor_events import ProcessEnded, ProcessRestarted, SpareReady
from slipstream_ipc.messages import Fault, SamplingParams

Victim = Literal["worker", "core"]

_QUESTIONS = (  # which the demo model answers at some length
    "What are special method names?",
    "What are comparisons?",
    "What is the del statement?",
    "What are dictionary displays?",
    "What is the global statement?",
    "What is truth value testing?",
    "What are assignment statements?",
    "What are exceptions?",
    "What is the return statement?",
    "What are lambdas?",
    "What is the break statement?",
    "What are shifting operations?",
    "What are context managers?",
    "What is the pass statement?",
    "What is the yield statement?",
    "What are subscriptions?",
    "What is the raise statement?",
    "What are objects, values and types?",
    "What is naming and binding?",
    "What are identifiers?",
    "What are class definitions?",
    "What is the if statement?",
    "What are slicings?",
    "What are list displays?",
)
_MAX_STREAMS = 4
_STEPS: tuple[tuple[Victim, float], ...] = (("worker", 0.25), ("core", 0.6))  # share of all tokens
_PARAMS = SamplingParams(temperature=0.0, max_tokens=200)
_TICK_S = 0.05  # between two frames
_SILENT_S = 0.3  # the shortest pause that is shown
_SPARES_TIMEOUT_S = 120.0


class KillStep(Struct):
    """One kill of a process."""

    victim: Victim
    num_tokens: int  # of all streams together, before it is killed
    pid: int = 0
    killed_s: float | None = None
    back_s: float | None = None


class DemoStream(Struct):
    """The requests of one pane, one after the other.

    expected: the answers of the undisturbed run.
    """

    questions: list[str]
    expected: list[str]
    pane: Pane
    answers: list[str] = field(default_factory=list)
    num_tokens: int = 0
    times_s: list[float] = field(default_factory=list)
    error: str | None = None
    is_over: bool = False


class _StreamUpdate(Struct, frozen=True):
    """A message from a stream's thread. question: a new one. is_over: the last message."""

    stream: DemoStream
    time_s: float
    question: str | None = None
    text: str = ""
    num_tokens: int = 0
    error: str | None = None
    is_over: bool = False


def add_kill(parser: Parser) -> None:
    """Add the command's options."""
    parser.introduce("[options]", ("slipstream demo kill", "slipstream demo kill --streams 4"))
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="model to serve, as for `slipstream serve` (default: the bundled demo model)",
    )
    parser.add_argument(
        "--streams",
        type=int,
        metavar="N",
        default=2,
        help=f"number of streams at the same time, 1 to {_MAX_STREAMS} (default: %(default)s)",
    )
    parser.add_argument(
        "--plain", action="store_true", help="print lines in place of a screen, on a terminal too"
    )
    parser.set_defaults(run=demo_kill)


def demo_kill(arguments: argparse.Namespace) -> int:
    """Run the demonstration. Raises: BadRequestError, SlipstreamError."""
    if not 1 <= arguments.streams <= _MAX_STREAMS:
        raise wrong_option("streams", arguments.streams, f"1 to {_MAX_STREAMS}")
    has_screen = sys.stdout.isatty() and not arguments.plain
    with contextlib.ExitStack() as running:
        running.enter_context(log_level("ERROR"))  # a warning would garble the screen
        with Progress("starting a server", done="started a server: ready"):
            stack = running.enter_context(Stack(arguments.model))
        with Progress("starting the spares of its worker and its core", done="spares: ready"):
            _await_spares(stack)
        with stack.client() as client:
            num = len(_QUESTIONS)
            asking = f"asking {num} questions without a fault"
            with Progress(asking, done=f"{num} questions: answered"):
                expected = client.generate_many([_chat(one) for one in _QUESTIONS], _PARAMS)
            demo = _KillDemo(stack, client, expected, arguments.streams, has_screen=has_screen)
            demo.run()
    print("\n".join(demo.summary()))
    print("nothing was lost" if demo.is_identical else "this went wrong", flush=True)
    return 0 if demo.is_identical else 1


def _chat(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def _identical_answers(stream: DemoStream) -> str:
    num = sum(one == other for one, other in zip(stream.answers, stream.expected, strict=False))
    return f"{num} of {len(stream.expected)} answers identical to the undisturbed ones"


def _await_spares(stack: Stack) -> None:
    waiting = {"worker", "core"}
    deadline = time.monotonic() + _SPARES_TIMEOUT_S
    while waiting:
        event = stack.next_event(max(0.0, deadline - time.monotonic()))
        if event is None:
            raise EngineError(Fault("engine", f"no spare {' or '.join(sorted(waiting))} is ready"))
        if isinstance(event, SpareReady):
            waiting.discard(event.name)


class _KillDemo:
    """Runs the streams, kills the processes, and shows both."""

    def __init__(
        self,
        stack: Stack,
        client: Client,
        expected: Sequence[RequestOutput],
        num_streams: int,
        *,
        has_screen: bool,
    ) -> None:
        self._stack = stack
        self._client = client
        self._has_screen = has_screen
        texts = [done.text for done in expected]
        self._streams = [
            DemoStream(
                list(_QUESTIONS[number::num_streams]),
                texts[number::num_streams],
                Pane(f"stream {number + 1}"),
            )
            for number in range(num_streams)
        ]
        total = sum(done.num_tokens for done in expected)
        self._steps = [KillStep(victim, int(share * total)) for victim, share in _STEPS]
        self._updates: queue.SimpleQueue[_StreamUpdate] = queue.SimpleQueue()
        self._begin_s = time.monotonic()
        self._end_s = self._begin_s
        self._log: list[tuple[str, str]] = []

    def run(self) -> None:
        """Run until all streams are over."""
        threads = [
            threading.Thread(target=self._run_stream, args=(stream,), daemon=True)
            for stream in self._streams
        ]
        if self._has_screen:
            sys.stdout.write(screen.ENTER)
        try:
            for thread in threads:
                thread.start()
            while not all(stream.is_over for stream in self._streams):
                self._run_one_frame()
        finally:
            if self._has_screen:
                sys.stdout.write(screen.LEAVE)
        self._end_s = time.monotonic()
        for thread in threads:
            thread.join()
        if self._has_screen:
            print("\n".join(self._frame()))
        else:
            self._print_texts()

    @property
    def is_identical(self) -> bool:
        """True if all texts equal the undisturbed ones and both processes were killed."""
        are_same = all(stream.answers == stream.expected for stream in self._streams)
        return are_same and all(step.killed_s is not None for step in self._steps)

    def summary(self) -> list[str]:
        """The lines that sum up the run."""
        lines = [""]
        for step, span in zip(self._steps, self._spans(), strict=True):
            if step.killed_s is None or span is None:
                lines.append(f"{step.victim}: was not killed, the answers were too short")
                continue
            gaps = [gap for one in self._streams if (gap := longest_gap(one.times_s, span))]
            back = (
                "" if step.back_s is None else f", back after {step.back_s - step.killed_s:.2f} s"
            )
            longest = (
                f"longest pause of a stream {max(gaps):.2f} s" if gaps else "no stream was running"
            )
            lines.append(
                f"{step.victim + ' killed':<15} after {step.num_tokens} tokens{back}; {longest}"
            )
        for number, stream in enumerate(self._streams, 1):
            lines.append(
                f"stream {number}: {stream.num_tokens} tokens, {_identical_answers(stream)}"
            )
            if stream.error is not None:
                lines.append(f"  failed: {stream.error}")
            for question, expected, text in zip(
                stream.questions, stream.expected, stream.answers, strict=False
            ):
                if text != expected:
                    lines += difflib.unified_diff(
                        expected.splitlines(),
                        text.splitlines(),
                        f"{question} undisturbed",
                        f"{question} this time",
                        lineterm="",
                    )
        return lines

    def _spans(self) -> list[GapSpan | None]:
        """The spans from each kill to the next one or to the end; None for one that is missing."""
        ends = [step.killed_s for step in self._steps[1:]] + [None]
        return [
            None
            if step.killed_s is None
            else GapSpan(step.victim, step.killed_s, self._end_s if end_s is None else end_s)
            for step, end_s in zip(self._steps, ends, strict=True)
        ]

    # ---- a stream's thread -----------------------------------------------------------------

    def _run_stream(self, stream: DemoStream) -> None:
        error = None
        try:
            for question in stream.questions:
                self._updates.put(_StreamUpdate(stream, time.monotonic(), question))
                for delta in self._client.stream(_chat(question), _PARAMS):
                    now = time.monotonic()
                    self._updates.put(
                        _StreamUpdate(stream, now, None, delta.text, delta.num_tokens)
                    )
        except SlipstreamError as caught:
            error = str(caught)
        self._updates.put(_StreamUpdate(stream, time.monotonic(), error=error, is_over=True))

    # ---- the main thread -------------------------------------------------------------------

    def _run_one_frame(self) -> None:
        """Process messages until the next frame is due, kill the process that is due, draw."""
        due_s = time.monotonic() + _TICK_S
        while (left_s := due_s - time.monotonic()) > 0:
            try:
                self._apply(self._updates.get(timeout=left_s))
            except queue.Empty:
                break
        self._read_events()
        self._kill_if_due()
        if self._has_screen:
            lines = screen.HOME + "\r\n".join(line + screen.CLEAR_LINE for line in self._frame())
            sys.stdout.write(lines + screen.CLEAR_BELOW)
            sys.stdout.flush()

    def _apply(self, update: _StreamUpdate) -> None:
        stream = update.stream
        if update.is_over:
            stream.is_over, stream.error = True, update.error
        elif update.question is not None:
            stream.pane.add(
                ("\n\n" if stream.answers else "") + update.question + "\n", screen.BOLD
            )
            stream.answers.append("")
        else:
            stream.answers[-1] += update.text
            stream.num_tokens += update.num_tokens
            stream.times_s.append(update.time_s)
            stream.pane.add(update.text)

    def _read_events(self) -> None:
        for event in self._stack.events():
            for step in self._steps:
                if step.killed_s is None or step.back_s is not None:
                    continue
                match event:
                    case ProcessEnded() if event.pid == step.pid:
                        self._add_log_line(
                            f"{step.victim} (process {step.pid}) has ended: {event.how}"
                        )
                    case ProcessRestarted() if event.name == step.victim:
                        step.back_s = time.monotonic()
                        back_s = step.back_s - step.killed_s
                        took = f"{step.victim} is process {event.pid} now, after {back_s:.2f} s"
                        self._add_log_line(took, screen.GREEN)

    def _kill_if_due(self) -> None:
        num_tokens = sum(stream.num_tokens for stream in self._streams)
        for step in self._steps:
            if step.killed_s is None:
                if num_tokens >= step.num_tokens and step.victim in self._stack.pids:
                    self._kill_process(step)
                return
            if step.back_s is None:
                return

    def _kill_process(self, step: KillStep) -> None:
        step.pid = self._stack.pids[step.victim]
        self._add_log_line(f"kill -9 {step.pid}   the {step.victim}", screen.RED)
        for stream in self._streams:
            stream.pane.add(f"[{step.victim} killed]", screen.MARK)
        os.kill(step.pid, signal.SIGKILL)
        step.killed_s = time.monotonic()

    # ---- what is shown -----------------------------------------------------------------------

    def _add_log_line(self, what: str, style: str = screen.PLAIN) -> None:
        line = f"{time.monotonic() - self._begin_s:6.2f} s  {what}"
        self._log.append((line, style))
        if not self._has_screen:
            tokens = " + ".join(str(stream.num_tokens) for stream in self._streams)
            print(f"{line}   ({tokens} tokens so far)", flush=True)

    def _frame(self) -> list[str]:
        now = time.monotonic()
        for stream in self._streams:
            silent_s = now - stream.times_s[-1] if stream.times_s and not stream.is_over else 0.0
            pause = f", silent for {silent_s:.1f} s" if silent_s > _SILENT_S else ""
            stream.pane.footer = f"{stream.num_tokens} tokens{pause}"
        pids = self._stack.pids
        status = [
            (f"{name} {pids[name]}", screen.GREEN) if name in pids else (f"{name} -", screen.RED)
            for name in ("worker", "core")
        ]
        panes = [stream.pane for stream in self._streams]
        view = ScreenView("slipstream demo kill", panes, status, self._log)
        width, height = shutil.get_terminal_size()
        return screen.frame(view, width, height - 1)

    def _print_texts(self) -> None:
        """The answers with a mark in them."""
        for stream in self._streams:
            answers: list[list[tuple[str, str]]] = []
            for text, style in stream.pane.pieces:
                if style == screen.BOLD or not answers:  # a question
                    answers.append([])
                answers[-1].append((text.lstrip("\n") if style == screen.BOLD else text, style))
            for pieces in answers:
                if any(style == screen.MARK for _, style in pieces):
                    whole = "".join(text for text, _ in pieces)
                    print(f"\n--- {stream.pane.title}: {whole}")
