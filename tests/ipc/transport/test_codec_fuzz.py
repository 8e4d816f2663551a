"""All four decoders against what the fuzzer makes of every message: a frame or a ProtocolError."""

from __future__ import annotations

from random import Random
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.helpers.admits import admit_of

from slipstream_ipc.errors import ProtocolError
from slipstream_ipc.messages import (
    ComputedPromptLogprobs,
    Deltas,
    End,
    Fault,
    Frame,
    LogprobColumns,
    ModelCard,
    PromptLogprobs,
    Registered,
    Report,
    SamplingParams,
    Step,
    Submit,
    Welcome,
    Withdraw,
)
from slipstream_ipc.transport.codec import (
    Codec,
    client_codec,
    core_codec,
    front_codec,
    worker_codec,
)
from slipstream_verify.fuzz.mutation import flipped, noise, restructured, truncated

CODECS = (front_codec(), client_codec(), core_codec(), worker_codec())
FAULT = Fault("engine", "why", "field")
COLUMNS = LogprobColumns(2, bytes(16), bytes(16), bytes(8))
ADMIT = admit_of(bytes(16), bytes(8), SamplingParams(), (1, 2), 5, 10, bytes(8), logprobs=COLUMNS)
BODIES: list[Any] = [
    Welcome(1, ModelCard("m", "p", 10, 10, (1,))),
    Submit(1, bytes(16), msgspec.Raw(msgspec.msgpack.encode({"top_k": 3})), text="x"),
    Deltas(bytes(8), bytes(8), bytes(8), ["a", "b"], bytes(8), ends=(End("stop", 1, "x"),)),
    ADMIT,
    Registered(3, ADMIT, End("error", 2, None, FAULT)),
    Report(7, bytes(8), bytes(8)),
    Withdraw(bytes(16), End("abort", 3)),
    Step(9, bytes(8), bytes(8), logprobs=COLUMNS),
    PromptLogprobs(1, 2, COLUMNS),
    ComputedPromptLogprobs(bytes(16), 2, COLUMNS),
]
MESSAGES = [msgspec.msgpack.encode(Frame(1, 1, 1, body)) for body in BODIES]


def decode(codec: Codec[Any, Any], data: bytes) -> None:
    frame = None
    try:
        frame = codec.decode(data)
    except ProtocolError as error:
        says = str(error)
    if frame is None:
        assert 0 < len(says) < 400
        return
    assert isinstance(frame, Frame)
    assert frame.body is None or type(frame.body) in get_args(get_args(codec._incoming)[0])


@pytest.mark.parametrize("seed", range(4))
def test_whatever_arrives_is_a_frame_or_a_protocol_error(seed: int) -> None:
    random = Random(seed)
    for _ in range(2500):
        data = random.choice(MESSAGES)
        for change in random.sample((truncated, flipped, restructured), random.choice((1, 1, 2))):
            data = change(random, data)
        for codec in CODECS:
            decode(codec, data)
        decode(random.choice(CODECS), noise(random))


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats()
        | st.text(max_size=5)
        | st.binary(max_size=20),
        lambda inner: (
            st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
        ),
        max_leaves=20,
    ),
    st.sampled_from([0, 3, 10, 11, 12, 20, 22, 25, 30, 31, 32, 33, 34, 40, 41, 43, 47]),
)
def test_any_fields_under_any_tag(fields: Any, tag: int) -> None:
    body = [tag, *(fields if isinstance(fields, list) else [fields])]
    for codec in CODECS:
        decode(codec, msgspec.msgpack.encode([1, 1, 1, body]))


def test_the_same_random_makes_the_same_bytes() -> None:
    def made() -> list[bytes]:
        random = Random(9)
        return [
            change(random, message)
            for message in MESSAGES
            for change in (truncated, flipped, restructured)
            for _ in range(20)
        ] + [noise(random) for _ in range(50)]

    assert made() == made()
    assert len(set(made())) > 300
