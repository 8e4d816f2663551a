"""`slipstream demo kill`: kills the worker and then the core while streams are running.

- The same requests run undisturbed first. The exit code is 0 only if all texts are identical and
  both processes were killed.
- A process is killed after a number of tokens, not seconds, so that each run shows the same but for
  the times.
- Where standard output is not a terminal, the output is plain lines instead of a screen.
"""

from __future__ import annotations

import argparse
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

from slipstream.cli.parser import Parser
from slipstream.client.client import Client
from slipstream.demo import screen
from slipstream.demo.gaps import GapSpan, longest_gap
from slipstream.demo.screen import Pane, ScreenView
from slipstream.errors import EngineError, SlipstreamError, wrong_option
from slipstream.outputs import RequestOutput
from slipstream.stack.events import ProcessEnded, ProcessRestarted, ProcessStarted, SpareReady
from slipstream.stack.log_level import log_level
from slipstream.stack.stack import Stack
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
_ACTS: tuple[tuple[Victim, float], ...] = (("worker", 0.25), ("core", 0.6))  # share of all tokens
_PARAMS = SamplingParams(temperature=0.0, max_tokens=200)
_TICK_S = 0.05  # between two frames
_SILENT_S = 0.3  # the shortest pause that is shown
_PATIENCE_S = 120.0


class Act(Struct):
    """One kill of a process."""

    victim: Victim
    num_tokens: int  # of all streams together, before it is killed
    pid: int = 0
    killed_s: float | None = None
    back_s: float | None = None
    successor: int = 0


class Asker(Struct):
    """One stream after the other with its question and answer, in one pane.

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


class _News(Struct, frozen=True):
    """A message from an asker's thread. question: one was asked. is_over: the last message."""

    asker: Asker
    time_s: float
    question: str | None = None
    text: str = ""
    num_tokens: int = 0
    error: str | None = None
    is_over: bool = False


def add_kill(parser: Parser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--model", metavar="MODEL", help="as `slipstream serve` takes it; default: the demo model"
    )
    parser.add_argument(
        "--streams",
        type=int,
        metavar="N",
        default=2,
        help=f"at a time, 1 to {_MAX_STREAMS}; default: %(default)s",
    )
    parser.add_argument("--plain", action="store_true", help="lines, on a terminal too")
    parser.set_defaults(run=demo_kill)


def demo_kill(arguments: argparse.Namespace) -> int:
    """Run the demonstration. Raises: BadRequestError, SlipstreamError."""
    if not 1 <= arguments.streams <= _MAX_STREAMS:
        raise wrong_option("streams", arguments.streams, f"1 to {_MAX_STREAMS}")
    is_drawn = sys.stdout.isatty() and not arguments.plain
    print("starting a stack, and spares for its worker and its core ...", flush=True)
    with log_level("ERROR"), Stack(arguments.model) as stack:  # a warning would garble the screen
        _await_spares(stack)
        with stack.client() as client:
            print("the answers as they are when nobody dies ...", flush=True)
            expected = client.generate_many([_chat(one) for one in _QUESTIONS], _PARAMS)
            show = _Show(stack, client, expected, arguments.streams, is_drawn=is_drawn)
            show.run()
    print("\n".join(show.summary()), flush=True)
    return 0 if show.is_identical else 1


def _chat(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def _how_many_same(asker: Asker) -> str:
    num = sum(one == other for one, other in zip(asker.answers, asker.expected, strict=False))
    return f"{num} of {len(asker.expected)} answers identical to the undisturbed ones"


def _await_spares(stack: Stack) -> None:
    waiting = {"worker", "core"}
    deadline = time.monotonic() + _PATIENCE_S
    while waiting:
        event = stack.next_event(max(0.0, deadline - time.monotonic()))
        if event is None:
            raise EngineError(Fault("engine", f"no spare {' or '.join(sorted(waiting))} is ready"))
        if isinstance(event, SpareReady):
            waiting.discard(event.name)


class _Show:
    """Runs the streams, kills the processes, and shows both."""

    def __init__(
        self,
        stack: Stack,
        client: Client,
        expected: Sequence[RequestOutput],
        num_streams: int,
        *,
        is_drawn: bool,
    ) -> None:
        self._stack = stack
        self._client = client
        self._is_drawn = is_drawn
        texts = [done.text for done in expected]
        self._askers = [
            Asker(
                list(_QUESTIONS[number::num_streams]),
                texts[number::num_streams],
                Pane(f"stream {number + 1}"),
            )
            for number in range(num_streams)
        ]
        total = sum(done.num_tokens for done in expected)
        self._acts = [Act(victim, int(share * total)) for victim, share in _ACTS]
        self._news: queue.SimpleQueue[_News] = queue.SimpleQueue()
        self._begin_s = time.monotonic()
        self._end_s = self._begin_s
        self._log: list[tuple[str, str]] = []

    def run(self) -> None:
        """Run until all streams are over."""
        threads = [
            threading.Thread(target=self._ask, args=(asker,), daemon=True) for asker in self._askers
        ]
        if self._is_drawn:
            sys.stdout.write(screen.ENTER)
        try:
            for thread in threads:
                thread.start()
            while not all(asker.is_over for asker in self._askers):
                self._turn()
        finally:
            if self._is_drawn:
                sys.stdout.write(screen.LEAVE)
        self._end_s = time.monotonic()
        for thread in threads:
            thread.join()
        if self._is_drawn:
            print("\n".join(self._frame()))
        else:
            self._print_texts()

    @property
    def is_identical(self) -> bool:
        """Whether all texts equal the undisturbed ones, and both processes were killed."""
        are_same = all(asker.answers == asker.expected for asker in self._askers)
        return are_same and all(act.killed_s is not None for act in self._acts)

    def summary(self) -> list[str]:
        """The lines that sum up the run."""
        lines = [""]
        for act, span in zip(self._acts, self._spans(), strict=True):
            if act.killed_s is None or span is None:
                lines.append(f"{act.victim}: was not killed, the answers were too short")
                continue
            gaps = [gap for one in self._askers if (gap := longest_gap(one.times_s, span))]
            back = "" if act.back_s is None else f", back after {act.back_s - act.killed_s:.2f} s"
            longest = f"longest pause of a stream {max(gaps):.2f} s" if gaps else "nobody streamed"
            lines.append(
                f"{act.victim + ' killed':<15} after {act.num_tokens} tokens{back}; {longest}"
            )
        for number, asker in enumerate(self._askers, 1):
            lines.append(f"stream {number}: {asker.num_tokens} tokens, {_how_many_same(asker)}")
            if asker.error is not None:
                lines.append(f"  failed: {asker.error}")
            for question, expected, text in zip(
                asker.questions, asker.expected, asker.answers, strict=False
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
        ends = [act.killed_s for act in self._acts[1:]] + [None]
        return [
            None
            if act.killed_s is None
            else GapSpan(act.victim, act.killed_s, self._end_s if end_s is None else end_s)
            for act, end_s in zip(self._acts, ends, strict=True)
        ]

    # ---- a stream's thread -----------------------------------------------------------------

    def _ask(self, asker: Asker) -> None:
        error = None
        try:
            for question in asker.questions:
                self._news.put(_News(asker, time.monotonic(), question))
                for delta in self._client.stream(_chat(question), _PARAMS):
                    now = time.monotonic()
                    self._news.put(_News(asker, now, None, delta.text, delta.num_tokens))
        except SlipstreamError as caught:
            error = str(caught)
        self._news.put(_News(asker, time.monotonic(), error=error, is_over=True))

    # ---- the main thread -------------------------------------------------------------------

    def _turn(self) -> None:
        """Process messages until the next frame is due, kill the process that is due, draw."""
        due_s = time.monotonic() + _TICK_S
        while (left_s := due_s - time.monotonic()) > 0:
            try:
                self._take(self._news.get(timeout=left_s))
            except queue.Empty:
                break
        self._hear()
        self._kill()
        if self._is_drawn:
            lines = screen.HOME + "\r\n".join(line + screen.CLEAR_LINE for line in self._frame())
            sys.stdout.write(lines + screen.CLEAR_BELOW)
            sys.stdout.flush()

    def _take(self, news: _News) -> None:
        asker = news.asker
        if news.is_over:
            asker.is_over, asker.error = True, news.error
        elif news.question is not None:
            asker.pane.add(("\n\n" if asker.answers else "") + news.question + "\n", screen.BOLD)
            asker.answers.append("")
        else:
            asker.answers[-1] += news.text
            asker.num_tokens += news.num_tokens
            asker.times_s.append(news.time_s)
            asker.pane.add(news.text)

    def _hear(self) -> None:
        for event in self._stack.events():
            for act in self._acts:
                if act.killed_s is None or act.back_s is not None:
                    continue
                match event:
                    case ProcessEnded() if event.pid == act.pid:
                        self._say(f"{act.victim} (process {act.pid}) is gone: {event.how}")
                    case ProcessStarted() if event.name == act.victim:
                        act.successor = event.pid
                    case ProcessRestarted() if event.name == act.victim:
                        act.back_s = time.monotonic()
                        back_s = act.back_s - act.killed_s
                        took = f"{act.victim} is process {event.pid} now, after {back_s:.2f} s"
                        self._say(took, screen.GREEN)

    def _kill(self) -> None:
        num_tokens = sum(asker.num_tokens for asker in self._askers)
        for act in self._acts:
            if act.killed_s is None:
                if num_tokens >= act.num_tokens and act.victim in self._stack.pids:
                    self._strike(act)
                return
            if act.back_s is None:
                return

    def _strike(self, act: Act) -> None:
        act.pid = self._stack.pids[act.victim]
        self._say(f"kill -9 {act.pid}   the {act.victim}", screen.RED)
        for asker in self._askers:
            asker.pane.add(f"[{act.victim} killed]", screen.MARK)
        os.kill(act.pid, signal.SIGKILL)
        act.killed_s = time.monotonic()

    # ---- what is shown -----------------------------------------------------------------------

    def _say(self, what: str, style: str = screen.PLAIN) -> None:
        line = f"{time.monotonic() - self._begin_s:6.2f} s  {what}"
        self._log.append((line, style))
        if not self._is_drawn:
            tokens = " + ".join(str(asker.num_tokens) for asker in self._askers)
            print(f"{line}   ({tokens} tokens so far)", flush=True)

    def _frame(self) -> list[str]:
        now = time.monotonic()
        for asker in self._askers:
            silent_s = now - asker.times_s[-1] if asker.times_s and not asker.is_over else 0.0
            pause = f", silent for {silent_s:.1f} s" if silent_s > _SILENT_S else ""
            asker.pane.footer = f"{asker.num_tokens} tokens{pause}"
        pids = self._stack.pids
        status = [
            (f"{name} {pids[name]}", screen.GREEN) if name in pids else (f"{name} -", screen.RED)
            for name in ("worker", "core")
        ]
        panes = [asker.pane for asker in self._askers]
        view = ScreenView("slipstream demo kill", panes, status, self._log)
        width, height = shutil.get_terminal_size()
        return screen.frame(view, width, height - 1)

    def _print_texts(self) -> None:
        for asker in self._askers:
            whole = "".join(text for text, _ in asker.pane.pieces)
            print(f"\n--- {asker.pane.title}\n{whole}")
