"""Encodes and decodes frames as msgpack, with one codec for each end of each hop.

- The decoder enforces the types, ranges and lengths of `slipstream_ipc.messages`. A core's codec
  also checks registrations with `slipstream_ipc.validation.sampling_params`. Clients' requests are
  checked by the worker instead, so that an error is reported for its request.
- Decoding returns a frame or raises ProtocolError with a short text that names the wrong field;
  no other exception escapes.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from slipstream_ipc.errors import BadRequest, ProtocolError, Summary, brief
from slipstream_ipc.messages import (
    CORE_HOP_VERSION,
    PROTOCOL_VERSION,
    Admit,
    Begun,
    ClientToWorker,
    Control,
    CoreToWorker,
    Derived,
    Frame,
    RequestSpec,
    SamplingParams,
    WorkerToClient,
    WorkerToCore,
)
from slipstream_ipc.messages.budgets import (
    MAX_CORE_MESSAGE_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_PARAMS_BYTES,
)
from slipstream_ipc.validation.sampling_params import check_admit

Out = TypeVar("Out")
In = TypeVar("In")

_encoder = msgspec.msgpack.Encoder()


class Codec(Generic[Out, In]):
    """Encodes frames of `Out` bodies, decodes frames of `In` bodies."""

    def __init__(
        self,
        incoming: Any,
        max_bytes: int = MAX_MESSAGE_BYTES,
        checks: dict[type, Callable[[Any], None]] | None = None,
        version: int = PROTOCOL_VERSION,
    ) -> None:
        """checks: further checks of bodies by type, which raise BadRequest or ProtocolError.
        version: of the hop's messages, which both ends say when they attach.
        """
        self.version = version
        self._decoder: msgspec.msgpack.Decoder[Frame[In]] = msgspec.msgpack.Decoder(incoming)
        self._incoming = incoming
        self._max_bytes = max_bytes
        self._checks = checks
        # the frame's bytes
        self.encode: Callable[[Frame[Out] | Frame[Control]], bytes] = _encoder.encode

    @property
    def max_message_bytes(self) -> int:
        """The largest message that `decode` accepts, in bytes."""
        return self._max_bytes

    def decode(self, data: bytes) -> Frame[In]:
        """The frame in `data`. Raises: ProtocolError if it is invalid or too large."""
        if len(data) > self._max_bytes:
            raise ProtocolError(f"a message of {len(data)} bytes, allowed: {self._max_bytes}")
        try:
            frame = self._decoder.decode(data)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            why, field = _explained(error, data, self._incoming)
            raise ProtocolError(f"not a message of this protocol: {why}", field) from None
        if self._checks is not None:
            check = self._checks.get(type(frame.body))
            if check is not None:
                try:
                    check(frame.body)
                except BadRequest as error:
                    raise ProtocolError(brief(str(error)), error.field) from None
        return frame


def client_codec() -> Codec[ClientToWorker, WorkerToClient]:
    """The client's end of the hop to its worker."""
    return Codec(Frame[WorkerToClient])


def front_codec() -> Codec[WorkerToClient, ClientToWorker]:
    """The worker's end of the hop to its clients."""
    return Codec(Frame[ClientToWorker])


def worker_codec() -> Codec[WorkerToCore, CoreToWorker]:
    """The worker's end of the hop to its core."""
    return Codec(Frame[CoreToWorker], MAX_CORE_MESSAGE_BYTES, version=CORE_HOP_VERSION)


def core_codec() -> Codec[CoreToWorker, WorkerToCore]:
    """The core's end of the hop to its workers."""
    return Codec(
        Frame[WorkerToCore], MAX_CORE_MESSAGE_BYTES, {Admit: check_admit}, CORE_HOP_VERSION
    )


_params_decoder = msgspec.msgpack.Decoder(SamplingParams)


def encode_params(params: SamplingParams) -> msgspec.Raw:
    """The params as a Submit carries them."""
    return msgspec.Raw(_encoder.encode(params))


def decode_params(raw: msgspec.Raw) -> SamplingParams:
    """The params of a Submit. Raises: BadRequest if they are invalid or too large."""
    num_bytes = len(memoryview(raw))
    if num_bytes > MAX_PARAMS_BYTES:
        raise BadRequest("params", Summary(f"{num_bytes} bytes"), f"at most {MAX_PARAMS_BYTES}")
    try:
        return _params_decoder.decode(raw)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        allowed = "fields " + ", ".join(SamplingParams.__struct_fields__)
        raise BadRequest("params", str(error), allowed) from error


# ---- which field is wrong -----------------------------------------------------------------------


class _Undecoded(msgspec.Struct, array_like=True):
    """A frame whose fields are not decoded."""

    epoch: msgspec.Raw
    seq: msgspec.Raw
    ack: msgspec.Raw
    body: msgspec.Raw


_parts_decoder = msgspec.msgpack.Decoder(_Undecoded)
# indices of a field in the frame and in its body, then the path inside that field
_FIELD_PATH = re.compile(r"\[(\d+)\](?:\[(\d+)\])?([^`]*)`")
_PART = re.compile(r"\[(\d+)\]")
# bodies' fields with fields of their own
_PARTS: dict[str, type[msgspec.Struct]] = {
    "spec": RequestSpec,
    "derived": Derived,
    "begun": Begun,
}


def _explained(error: Exception, data: bytes, incoming: Any) -> tuple[str, str | None]:
    """An error's text with the field's name in place of its index, and that name."""
    what, _, path = str(error).rpartition(" - at `$")
    found = _FIELD_PATH.match(path)
    if not what or found is None or int(found[1]) >= len(Frame.__struct_fields__):
        return brief(str(error)), None
    if found[2] is None:
        return brief(what), Frame.__struct_fields__[int(found[1])]
    if found[2] == "0":
        return brief(what), "tag"
    body, index = _body_type(data, incoming), int(found[2]) - 1
    if body is None or index >= len(body.__struct_fields__):
        return brief(str(error)), None
    name, inside = body.__struct_fields__[index], found[3]
    if name in _PARTS and (part := _PART.match(inside)) is not None:
        name, inside = _PARTS[name].__struct_fields__[int(part[1])], inside[part.end() :]
    return brief(f"{body.__name__}.{name}{inside}: {what}"), name


def _body_type(data: bytes, incoming: Any) -> Any:
    """The type that the tag of the frame's body names, or None if the tag cannot be read."""
    try:
        body = bytes(memoryview(_parts_decoder.decode(data).body)[:4])
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    at = 1 if body[:1] < b"\xa0" else 3  # the tag follows the header of a fixarray or an array16
    (union,) = typing.get_args(incoming)
    kinds = {kind.__struct_config__.tag: kind for kind in typing.get_args(union)}
    return kinds.get(body[at]) if len(body) > at else None
