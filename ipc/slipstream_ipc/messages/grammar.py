"""Messages between a core and its grammar process, and what is said of grammars beside them."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from slipstream_ipc.messages.request import StructuredOutputs

FRAMED = "@structured_output"  # in a frame: where the structured output stands
MAX_FRAME_CHARS = 2**18
# a key of a schema in a grammar that a worker made: {"path": where it comes from, "strict": …}, and
# "bare": true where it is a terminal, of a string without quotes and escapes
SCHEMA_MARK = "x-slipstream"
# a key of a function that stands for a custom tool: the model is not shown the `pattern` of its
# parameters, and each call is kept to it, as far as it can be, though the function is not `strict`
FORMAT_MARK = "x-slipstream-format"
# begins a comment in such a grammar: the path of a keyword that the grammar lacks, as JSON
LEFT_OUT_MARK = "// x-slipstream left out: "


class GrammarProcessConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a grammar process: the vocabulary, and the socket on which it gets requests."""

    tokenizer_json: str
    vocab_size: int
    eos_ids: tuple[int, ...]
    fd: int


Leaves = Literal["", "patterns", "schemas"]
"""The part that a schema which is not strict loses: nothing, its patterns, or, where a worker has
put it into a grammar, all that it says.
"""


class GrammarToTry(Struct, frozen=True, omit_defaults=True):
    """A grammar; frame: as in Admit."""

    outputs: StructuredOutputs
    frame: str = ""
    leaves: Leaves = ""


class Tried(Struct, frozen=True, omit_defaults=True):
    """The result for a grammar.

    text: the grammar in the library's form. error: why it does not compile. left_out: paths of
    keywords of schemas that it lacks, as they cannot be enforced.
    """

    text: str = ""
    error: str = ""
    left_out: tuple[str, ...] = ()
