"""Every message there and back; whatever else arrives is a ProtocolError and nothing worse."""

from __future__ import annotations

import contextlib
import types
import typing
from typing import Any, Literal, get_args, get_origin

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream_ipc import messages
from slipstream_ipc.codec import (
    MAX_MESSAGE_BYTES,
    Codec,
    client_codec,
    core_codec,
    decode_params,
    encode_params,
    front_codec,
    worker_codec,
)
from slipstream_ipc.errors import BadRequest, ProtocolError
from slipstream_ipc.messages import (
    ClientToWorker,
    CoreToWorker,
    Frame,
    Ping,
    Refusal,
    SamplingParams,
    Submit,
    Welcome,
    WorkerToClient,
    WorkerToCore,
)

# (who sends, who receives, what)
DIRECTIONS: list[tuple[Codec[Any, Any], Codec[Any, Any], Any]] = [
    (client_codec(), front_codec(), ClientToWorker),
    (front_codec(), client_codec(), WorkerToClient),
    (worker_codec(), core_codec(), WorkerToCore),
    (core_codec(), worker_codec(), CoreToWorker),
]
RECEIVERS = [receiver for _, receiver, _ in DIRECTIONS]

_SIMPLE: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    str: st.text(max_size=8),
    bytes: st.binary(max_size=12),
    type(None): st.none(),
}


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a wire type."""
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    if kind is msgspec.Raw:
        return values_of(SamplingParams).map(encode_params)
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return st.sampled_from(args)
    if origin is tuple:
        return st.lists(values_of(args[0]), max_size=3).map(tuple)
    if origin is list:
        return st.lists(values_of(args[0]), max_size=3)
    if origin in (types.UnionType, typing.Union):
        return st.one_of(*map(values_of, args))
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{name: values_of(hint) for name, hint in hints.items()})


def frames_of(union: Any) -> st.SearchStrategy[Frame[Any]]:
    number = st.integers(0, 2**64 - 1)
    return st.builds(Frame, number, number, number, st.none() | values_of(union))


def any_message() -> st.SearchStrategy[bytes]:
    of = [frames_of(union).map(sender.encode) for sender, _, union in DIRECTIONS]
    return st.one_of(*of)


def decode_or_refuse(data: bytes) -> None:
    """Either decodes, or raises a ProtocolError."""
    for receiver in RECEIVERS:
        try:
            frame = receiver.decode(data)
        except ProtocolError:
            continue
        assert isinstance(frame, Frame)


@pytest.mark.parametrize(("sender", "receiver", "union"), DIRECTIONS)
def test_round_trip(sender: Codec[Any, Any], receiver: Codec[Any, Any], union: Any) -> None:
    for kind in get_args(union):

        @settings(max_examples=15, deadline=None)
        @given(values_of(kind), st.integers(0, 2**64 - 1))
        def there_and_back(body: Any, number: int) -> None:
            frame = Frame(number, number, number, body)
            assert receiver.decode(sender.encode(frame)) == frame

        there_and_back()
    assert receiver.decode(sender.encode(Frame(1, 2, 3))) == Frame(1, 2, 3, None)


def test_every_tag_means_one_thing() -> None:
    by_tag: dict[Any, set[Any]] = {}
    for _, _, union in DIRECTIONS:
        for kind in get_args(union):
            by_tag.setdefault(kind.__struct_config__.tag, set()).add(kind)
    assert all(len(kinds) == 1 for kinds in by_tag.values())


@settings(max_examples=150, deadline=None)
@given(any_message(), st.data())
def test_truncated(data: bytes, draw: Any) -> None:
    cut = draw.draw(st.integers(0, len(data) - 1))
    for receiver in RECEIVERS:
        with pytest.raises(ProtocolError):
            receiver.decode(data[:cut])


@settings(max_examples=300, deadline=None)
@given(any_message(), st.lists(st.tuples(st.integers(0), st.binary(max_size=5)), min_size=1))
def test_mutated(data: bytes, changes: list[tuple[int, bytes]]) -> None:
    for at, instead in changes:
        begin = at % (len(data) + 1)
        data = data[:begin] + instead + data[begin + len(instead) // 2 :]
    decode_or_refuse(data)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=64))
def test_noise(data: bytes) -> None:
    decode_or_refuse(data)
    decode_or_refuse(b"\x94\x01\x01\x01" + data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x94\x01\x01\x01\xc0\x00",  # something behind the frame
        b"\x93\x01\x01\xca\x3f\x80\x00\x00",  # a float for a number
        b"\x91\x01",  # too short
        b"\x80",  # a map
        b"\x93\x01\x01\xc3",  # a bool for a number
        b"\x94\x01\x01\x01\x91\xcc\xff",  # an unknown tag
        b"\x94\x01\x01\x01\x91\xa1x",  # a tag that is none
        b"\x94\x01\x01\x01\x90",  # no tag
        b"\x91" * 100_000,  # deep
        b"\x94\x01\x01\x01" + b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",  # four billion entries, none of them here
        b"\x94\x01\x01\x01\x92\x17\xdd\xff\xff\xff\xff",
        b"\x94\x01\x01\x01\x93\x0a\x01\xc6\xff\xff\xff\xff",  # four billion bytes
        b"\x94\x01\x01\x01\x93\x0d\xdb\xff\xff\xff\xff",
        b"\x94\x01\x01\x01\x93\x15\x01\x93\xa6engine\xa1\xff\xc0",  # no UTF-8
        b"\x93\xcf\xff\xff\xff\xff\xff\xff\xff\xff\x01\xd3\x80",  # cut in a number
    ],
)
def test_no_frame(data: bytes) -> None:
    for receiver in RECEIVERS:
        with pytest.raises(ProtocolError):
            receiver.decode(data)


def test_tags_of_the_other_direction_are_unknown() -> None:
    for sender, receiver, body in (
        (front_codec(), front_codec(), Refusal(messages.Fault("engine", ""))),
        (client_codec(), client_codec(), messages.Abort(b"")),
        (client_codec(), core_codec(), messages.Goodbye()),
    ):
        with pytest.raises(ProtocolError, match="Invalid value"):
            receiver.decode(sender.encode(Frame(1, 1, 1, body)))


def test_size_limit() -> None:
    sender, receiver = client_codec(), front_codec()
    params = encode_params(SamplingParams())
    frame = Frame(1, 1, 1, Submit(1, b"", params, token_ids=bytes(MAX_MESSAGE_BYTES - 1000)))
    assert receiver.decode(sender.encode(frame)) == frame
    frame = Frame(1, 1, 1, Submit(1, b"", params, token_ids=bytes(MAX_MESSAGE_BYTES)))
    with pytest.raises(ProtocolError, match=f"allowed: {MAX_MESSAGE_BYTES}"):
        receiver.decode(sender.encode(frame))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(DIRECTIONS), st.data())
def test_a_newer_peers_appended_fields_are_skipped(direction: Any, data: Any) -> None:
    sender, receiver, union = direction
    frame = data.draw(frames_of(union))
    fields = msgspec.msgpack.decode(sender.encode(frame))
    anything = st.integers(0, 2**63) | st.text() | st.none() | st.lists(st.booleans())
    more = data.draw(st.lists(anything, max_size=4))
    if frame.body is not None:
        fields[3] += more
    assert receiver.decode(msgspec.msgpack.encode(fields + more)) == frame


def test_an_older_peers_missing_fields_have_their_defaults() -> None:
    hello = msgspec.msgpack.encode([1, 0, 0, [0, 1, b"me"]])
    assert front_codec().decode(hello) == Frame(1, 0, 0, messages.Hello(1, b"me", True))
    assert front_codec().decode(msgspec.msgpack.encode([1, 2, 3])) == Frame(1, 2, 3)


def test_what_was_decoded_cannot_be_changed() -> None:
    frame = client_codec().decode(front_codec().encode(Frame(1, 0, 0, Ping())))
    with pytest.raises(AttributeError):
        frame.epoch = 2  # type: ignore[misc]
    assert isinstance(frame.body, Ping)
    assert Welcome.__struct_config__.frozen


def test_submits_compare_by_content() -> None:
    """A worker tells a repeated Submit from a conflict by comparing them, Raw parts included."""
    one, other = (
        Submit(1, b"id", encode_params(SamplingParams(temperature=t))) for t in (0.0, 1.0)
    )
    again = front_codec().decode(client_codec().encode(Frame(1, 1, 1, one))).body
    assert again == one
    assert again != other


@settings(max_examples=60)
@given(values_of(SamplingParams))
def test_params_round_trip(params: SamplingParams) -> None:
    assert decode_params(encode_params(params)) == params


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (b"", "truncated"),
        (b"\xc1", "allowed: fields temperature"),
        (b"\x90", "got `array`"),
        (msgspec.msgpack.encode({"temprature": 1.0}), "temprature"),
        (msgspec.msgpack.encode({"top_k": "many"}), "top_k"),
        (msgspec.msgpack.encode({"stop_token_ids": [True]}), "stop_token_ids"),
        (b"\x91" * 100_000, "array"),
    ],
)
def test_params_that_are_none(raw: bytes, named: str) -> None:
    with pytest.raises(BadRequest, match=named) as caught:
        decode_params(msgspec.Raw(raw))
    assert caught.value.field == "params"
    assert caught.value.fault.field == "params"


@settings(max_examples=200)
@given(st.binary(max_size=40))
def test_params_of_noise(raw: bytes) -> None:
    with contextlib.suppress(BadRequest):
        decode_params(msgspec.Raw(raw))
