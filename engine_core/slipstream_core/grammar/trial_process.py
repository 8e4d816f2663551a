"""The grammar process: tries to compile a grammar, so that a bad one cannot harm the core.

The other end is `trial_client`. A thread would not do, as it cannot be interrupted: the library
follows chains of rules or references by recursion, and a stack overflow ends the process; its GBNF
converter holds the GIL, for 20 s over 64 KiB of blank lines; a schema of 2 KB may take it half a
minute.

- The stack is smaller than any in the core: what passes here does not overflow there.
- A grammar is followed for a few tokens, as one that exceeds the library's limits shows it in its
  first masks, mostly.
- Processor time is bounded, not elapsed time: a busy machine refuses no more than an idle one.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import threading
from pathlib import Path

import msgspec

from slipstream_core.grammar.llguidance_backend import GrammarError, Vocabulary
from slipstream_ipc.messages import SCHEMA_MARK, GrammarProcessConfig, GrammarToTry, Tried
from slipstream_ipc.messages.grammar import Leaves
from slipstream_ipc.process import start_child

MAX_CPU_S = 3.0  # per grammar
_NUM_FOLLOWED = 3  # tokens: an object with too many properties shows it behind its brace
_STACK_BYTES = 2**22  # less than the core's: what passes here passes there (decision 021)
_MAX_MEMORY_BYTES = 2**32  # of address space


def main() -> int:
    """Answer until the core closes its end of the socket."""
    config, _ = start_child("grammar", GrammarProcessConfig)
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
            answer = _try(vocabulary, msgspec.json.decode(asked, type=GrammarToTry))
            signal.setitimer(signal.ITIMER_PROF, 0.0)


def _try(vocabulary: Vocabulary, asked: GrammarToTry) -> Tried:
    """The grammar as asked for, or without the patterns of schemas that are not strict, or, where a
    worker has made it of them, without these schemas.
    """
    try:
        return _followed(vocabulary, asked, asked.leaves)
    except GrammarError as error:
        for leaves in further(asked):
            with contextlib.suppress(GrammarError):
                return _followed(vocabulary, asked, leaves)
        return Tried(error=str(error))


def further(asked: GrammarToTry) -> tuple[Leaves, ...]:
    """Return what else a grammar that does not compile can leave out, the least first."""
    made, own = f"{asked.outputs.grammar}{asked.frame}", asked.outputs.json
    is_made = SCHEMA_MARK in made
    texts = (made if is_made else "", str(own) if own and not asked.outputs.strict else "")
    levels: list[Leaves] = []
    if not asked.leaves and any('"pattern' in each for each in texts):
        levels.append("patterns")
    if is_made and asked.leaves != "schemas":
        levels.append("schemas")
    return tuple(levels)


def _followed(vocabulary: Vocabulary, asked: GrammarToTry, leaves: Leaves) -> Tried:
    found = vocabulary.text_of(asked.outputs, asked.frame, leaves=leaves)
    vocabulary.follow(vocabulary.compile_text(found.text), _NUM_FOLLOWED)
    return Tried(found.text, left_out=found.left_out)


if __name__ == "__main__":
    os._exit(main())
