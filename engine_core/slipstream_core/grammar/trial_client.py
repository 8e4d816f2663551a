"""The core's side of the grammar process, which tries a grammar before it is compiled here.

The process starts with the first grammar, and is replaced when it dies. `ask` blocks; only the
compiler's thread calls it.

- A grammar that exceeds its processor time is refused, as is one over which two processes died. A
  single death might have had an outside cause. Schemas that are not strict lose their patterns
  first, and those that a worker has put into it are left out then.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import threading
from io import BufferedRWPair

import msgspec
from msgspec import structs

from slipstream_core.grammar.llguidance_backend import GrammarError, Vocabulary
from slipstream_core.grammar.trial_process import MAX_CPU_S, further
from slipstream_ipc.child import ChildProcess, start_own_process
from slipstream_ipc.messages import GrammarProcessConfig, GrammarToTry, StructuredOutputs, Tried

logger = logging.getLogger(__name__)

_MODULE = "slipstream_core.grammar.trial_process"
_MAX_DEATHS = 2
_SILENT_S = 120.0  # of a process that neither answers nor exceeds its processor time


class _Died(Exception):  # noqa: N818  (an outcome)
    """The process ended, or was killed, over a grammar."""

    def __init__(self, code: int) -> None:
        self.code = code
        super().__init__(f"code {code}")


class _TooMuch(Exception):  # noqa: N818  (an outcome)
    """A grammar costs more than its process has."""


class GrammarTrial:
    """Tries grammars over one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._process: ChildProcess | None = None
        self._lines: BufferedRWPair | None = None
        self._lock = threading.Lock()  # guards starting and ending the process
        self._is_closed = False

    def ask(self, outputs: StructuredOutputs, frame: str = "") -> Tried:
        """A grammar that compiles. frame: as in Admit.

        Raises GrammarError with the reason where it does not; OSError where no process starts.
        """
        to_try = GrammarToTry(outputs, frame)
        while True:
            try:
                return self._tried(to_try)
            except _TooMuch as error:
                if not (leaves := further(to_try)):
                    raise GrammarError(str(error)) from error
                to_try = structs.replace(to_try, leaves=leaves[0])

    def _tried(self, to_try: GrammarToTry) -> Tried:
        """Raises as `ask`, or _TooMuch."""
        asked = msgspec.json.encode(to_try)
        for _ in range(_MAX_DEATHS):
            lines = self._ready_lines()
            try:
                tried = self._answer(lines, asked)
            except _Died as death:
                logger.warning("the grammar process died while compiling a grammar (%s)", death)
                if death.code == -signal.SIGPROF:
                    why = f"takes more than {MAX_CPU_S:g} s of CPU time to compile"
                    raise _TooMuch(why) from death
            else:
                if tried.error:
                    raise GrammarError(tried.error)
                return tried
        raise _TooMuch("is too deep or too large: it crashes the grammar library")

    def close(self) -> None:
        """Kill the process, whatever it is doing. Idempotent."""
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                self._process.reap()

    def _ready_lines(self) -> BufferedRWPair:
        if self._lines is None:
            lines = self._start()
            try:
                self._answer(lines)
            except _Died as death:
                raise OSError(f"the grammar process cannot start ({death})") from death
            self._lines = lines
        return self._lines

    def _start(self) -> BufferedRWPair:
        own_end, end = socket.socketpair()
        own_end.settimeout(_SILENT_S)
        vocabulary = self._vocabulary
        config = GrammarProcessConfig(
            str(vocabulary.tokenizer_json),
            vocabulary.vocab_size,
            tuple(vocabulary.eos_ids),
            end.fileno(),
        )
        with end, own_end, self._lock:
            if self._is_closed:
                raise OSError("the core is shutting down")
            self._process = start_own_process(
                _MODULE,
                msgspec.json.encode(config),
                "grammar",
                descriptors=(end.fileno(),),
                may_fork=False,  # its memory is bounded, and the core's is large
            )
            return own_end.makefile("rwb")

    def _answer(self, lines: BufferedRWPair, asked: bytes | None = None) -> Tried:
        try:
            if asked is not None:
                lines.write(asked + b"\n")
                lines.flush()
            line = lines.readline()
        except OSError:
            line = b""
        if line.endswith(b"\n"):
            return msgspec.json.decode(line, type=Tried)
        assert self._process is not None
        code = self._process.reap()  # in case it has only fallen silent
        self._lines = None
        with contextlib.suppress(OSError):  # from flushing what was not sent
            lines.close()
        raise _Died(code)
