"""Compiles grammars in a thread beside the engine's loop, and keeps the latest ones.

The thread starts with the first grammar. It loads the library and the vocabulary, tries each
grammar in a separate process (`trial_client`), compiles it, and feeds it the outputs that a stream
is admitted with.

- Every job is answered exactly once, in order.
- The library releases the GIL while it compiles and while it fills masks, so the engine's loop goes
  on; it holds the GIL while it reads the vocabulary, once per core.
- A compiled grammar never advances: streams get copies, which share a lexer (`matcher`).
- The cache is bounded in number and in bytes of the grammars' sources. Refusals are cached too, as
  each of a request's answers may bring the same grammar.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue

from slipstream_core.grammar.llguidance_backend import (
    GrammarError,
    Vocabulary,
    grammar_key,
    ids_as_mask,
)
from slipstream_core.grammar.matcher import (
    CallMatcher,
    GrammarBroken,
    GrammarMatcher,
    LexerFull,
    SharedGrammar,
)
from slipstream_core.grammar.reasoning.reasoning_state import has_triggers, reasoning_state
from slipstream_core.grammar.trial_client import GrammarTrial
from slipstream_ipc.columns import u32
from slipstream_ipc.messages import Admit, Fault, StructuredOutputs
from slipstream_ipc.telemetry.logs import of_requests
from slipstream_ipc.validation.structured_output import kind_of

logger = logging.getLogger(__name__)

_MAX_KEPT = 64
_MAX_KEPT_BYTES = 2**22
_STACK_BYTES = 2**24  # larger than the stack a grammar was tried with
_FIELD = "structured_outputs"


class FrameError(GrammarError):
    """A grammar that cannot be compiled for what it stands in."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """The outcome of a job: a matcher that has taken the registration's outputs, a matcher of calls
    that has taken none, or a fault.
    """

    admit: Admit
    state: GrammarMatcher | CallMatcher | None
    fault: Fault | None = None
    left_out: tuple[str, ...] = ()  # paths of keywords of schemas that the grammar lacks


class GrammarCompiler:
    """Compiles the grammars of registrations, one at a time."""

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        """`vocabulary` is called in the thread until it succeeds; a ValueError or OSError of it
        refuses the grammar that asked for it.
        """
        self._load = vocabulary
        self._vocabulary: Vocabulary | None = None
        self._trial: GrammarTrial | None = None
        # compiled grammars and refusals by key, the latest last
        self._kept: OrderedDict[bytes, SharedGrammar | GrammarError] = OrderedDict()
        self._num_kept_bytes = 0
        self._jobs: SimpleQueue[Admit | None] = SimpleQueue()
        self._done: SimpleQueue[Compiled] = SimpleQueue()
        self._done_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None
        self.num_jobs = 0  # submitted and not taken
        self._closing = False

    def submit(self, admit: Admit) -> None:
        """Compile the grammar of a registration that has one. Does not block."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
            others = threading.stack_size(_STACK_BYTES)
            self._thread.start()
            threading.stack_size(others)
        self.num_jobs += 1
        self._jobs.put(admit)

    def take_compiled(self) -> list[Compiled]:
        """The jobs done since the last call."""
        done: list[Compiled] = []
        if not self.num_jobs:
            return done
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._done_fd)  # first: what is done after this sets it again
        with contextlib.suppress(Empty):
            while True:
                done.append(self._done.get_nowait())
        self.num_jobs -= len(done)
        return done

    def fileno(self) -> int:
        """A descriptor that is readable while a finished job waits to be taken."""
        return self._done_fd

    def close(self) -> None:
        """Kill the trial process, and end the thread after its current job."""
        self._closing = True
        if self._trial is not None:
            self._trial.close()
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None
        os.close(self._done_fd)

    def _run(self) -> None:
        while (admit := self._jobs.get()) is not None:
            if self._closing:
                continue
            try:
                state, left_out = self._started(admit)
                done = Compiled(admit, state, left_out=left_out)
            except GrammarBroken as error:
                done = Compiled(admit, None, Fault("diverged", f"{_FIELD}: {error}", _FIELD))
            except GrammarError as error:
                done = Compiled(admit, None, _refused(admit, error))
            except Exception as error:
                logger.exception("compiling a grammar failed", extra=of_requests(admit.spec.label))
                why = f"{_FIELD}: {type(error).__name__} while compiling the grammar"
                done = Compiled(admit, None, Fault("engine", why))
            self._done.put(done)
            os.eventfd_write(self._done_fd, 1)

    def start(self, admit: Admit) -> GrammarMatcher | CallMatcher:
        """The matcher of `Compiled`. Can be called without the thread.

        Raises GrammarError, GrammarBroken.
        """
        return self._started(admit)[0]

    def _started(self, admit: Admit) -> tuple[GrammarMatcher | CallMatcher, tuple[str, ...]]:
        """The matcher, and what its grammar lacks."""
        outputs = admit.spec.params.structured_outputs
        assert outputs is not None
        if self._vocabulary is None:
            try:
                self._vocabulary = self._load()
            except (ValueError, OSError) as error:
                raise GrammarError(f"{_FIELD}: not supported for this model: {error}") from error
            self._trial = GrammarTrial(self._vocabulary)
        grammar = self._compiled(self._vocabulary, outputs, admit.derived.frame)
        if has_triggers(admit):
            nothing = ids_as_mask((), self._vocabulary.vocab_size)
            ends = self._vocabulary.ends
            calls = CallMatcher(lambda: GrammarMatcher(grammar, frozenset(), nothing, ends))
            return calls, grammar.left_out
        # a request that ignores the model's end tokens may end with its own stop tokens
        end_ids = self._vocabulary.eos_ids.intersection(admit.derived.stop_token_ids)
        end_ids = end_ids or frozenset(admit.derived.stop_token_ids)
        end_mask = ids_as_mask(end_ids, self._vocabulary.vocab_size)
        state = GrammarMatcher(grammar, end_ids, end_mask, self._vocabulary.ends)
        token_ids, reasoning = u32(admit.begun.output_ids).tolist(), reasoning_state(admit)
        if reasoning is not None:
            start = reasoning.grammar_start
            token_ids = [] if start is None else token_ids[start:]
        try:
            state.accept_tokens(token_ids)
        except LexerFull:
            state.renew(token_ids)
        return state, grammar.left_out

    def _compiled(
        self, vocabulary: Vocabulary, outputs: StructuredOutputs, frame: str
    ) -> SharedGrammar:
        key = grammar_key(outputs, frame)
        kept = self._kept.get(key)
        if kept is None:
            kept = self._kept[key] = self._compile(vocabulary, outputs, frame)
            self._num_kept_bytes += len(key)
            while len(self._kept) > _MAX_KEPT or self._num_kept_bytes > _MAX_KEPT_BYTES:
                oldest, _ = self._kept.popitem(last=False)
                self._num_kept_bytes -= len(oldest)
        else:
            self._kept.move_to_end(key)
        if isinstance(kept, GrammarError):
            raise kept
        return kept

    def _compile(
        self, vocabulary: Vocabulary, outputs: StructuredOutputs, frame: str
    ) -> SharedGrammar | GrammarError:
        """The grammar, or the error that refuses it."""
        assert self._trial is not None
        try:
            tried = self._trial.ask(outputs, frame)
            compile_it = partial(vocabulary.compile_text, tried.text)
            return SharedGrammar(compile_it, tried.left_out, spell=vocabulary.spell)
        except GrammarError as error:
            if frame and self._fits_alone(outputs):
                return FrameError(f"{_FIELD}: {error}")
            return GrammarError(f"{_FIELD}.{kind_of(outputs)}: {error}")

    def _fits_alone(self, outputs: StructuredOutputs) -> bool:
        """True if the outputs compile without the frame that surrounds them."""
        assert self._trial is not None
        try:
            self._trial.ask(outputs)
        except GrammarError:
            return False
        return True


def _refused(admit: Admit, error: GrammarError) -> Fault:
    """The fault of a request whose grammar does not compile; that of a forced call is made of the
    request's tools, as is what structured output stands in where there are some.
    """
    forces_calls = admit.derived.answer is not None and admit.derived.answer.options.forces_calls
    has_tools = admit.derived.answer is not None and bool(admit.derived.answer.tools)
    if forces_calls or has_triggers(admit) or (isinstance(error, FrameError) and has_tools):
        why = str(error).removeprefix(f"{_FIELD}.grammar: ").removeprefix(f"{_FIELD}: ")
        what = "a call of them cannot be forced" if forces_calls else "calls cannot be kept to them"
        return Fault("bad_request", f"tools: {what}: {why}", "tools")
    return Fault("bad_request", str(error), _FIELD)
