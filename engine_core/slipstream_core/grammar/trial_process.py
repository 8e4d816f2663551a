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
import threading
from pathlib import Path

import msgspec

from slipstream_core.grammar.llguidance_backend import GrammarError, Vocabulary
from slipstream_ipc.messages import SCHEMA_MARK, GrammarProcessConfig, GrammarToTry, Tried
from slipstream_ipc.messages.grammar import Leaves
from slipstream_ipc.process import start_child
from slipstream_ipc.sandbox import answer_requests, bound_memory

MAX_CPU_S = 3.0  # per grammar
_NUM_FOLLOWED = 3  # tokens: an object with too many properties shows it behind its brace
_STACK_BYTES = 2**22  # less than the core's: what passes here passes there (decision 021)


def main() -> int:
    """Answer the core, until it closes its end of the socket."""
    config, _ = start_child("grammar", GrammarProcessConfig)
    bound_memory()
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(config,))
    thread.start()
    thread.join()
    return 0


def _serve(config: GrammarProcessConfig) -> None:
    vocabulary = Vocabulary(Path(config.tokenizer_json), config.vocab_size, config.eos_ids)

    def answer(asked: bytes) -> bytes:
        grammar = msgspec.json.decode(asked, type=GrammarToTry)
        return msgspec.json.encode(_try(vocabulary, grammar))

    answer_requests(config.fd, answer, MAX_CPU_S)


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
