"""Messages between a core and its grammar process, except for the requests' grammars."""

from __future__ import annotations

from msgspec import Struct


class GrammarProcessConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a grammar process: the vocabulary, and the socket on which it gets requests."""

    tokenizer_json: str
    vocab_size: int
    eos_ids: tuple[int, ...]
    fd: int


class Tried(Struct, frozen=True, omit_defaults=True):
    """The result for a grammar, a line of JSON; the first line has no fields: the process is ready.

    text: the grammar in the library's form. error: why it does not compile.
    """

    text: str = ""
    error: str = ""
