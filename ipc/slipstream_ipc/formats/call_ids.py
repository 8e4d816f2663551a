"""Ids of tool calls on their way to clients and back.

Some models write ids of their own, and a template shows them to the model again. Clients tell calls
by their ids, so one that a model repeats within an answer is made different, and some clients take
ids of letters, digits, `_` and `-` alone. Both can be taken back: `written_id` gives what the model
wrote, whichever of the APIs a client was answered by.
"""

from __future__ import annotations

import re

_REPEATED = "__call"  # and the number of the call within its answer
_ENCODED = "toolu_e_"  # and the id, in which `_` and two hexadecimal digits are a byte
_MAX_CHARS = 256  # of an id that is made different
_is_valid = re.compile(r"[a-zA-Z0-9_-]+").fullmatch
_PLAIN_BYTES = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-")
_is_encoded = re.compile(rf"{_ENCODED}((?:[a-zA-Z0-9-]|_[0-9a-f]{{2}})+)").fullmatch
_BYTE = re.compile(r"_([0-9a-f]{2})")
_is_repeated = re.compile(rf"(.+){_REPEATED}[0-9]{{1,4}}", re.DOTALL).fullmatch


def repeated_id(call_id: str, index: int) -> str:
    """The id of an answer's `index`-th call, where an earlier one has this id."""
    suffix = f"{_REPEATED}{index}"
    return call_id[: _MAX_CHARS - len(suffix)] + suffix


def safe_id(call_id: str) -> str:
    """The id in letters, digits, `_` and `-`; itself where it has no others."""
    if _is_valid(call_id) and not call_id.startswith(_ENCODED):
        return call_id
    written = call_id.encode(errors="surrogatepass")
    return _ENCODED + "".join(
        [chr(each) if each in _PLAIN_BYTES else f"_{each:02x}" for each in written]
    )


def written_id(call_id: str) -> str:
    """The id that the model wrote, from the id that a client sends; any other id unchanged."""
    if encoded := _is_encoded(call_id):
        as_text = _BYTE.sub(lambda match: chr(int(match[1], 16)), encoded[1])
        try:
            call_id = as_text.encode("latin-1").decode()
        except UnicodeDecodeError:
            return call_id
    repeated = _is_repeated(call_id)
    return repeated[1] if repeated else call_id
