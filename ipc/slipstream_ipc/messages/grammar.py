"""What a core and its grammar process say to each other, beside the requests' own grammars."""

from __future__ import annotations

from msgspec import Struct


class GrammarProcessConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a grammar process: the vocabulary, and the socket that it is asked at."""

    tokenizer_json: str
    vocab_size: int
    eos_ids: tuple[int, ...]
    fd: int


class Tried(Struct, frozen=True, omit_defaults=True):
    """What became of a grammar, as a line of JSON; the first line, of none, says that it serves.

    text: the grammar as the library wants it. error: why it does not compile.
    """

    text: str = ""
    error: str = ""
