"""The exceptions for messages and requests that are not accepted.

ProtocolError       a peer's message breaks the protocol
BadRequest          a caller's request is invalid; names the field
├── TooManyTokens   the request does not fit the model
├── UnknownField    there is no field of this name
└── MissingField    a required field is not there
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from slipstream_ipc.messages import Fault

_MAX_CHARS = 300
_MAX_SHOWN = 80
_MAX_LISTED = 8  # names of fields in an error
_MAX_NAMES = 32  # of what is served, in an error
_BUILT_IN = (str, bytes, list, tuple, dict)  # what is quoted piece by piece


def brief(text: str) -> str:
    """An error's text, cut to 300 characters: it may quote kilobytes of input."""
    return text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS - 3] + "..."


def one_of(names: Sequence[str]) -> str:
    """The names that are allowed, one or more, for an error: the first 32, and how many more."""
    given = ", ".join(map(repr, names[:_MAX_NAMES]))
    if len(names) > _MAX_NAMES:
        given += f" and {len(names) - _MAX_NAMES} more"
    return f"one of {given}"


class ProtocolError(Exception):
    """A peer's message breaks the protocol; the text says what was found and what was expected.

    `field` names the wrong field, or is None if the error is not about a single field.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class Summary(str):
    """A summary of the value that an error is about, not quoted in it: `18000 tokens`, `an empty
    list`.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class BadRequest(ValueError):  # noqa: N818  (the outcome's name in HTTP and in this field)
    """The caller's request is invalid; `field` names the wrong field."""

    def __init__(self, field: str, given: object, allowed: str) -> None:
        super().__init__(f"{field}: got {shown(given)}, allowed: {allowed}")
        self.field = field

    @property
    def fault(self) -> Fault:
        """The error as a wire type."""
        return Fault("bad_request", str(self), self.field)


class TooManyTokens(BadRequest):
    """The prompt, or the prompt with the answer that it asks for, is longer than the model takes.

    num_prompt_tokens, num_answer_tokens, max_num_tokens: see `Fault`.
    """

    def __init__(
        self,
        field: str,
        given: object,
        allowed: str,
        num_prompt_tokens: int,
        max_num_tokens: int,
        *,
        num_answer_tokens: int = 0,
    ) -> None:
        super().__init__(field, given, allowed)
        self._numbers = num_prompt_tokens, num_answer_tokens, max_num_tokens

    @property
    def fault(self) -> Fault:
        """The error as a wire type."""
        return Fault("bad_request", str(self), self.field, *self._numbers)


class UnknownField(BadRequest):
    """The request has a field of no known name.

    name: the field's name, without those of the mappings that it is in. allowed: the known names
    there, with their values in words.
    """

    def __init__(self, field: str, name: str, allowed: Mapping[str, str]) -> None:
        names = ", ".join(sorted(allowed)) if 0 < len(allowed) <= _MAX_LISTED else ""
        text = f"{brief(field)}: unknown field" + (f", allowed: {names}" if names else "")
        ValueError.__init__(self, text)
        self.field = field
        self.name = name
        self.allowed = allowed


class MissingField(BadRequest):
    """The request lacks a required field. Parameters as those of `UnknownField`."""

    def __init__(self, field: str, name: str, allowed: Mapping[str, str]) -> None:
        ValueError.__init__(self, f"{field}: missing, allowed: {allowed.get(name, 'any value')}")
        self.field = field


def shown(given: object) -> str:
    """A value as errors quote it: at most 80 characters. What is not shown is not looked at."""
    text = ""
    try:
        for piece in _pieces(given):
            text += piece
            if len(text) > _MAX_SHOWN:
                return text[: _MAX_SHOWN - 3] + "..."
    except RecursionError:
        return f"a deeply nested {type(given).__name__}"
    return text


def _pieces(value: object) -> Iterator[str]:
    """The repr of a value, piece by piece."""
    if type(value) not in _BUILT_IN:
        yield repr(value)
        return
    match value:
        case str() | bytes():
            yield repr(value[: _MAX_SHOWN + 1])
        case list():
            yield "["
            yield from _joined(map(_pieces, value))
            yield "]"
        case tuple():
            yield "("
            yield from _joined(map(_pieces, value))
            yield ",)" if len(value) == 1 else ")"
        case dict():
            yield "{"
            yield from _joined(map(_pair, value.items()))
            yield "}"


def _pair(item: tuple[object, object]) -> Iterator[str]:
    yield from _pieces(item[0])
    yield ": "
    yield from _pieces(item[1])


def _joined(entries: Iterable[Iterator[str]]) -> Iterator[str]:
    for index, entry in enumerate(entries):
        if index:
            yield ", "
        yield from entry
