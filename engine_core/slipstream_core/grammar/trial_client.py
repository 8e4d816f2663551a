"""The core's side of the grammar process, which tries a grammar before it is compiled here.

A grammar that exceeds its processor time is refused, as is one over which two processes died.
Schemas that are not strict lose their patterns first, and those that a worker has put into it are
left out then.
"""

from __future__ import annotations

import msgspec
from msgspec import structs

from slipstream_core.grammar.llguidance_backend import GrammarError, Vocabulary
from slipstream_core.grammar.trial_process import MAX_CPU_S, further
from slipstream_ipc.messages import GrammarProcessConfig, GrammarToTry, StructuredOutputs, Tried
from slipstream_ipc.sandbox import DeadlyRequest, Sandbox

_MODULE = "slipstream_core.grammar.trial_process"
_DECODER = msgspec.json.Decoder(Tried)


class GrammarTrial:
    """Tries grammars over one vocabulary. The process starts with the first one."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        def config(fd: int) -> bytes:
            return msgspec.json.encode(
                GrammarProcessConfig(
                    str(vocabulary.tokenizer_json),
                    vocabulary.vocab_size,
                    tuple(vocabulary.eos_ids),
                    fd,
                )
            )

        self._sandbox = Sandbox("grammar", _MODULE, config)
        self.close = self._sandbox.close

    def ask(self, outputs: StructuredOutputs, frame: str = "") -> Tried:
        """A grammar that compiles. frame: as in Admit. Blocks; only the compiler's thread calls it.

        Raises GrammarError with the reason where it does not; OSError where no process starts.
        """
        to_try = GrammarToTry(outputs, frame)
        while True:
            try:
                tried = self._sandbox.ask(msgspec.json.encode(to_try), _DECODER.decode)
            except DeadlyRequest as death:
                if leaves := further(to_try):
                    to_try = structs.replace(to_try, leaves=leaves[0])
                    continue
                slow = f"takes more than {MAX_CPU_S:g} s of CPU time to compile"
                crash = "is too deep or too large: it crashes the grammar library"
                raise GrammarError(slow if death.is_slow else crash) from death
            if tried.error:
                raise GrammarError(tried.error)
            return tried
