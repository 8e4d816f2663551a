"""Registrations that are neither taken nor refused yet: their grammar compiles, or room is lacking.

Owns: who is on hold and for what. Does not know: rows, messages, whether a registration is to be
objected to, how much room there is (`logprob_budget`).

Rules:
- Who is on hold has no row and is known to nobody; he counts as one that waits.
- A stream's log-probabilities are kept until it is forgotten, in core and worker alike. It is taken
  when there is room for the first of them; room is given in the order in which it was asked for,
  behind streams that were taken and grow, and who needs none waits for nobody.
- What another core has promised already is kept: who was accepted once waits for nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from slipstream_core.grammar.compiler import GrammarCompiler
from slipstream_core.grammar.matcher import GrammarMatcher
from slipstream_core.logprob_budget import LogprobBudget, first_bytes
from slipstream_core.workers.admission import num_tokens_of
from slipstream_ipc.messages import Admit, Fault


@dataclass(frozen=True, slots=True)
class ReadyAdmission:
    """A registration that is on hold no longer, and what has become of its grammar."""

    worker: bytes
    admit: Admit
    grammar: GrammarMatcher | None = None
    fault: Fault | None = None  # then it has got no room


class PendingAdmissions:
    """Registrations by stream id."""

    def __init__(self, compiler: GrammarCompiler, room: LogprobBudget) -> None:
        self._compiler = compiler
        self._room = room
        self._held: dict[bytes, tuple[bytes, Admit]] = {}  # worker and registration
        self._nums: Counter[bytes] = Counter()  # of them by tenant
        self._num_tokens: Counter[bytes] = Counter()
        self._asking: dict[
            bytes, ReadyAdmission
        ] = {}  # those of them that lack room alone, in order

    def __len__(self) -> int:
        return len(self._held)

    @property
    def num_tokens(self) -> int:
        """Tokens that they have to compute."""
        return self._num_tokens.total()

    def of_tenant(self, tenant: bytes) -> tuple[int, int]:
        """How many of them are a tenant's, and their tokens."""
        return self._nums[tenant], self._num_tokens[tenant]

    def get(self, stream_id: bytes) -> tuple[bytes, Admit] | None:
        """The worker and the registration that is on hold, if one is."""
        return self._held.get(stream_id)

    def put(self, worker: bytes, admit: Admit) -> None:
        """Hold a registration until `ready` gives it back; it replaces what was said before.

        It has a grammar, or finds no room (`promise`).
        """
        self._let_go(admit.stream_id)
        self._held[admit.stream_id] = worker, admit
        self._nums[admit.tenant] += 1
        self._num_tokens[admit.tenant] += num_tokens_of(admit)
        if admit.params.structured_outputs is not None:
            self._asking.pop(admit.stream_id, None)
            self._compiler.submit(admit)
        else:  # in its place, if it has one
            self._asking[admit.stream_id] = ReadyAdmission(worker, admit)

    def drop(self, stream_id: bytes) -> None:
        """Nothing is asked for any more. Idempotent."""
        self._let_go(stream_id)
        self._asking.pop(stream_id, None)

    def drop_of(self, worker: bytes, stream_ids: Iterable[bytes] | None = None) -> None:
        """The same of those of a worker's that are among `stream_ids`; None for all of them."""
        if self._held:
            for stream_id in [*self._held] if stream_ids is None else stream_ids:
                if stream_id in self._held and self._held[stream_id][0] == worker:
                    self.drop(stream_id)

    def ready(self) -> Iterator[ReadyAdmission]:
        """Those that need not be held any longer; room is promised to them."""
        for compiled in self._compiler.take_compiled():
            worker, admit = self._held.get(compiled.admit.stream_id, (b"", None))
            if admit is not compiled.admit:
                continue  # let go meanwhile, or said again
            found = ReadyAdmission(worker, admit, compiled.state, compiled.fault)
            if found.fault is None and not self.promise(admit):
                self._asking[admit.stream_id] = found
            else:
                self.drop(admit.stream_id)
                yield found
        while self._asking:
            asking = next(iter(self._asking.values()))
            if not self._promise(asking.admit):
                break
            self.drop(asking.admit.stream_id)
            yield asking

    def promise(self, admit: Admit) -> bool:
        """Promise room to a stream that is taken now, unless there is none, or others ask for it
        already; whether that was done. Then it is not on hold any longer, if it was.
        """
        is_first = admit.was_accepted or not self._asking or not first_bytes(admit)
        if not (is_first and self._promise(admit)):
            return False
        self.drop(admit.stream_id)
        return True

    def _let_go(self, stream_id: bytes) -> None:
        _, admit = self._held.pop(stream_id, (b"", None))
        if admit is not None:
            self._nums[admit.tenant] -= 1
            self._num_tokens[admit.tenant] -= num_tokens_of(admit)
            if not self._nums[admit.tenant]:
                del self._nums[admit.tenant], self._num_tokens[admit.tenant]

    def _promise(self, admit: Admit) -> bool:
        return self._room.promise(first_bytes(admit), was_accepted=admit.was_accepted)
