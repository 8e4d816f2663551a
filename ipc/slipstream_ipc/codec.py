"""Bytes to typed frames and back, one codec for each end of each hop, built once.

Owns: msgpack, and the size limits of messages. Does not know: sockets, what a body means.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from slipstream_ipc.errors import BadRequest, ProtocolError
from slipstream_ipc.messages import (
    ClientToWorker,
    CoreToWorker,
    Frame,
    SamplingParams,
    WorkerToClient,
    WorkerToCore,
)

Out = TypeVar("Out")
In = TypeVar("In")

MAX_MESSAGE_BYTES = 16 * 2**20  # no message of either hop may be larger
MESSAGE_BUDGET_BYTES = 2**20  # what a sender that cuts a history into messages aims for

_encoder = msgspec.msgpack.Encoder()


class Codec(Generic[Out, In]):
    """Encodes frames of `Out` bodies, decodes frames of `In` bodies."""

    def __init__(self, incoming: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[Frame[In]] = msgspec.msgpack.Decoder(incoming)

    def encode(self, frame: Frame[Out]) -> bytes:
        """The frame's bytes."""
        return _encoder.encode(frame)

    def decode(self, data: bytes) -> Frame[In]:
        """The frame in `data`; ProtocolError where it is none, or too large."""
        if len(data) > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a message of {len(data)} bytes, allowed: {MAX_MESSAGE_BYTES}")
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise ProtocolError(f"not a message of this protocol: {error}") from error


def client_codec() -> Codec[ClientToWorker, WorkerToClient]:
    """For a client, towards its worker."""
    return Codec(Frame[WorkerToClient])


def front_codec() -> Codec[WorkerToClient, ClientToWorker]:
    """For a worker, towards its clients."""
    return Codec(Frame[ClientToWorker])


def worker_codec() -> Codec[WorkerToCore, CoreToWorker]:
    """For a worker, towards its core."""
    return Codec(Frame[CoreToWorker])


def core_codec() -> Codec[CoreToWorker, WorkerToCore]:
    """For a core, towards its workers."""
    return Codec(Frame[WorkerToCore])


_params_decoder = msgspec.msgpack.Decoder(SamplingParams)


def encode_params(params: SamplingParams) -> msgspec.Raw:
    """The params as they travel inside a Submit."""
    return msgspec.Raw(_encoder.encode(params))


def decode_params(raw: msgspec.Raw) -> SamplingParams:
    """The params of a Submit; BadRequest where they are none."""
    try:
        return _params_decoder.decode(raw)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        allowed = "fields " + ", ".join(SamplingParams.__struct_fields__)
        raise BadRequest("params", str(error), allowed) from error
