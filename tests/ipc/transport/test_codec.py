"""Every message there and back; whatever else arrives is a ProtocolError and nothing worse."""

from __future__ import annotations

import contextlib
import enum
import types
import typing
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream_ipc import messages
from slipstream_ipc.errors import BadRequest, ProtocolError
from slipstream_ipc.messages import (
    AttachRefused,
    ClientToWorker,
    CoreToWorker,
    Frame,
    Ping,
    SamplingParams,
    Submit,
    Welcome,
    WorkerToClient,
    WorkerToCore,
)
from slipstream_ipc.messages.budgets import MAX_MESSAGE_BYTES, MAX_PARAMS_BYTES
from slipstream_ipc.transport.codec import (
    Codec,
    client_codec,
    core_codec,
    decode_params,
    encode_params,
    front_codec,
    worker_codec,
)
from slipstream_ipc.validation.sampling_params import (
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    check_params,
)

# (who sends, who receives, what)
DIRECTIONS: list[tuple[Codec[Any, Any], Codec[Any, Any], Any]] = [
    (client_codec(), front_codec(), ClientToWorker),
    (front_codec(), client_codec(), WorkerToClient),
    (worker_codec(), core_codec(), WorkerToCore),
    (core_codec(), worker_codec(), CoreToWorker),
]
RECEIVERS = [receiver for _, receiver, _ in DIRECTIONS]
ADMIT = [30, b"", b"", [{}], [0, 1]]  # before `begun`
BEGUN = [b"", None, None, None, False, 0]  # before `owner`

_SIMPLE: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    str: st.text(max_size=8),
    bytes: st.binary(max_size=12),
    type(None): st.none(),
}


def within(kind: Any, limits: msgspec.Meta) -> st.SearchStrategy[Any]:
    """Any value of a type inside its range or length."""
    if kind is int:
        low = -(2**63) if limits.ge is None else limits.ge
        return st.integers(low, 2**64 - 1 if limits.le is None else limits.le)
    assert limits.max_length is not None
    if kind is bytes:
        return st.binary(max_size=min(limits.max_length, 24))
    if kind is str:
        return st.text(max_size=min(limits.max_length, 24))
    # lists of a few: fewer than any limit
    return st.lists(values_of(get_args(kind)[0]), min_size=limits.min_length or 0, max_size=3).map(
        get_origin(kind) or list
    )


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a wire type."""
    if get_origin(kind) is Annotated:
        inner, limits = get_args(kind)
        return within(inner, limits)
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    if kind is msgspec.Raw:
        return values_of(SamplingParams).map(encode_params)
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return st.sampled_from(args)
    if origin is tuple:
        return st.lists(values_of(args[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(values_of(args[0]), values_of(args[1]), max_size=3)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return st.sampled_from(kind)
    if kind is Any:  # in JSON
        return st.none() | st.integers(0, 9) | st.text()
    if origin is list:
        return st.lists(values_of(args[0]), max_size=3)
    if origin in (types.UnionType, typing.Union):
        return st.one_of(*map(values_of, args))
    hints = typing.get_type_hints(kind, include_extras=True)
    # a registration's values are held against the limits of requests, too
    fixed: dict[str, Any] = {}
    if kind is messages.RequestSpec:
        fixed["params"] = SamplingParams(top_k=3)
    if kind is messages.Begun:
        hints["output_ids"] = Literal[b"", b"abcd"]
    if kind is messages.Derived:
        hints["max_tokens"] = Annotated[int, msgspec.Meta(ge=1, le=9)]
        fixed["bad_word_ids"] = bytes(12)
        fixed["bad_word_counts"] = bytes([1, 0, 0, 0, 2, 0, 0, 0])
        fixed["prediction_ids"] = bytes(4)
    if kind is messages.Admit:
        fixed["prompt_ids"] = bytes(8)
    given = {name: st.just(value) for name, value in fixed.items()}
    rest = {name: values_of(hint) for name, hint in hints.items() if name not in fixed}
    return st.builds(kind, **given, **rest)


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


@pytest.mark.quick
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
        (front_codec(), front_codec(), AttachRefused(messages.Fault("engine", ""))),
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


@pytest.mark.parametrize(
    ("receiver", "body", "field", "says"),
    [
        (front_codec(), [10, -1, bytes(16), {}], "handle", "Submit.handle: Expected `int` >= 0"),
        (front_codec(), [10, 2**32, bytes(16), {}], "handle", "<= 4294967295"),
        (front_codec(), [10, 1, bytes(17), {}], "stream_id", "of length <= 16"),
        (front_codec(), [10, 1, b"", {}, None, b"", [{}] * 16385], "messages", "<= 16384"),
        (front_codec(), [10, 1, b"", {}, None, b"", [{"role": 1}]], "messages", r"\[0\].role"),
        (front_codec(), [10, 1, b"", {}, None, b"", [], "x" * 65537], "label", "<= 65536"),
        (front_codec(), [10, 1, b"", {}, None, b"", [], "", 0.5], "priority", "got `float`"),
        (front_codec(), [10, 1, b"", {}, None, b"", [], "", 0, True, b"", -1], "num_chars", ">= 0"),
        (front_codec(), [11, 1, b"", -1, 0], "num_chars", ">= 0"),
        (front_codec(), [11, 1, b"", 0, 2**32], "num_tokens", "<= 4294967295"),
        (front_codec(), [11, 1, b"", 0, 0, -1], "digest", ">= 0"),
        (front_codec(), [12, b"", "x"], "handle", "got `str`"),
        (front_codec(), [0, 1, bytes(65)], "identity", "<= 64"),
        (front_codec(), [99], "tag", "99"),
        (core_codec(), [*ADMIT, [*BEGUN, bytes(65)]], "owner", "<= 64"),
        (
            core_codec(),
            [30, b"", b"", [{}], [0, 1, [-1]]],
            "stop_token_ids",
            "Admit.stop_token_ids",
        ),
        (core_codec(), [30, b"", b"", [{}], [0, 1, [0] * 4097]], "stop_token_ids", "<= 4096"),
        (core_codec(), [30, b"", b"", [{}], [2**63, 1]], "seed", "Admit.seed"),
        (core_codec(), [30, b"", b"", [{}, "", 2**31], [0, 1]], "priority", "<= 2147483647"),
        (core_codec(), [30, b"", b"", [{}, "x" * 1025], [0, 1]], "label", "<= 1024"),
        (core_codec(), [30, b"", b"", [{}], [0, 0]], "max_tokens", "allowed: an integer >= 1"),
        (core_codec(), [30, b"", b"xyz", [{}], [0, 1]], "prompt_ids", "u32"),
        (core_codec(), [30, b"", b"", [{"top_p": 0.0}], [0, 1]], "top_p", r"\(0, 1\]"),
        (core_codec(), [30, b"", b"", [{"logprobs": 2**40}], [0, 1]], "logprobs", "300000"),
        (core_codec(), [30, b"", b"", [{"top_p": "1"}], [0, 1]], "params", "Admit.params.top_p"),
        (
            core_codec(),
            [*ADMIT, [b"", None, None, None, False, 0, b"", -1]],
            "handle",
            "Admit.handle",
        ),
        (core_codec(), [31, -1], "step", "Report.step"),
        (core_codec(), [32, b"", ["stop", -1]], "end", r"Withdraw.end\[1\]"),
        (core_codec(), [33, [bytes(17)]], "stream_ids", r"Forget.stream_ids\[0\]"),
        (worker_codec(), [40, b"", -1], "row", "Admitted.row"),
        (client_codec(), [21, 0, ["engine", "x" * 2**17]], "fault", r"Rejected.fault\[1\]"),
    ],
)
def test_the_field_that_is_wrong_is_named(
    receiver: Codec[Any, Any], body: list[Any], field: str, says: str
) -> None:
    with pytest.raises(ProtocolError, match=says) as caught:
        receiver.decode(msgspec.msgpack.encode([1, 1, 1, body]))
    assert caught.value.field == field
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("at", range(3))
def test_a_frames_own_field_is_named(at: int) -> None:
    numbers = [1, 1, 1]
    numbers[at] = -1
    with pytest.raises(ProtocolError) as caught:
        front_codec().decode(msgspec.msgpack.encode([*numbers, None]))
    assert caught.value.field == ("epoch", "seq", "ack")[at]


def test_an_error_quotes_little_of_what_was_sent() -> None:
    """Or a client could make the worker send it as much as it sent."""
    turn = {"role": "", "content": "", "x" * 2**20: 1}
    with pytest.raises(ProtocolError) as caught:
        front_codec().decode(msgspec.msgpack.encode([1, 1, 1, [10, 1, b"", {}, None, b"", [turn]]]))
    assert len(str(caught.value)) < 400


def test_parameters_have_a_size() -> None:
    """However many stop strings there are, they are not even made."""
    raw = msgspec.Raw(msgspec.msgpack.encode({"stop": [""] * MAX_PARAMS_BYTES}))
    with pytest.raises(BadRequest, match=f"at most {MAX_PARAMS_BYTES}") as caught:
        decode_params(raw)
    assert caught.value.field == "params"
    most = SamplingParams(
        stop=("\U0001f600" * MAX_STOP_CHARS,) * MAX_STOPS,
        stop_token_ids=(2**32 - 1,) * MAX_STOP_TOKEN_IDS,
    )
    check_params(most)
    assert decode_params(encode_params(most)) == most
