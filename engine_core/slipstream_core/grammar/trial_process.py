"""The grammar process: compiles a grammar before the core does, so that the core survives it.

Owns: what a grammar may cost until its first mask is made. Does not know: streams, matchers of the
core's own. The other end is `trial_client`.

Why a process: the library follows a chain of rules or references by recursion, and ends its
process where the stack does; its converter from GBNF holds the interpreter's lock, for 20 s over
64 KiB of blank lines; a schema of 2 KB may take it half a minute. A thread cannot be interrupted.

Rules:
- The stack is smaller here than any of the core's: what passes here does not overflow there.
- Processor time is bounded, not time: a busy machine refuses no more than an idle one.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import threading
from pathlib import Path

import msgspec

from slipstream_core.grammar.llguidance_backend import GrammarError, Vocabulary
from slipstream_ipc.messages import GrammarProcessConfig, StructuredOutputs, Tried
from slipstream_ipc.process import start_child

MAX_CPU_S = 3.0  # of one grammar
_STACK_BYTES = 2**22
_MAX_MEMORY_BYTES = 2**32  # of addresses


def main() -> int:
    """Answer until the core closes its end, or dies."""
    config, _ = start_child("grammars", GrammarProcessConfig)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(config,))
    thread.start()
    thread.join()
    return 0


def _serve(config: GrammarProcessConfig) -> None:
    vocabulary = Vocabulary(Path(config.tokenizer_json), config.vocab_size, config.eos_ids)
    with socket.socket(fileno=config.fd) as core, core.makefile("rwb") as lines:
        answer = Tried()
        while True:
            lines.write(msgspec.json.encode(answer) + b"\n")
            lines.flush()
            asked = lines.readline()
            if not asked:
                return
            signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)  # SIGPROF ends the process
            answer = _try(vocabulary, msgspec.json.decode(asked, type=StructuredOutputs))
            signal.setitimer(signal.ITIMER_PROF, 0.0)


def _try(vocabulary: Vocabulary, outputs: StructuredOutputs) -> Tried:
    try:
        text = vocabulary.text_of(outputs)
        vocabulary.compile_text(text)
    except GrammarError as error:
        return Tried(error=str(error))
    return Tried(text)


if __name__ == "__main__":
    os._exit(main())
