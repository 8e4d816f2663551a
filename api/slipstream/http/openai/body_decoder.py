"""Decodes request bodies: from JSON to the types of `request_bodies`, or to an error that names the
field.

Decoding blocks the event loop, and with it all streams, in proportion to the number of values:
16 MiB of token ids took 0.4 s. So values are counted first, in a fraction of that time. Lists and
objects are counted apart: each takes a hundred times its two bytes in memory.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Sequence
from operator import attrgetter
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET

from slipstream.http.api_errors import ApiError, bad_field
from slipstream.http.openai.ignored_fields import IgnoredFields, known_fields, without_unknown
from slipstream.http.openai.request_bodies import NEUTRAL_VALUES, OWN_NEUTRAL_VALUES
from slipstream.spelling import did_you_mean
from slipstream.vllm_names import structured_outputs_name, unsupported_value
from slipstream_ipc.errors import BadRequest, UnknownField, brief
from slipstream_ipc.validation.chat_template import MAX_TEMPLATE_NESTING
from slipstream_ipc.validation.field_types import field_error

Body = TypeVar("Body")

_SMALL_BYTES = 2**16  # smaller bodies decode fast, whatever they contain
_MAX_VALUES = 2**20  # a batch of 1,024 prompts of 1,024 token ids
_MAX_CONTAINERS = 2**15  # lists and objects: a chat of 16,384 messages with a part each
_MAX_FIELDS = 2**15  # of a body with unknown fields: objects of Python are made of all of them
_PIECE_BYTES = 2**20  # of a body, looked at at once
# msgspec's words of half a character; a body that ends soon after one is "truncated"
_HALF_AT = re.compile(r"surrogate pair \(byte (\d+)\)")
_TRUNCATED = "truncated"
_HALF_BYTES = 12  # of two escapes; the half stands as far before the place as that, at most
# an escaped backslash, a character of two halves, or one half
_ESCAPES = re.compile(rb"(?i)\\\\|\\ud[89ab]..\\ud[c-f]..|(\\ud[89a-f]..)")
_UNKNOWN = "Object contains unknown field"  # msgspec's words


class BodyDecoder(Generic[Body]):
    """Decodes bodies of one type."""

    def __init__(self, body_type: type[Body], readable: Callable[[Any], Any] | None = None) -> None:
        """readable: of a body that is not of the type, as builtins, makes one that may be."""
        self._type = body_type
        self._readable = readable
        self._decoder = msgspec.json.Decoder(body_type)
        self._known = known_fields(body_type)

    def decode(self, body: bytes, ignored: IgnoredFields | None = None) -> Body:
        """The body, without unknown fields, which are added to `ignored`; None refuses them, and so
        does a body with more than `_MAX_FIELDS` fields.

        Raises ApiError for malformed JSON, wrong types and unknown fields that are not ignored.
        """
        try:
            return self._decoder.decode(body)
        except msgspec.ValidationError as error:
            is_unknown = ignored is not None and str(error).startswith(_UNKNOWN)
            is_curable = is_unknown or self._readable is not None
            if not is_curable or _num_of(b":", body, _MAX_FIELDS) > _MAX_FIELDS:
                raise _wrong_field(field_error(error, self._type, _quotable(body))) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _not_json(error, body) from None
        return self._decode_known(body, ignored)

    def _decode_known(self, body: bytes, ignored: IgnoredFields | None) -> Body:
        try:
            given = known = msgspec.json.decode(body)
            if self._readable is not None:
                known = self._readable(known)
            if ignored is not None:
                known = without_unknown(known, self._known, ignored)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _not_json(error, body) from None
        try:
            return msgspec.convert(known, self._type, str_keys=True)
        except msgspec.ValidationError as error:
            quoted = given if len(body) <= _SMALL_BYTES else UNSET
            raise _wrong_field(field_error(error, self._type, quoted)) from None


def _not_json(error: Exception, body: bytes) -> ApiError:
    if isinstance(error, RecursionError):
        allowed = f"at most {MAX_TEMPLATE_NESTING} levels of them"
        return bad_field(
            None, f"the body: got lists and objects nested too deeply, allowed: {allowed}"
        )
    if (half := _half_of_character(str(error), body)) is not None:
        what = f"the body: got {half.decode(errors='replace')}, half of a character"
        return bad_field(None, f"{what}, allowed: whole ones")
    return bad_field(None, f"the body is not JSON: {error}")


def _half_of_character(error: str, body: bytes) -> bytes | None:
    """The half of a character that a decoder's `error` is about. Looks at a few bytes alone: a body
    may be nothing but escapes.
    """
    place = _HALF_AT.search(error)
    if place is None and _TRUNCATED not in error:
        return None
    end = len(body) if place is None else int(place[1])
    begin = max(0, end - 4 * _HALF_BYTES)
    num_before = begin - len(body[:begin].rstrip(b"\\"))
    for found in _ESCAPES.finditer(body, begin - num_before % 2, end):
        if found[1] is not None and found.start() >= end - _HALF_BYTES:
            return found[1]
    return None


def _quotable(body: bytes) -> object:
    """The body as builtins, for an error to quote a part of; UNSET where that takes long."""
    if len(body) > _SMALL_BYTES:
        return UNSET
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return UNSET  # malformed after the wrong part


def check_num_values(body: bytes, max_model_len: int) -> None:
    """Raises ApiError for a body with more values, or more lists and objects, than a valid request
    can have.

    Values are counted by commas, including those inside strings: a text with as many has more
    tokens than the model takes. max_model_len: 0 while the model is not known.
    """
    if len(body) <= _SMALL_BYTES:
        return
    most = max(_MAX_VALUES, 4 * max_model_len)
    if (num := body.count(b",")) > most:
        what = f"the request's body: got {num} times ',', allowed: {most}"
        raise ApiError(413, what, code="request_too_large")
    num = _num_of(b"{[", body, _MAX_CONTAINERS)
    if num > _MAX_CONTAINERS:
        what = f"the request's body: got {num} lists and objects, allowed: {_MAX_CONTAINERS}"
        raise ApiError(413, what, code="request_too_large")


def _num_of(signs: bytes, body: bytes, most: int) -> int:
    """The number of these signs in a JSON text, outside of its strings.

    Where they are no more than `most` with those inside, it is that number.
    """
    num = sum(body.count(bytes([sign])) for sign in signs)
    if num <= most:
        return num
    num, is_in_string = 0, 0
    # neither of the two stands for a quote or a sign, and both keep the places of all others
    unescaped = np.frombuffer(body.replace(rb"\\", b"__").replace(rb"\"", b"__"), np.uint8)
    for begin in range(0, len(unescaped), _PIECE_BYTES):
        piece = unescaped[begin : begin + _PIECE_BYTES]
        in_string = np.cumsum(piece == ord('"'), dtype=np.uint8)
        in_string += np.uint8(is_in_string)
        in_string &= 1
        is_in_string = int(in_string[-1])
        is_outside = in_string == 0
        num += sum(int(np.count_nonzero((piece == sign) & is_outside)) for sign in signs)
    return num


def refuse_unsupported(
    body: msgspec.Struct, where: str = "", *, supported: Collection[str] = ()
) -> None:
    """Raises ApiError for the first field whose value is not supported yet (see `NEUTRAL_VALUES`).

    where: prefix of field names in messages. supported: fields that this endpoint does support.
    """
    for name, neutral in _unsupported_fields(type(body)):
        value = getattr(body, name)
        if value is None or name in supported:
            continue
        wrong = unsupported_value(where + name, value, neutral)
        if wrong is not None:
            raise bad_field(where + name, wrong)


def refuse_unsupported_in(parts: Sequence[msgspec.Struct], where: str) -> None:
    """`refuse_unsupported` for each element of a list, which is named `where` in messages. All
    elements are of one type: a chat has thousands of messages.
    """
    names = [name for name, _ in _unsupported_fields(type(parts[0]))] if parts else []
    if not names:
        return
    given = attrgetter(*names, names[0])  # of two names or more it returns a tuple
    nothing = (None,) * (len(names) + 1)
    for index, part in enumerate(parts):
        if given(part) != nothing:
            refuse_unsupported(part, f"{where}[{index}].")


@functools.cache
def _unsupported_fields(body: type[msgspec.Struct]) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    """The fields that are not supported yet, each with the values that change nothing."""
    return tuple(
        (name, (*NEUTRAL_VALUES[name], *OWN_NEUTRAL_VALUES.get((body, name), ())))
        for name in body.__struct_fields__
        if name in NEUTRAL_VALUES
    )


def _wrong_field(wrong: BadRequest) -> ApiError:
    if not wrong.field:
        return bad_field(None, f"the body{wrong}")
    field, message = brief(wrong.field), brief(str(wrong))
    if isinstance(wrong, UnknownField):
        hint = structured_outputs_name(wrong.name) or did_you_mean(wrong.name, wrong.allowed)
        message = f"{field}: unknown field{hint}" if hint else message
    return bad_field(field, message)
