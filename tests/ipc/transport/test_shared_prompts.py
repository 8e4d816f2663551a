"""Registrations that share a prompt: together on their way, each by itself before and behind it."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.admits import PARTS, admit_of, with_fields

from slipstream_ipc.columns import pack_f32, pack_u32
from slipstream_ipc.errors import ProtocolError
from slipstream_ipc.messages import (
    MAX_OTHERS,
    Admit,
    AnswerSettings,
    Begun,
    Frame,
    KeepOptions,
    LogprobColumns,
    ReasoningIds,
    RequestTimes,
    SamplingParams,
    TraceContext,
)
from slipstream_ipc.transport import shared_prompts
from slipstream_ipc.transport.codec import core_codec, worker_codec
from slipstream_ipc.transport.shared_prompts import joined, registrations_of
from slipstream_ipc.validation.media import media_item

FIELDS = [
    name
    for struct in (Admit, *PARTS.values())
    for name in struct.__struct_fields__
    if name not in ("others", *PARTS)
]
# differing, they cost no message of their own
OWN = (
    *(name for name in Begun.__struct_fields__ if name != "prompt_logprobs"),
    *("stream_id", "seed", "fingerprint"),
)
LOGPROBS = LogprobColumns(1, pack_f32([-0.5]), pack_u32([7]), pack_u32([1]))


def sent(admits: Sequence[Admit]) -> list[Admit]:
    """The messages in which they arrive."""
    messages = []
    while admits:
        body, num = joined(admits[0], admits[1:])
        data = worker_codec().encode(Frame(1, 1, 0, body))
        messages.append(core_codec().decode(data).body)
        admits = admits[num:]
    return messages


def answers(num: int, prompt: bytes = bytes(4000)) -> list[Admit]:
    return [
        admit_of(
            *(bytes([n]) * 16, prompt, SamplingParams(temperature=0.5), (2,), n, 30),
            handle=n,
            fingerprint=bytes([n]),
        )
        for n in range(num)
    ]


@st.composite
def registrations(draw: st.DrawFn) -> Admit:
    seed = draw(st.integers(-2, 2))
    params = SamplingParams(max_tokens=draw(st.sampled_from([None, 5])))
    return admit_of(
        draw(st.binary(min_size=16, max_size=16)),
        draw(st.sampled_from([bytes(4), bytes(8), b"abcd"])),
        params,
        draw(st.sampled_from([(), (), (2,)])),
        seed,
        10,
        draw(st.sampled_from([b"", b"", b"tokn"])),
        logprobs=draw(st.sampled_from([None, None, LOGPROBS])),
        prompt_logprobs=draw(st.sampled_from([None, None, None, LOGPROBS])),
        label=draw(st.sampled_from(["", "", "x"])),
        handle=draw(st.integers(0, 9)),
        was_accepted=draw(st.booleans()),
        strikes=draw(st.integers(0, 3)),
        num_cached_tokens=draw(st.none() | st.integers(0, 64)),
    )


@given(st.lists(registrations(), max_size=12))
def test_what_arrives_is_what_was_asked_for_in_its_order(admits: list[Admit]) -> None:
    assert [each for body in sent(admits) for each in registrations_of(body)] == admits


def test_answers_to_a_prompt_are_one_message_with_one_prompt() -> None:
    admits = answers(100)
    (body,) = sent(admits)
    assert list(registrations_of(body)) == admits
    assert len({id(each.prompt_ids) for each in registrations_of(body)}) == 1
    assert len(worker_codec().encode(Frame(1, 1, 0, body))) < 2 * 4000 + 100 * 100


def test_others_are_bounded_in_number_and_bytes() -> None:
    assert [1 + len(body.others) for body in sent(answers(200))] == [MAX_OTHERS + 1, 72]
    large = [with_fields(each, output_ids=bytes(400)) for each in answers(10)]
    with patch.object(shared_prompts, "MAX_JOINED_BYTES", 4000 + 3 * 400):
        assert [1 + len(body.others) for body in sent(large)] == [3, 3, 3, 1]


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_is_an_answers_own_or_has_to_be_alike(field: str) -> None:
    words = {"bad_word_ids": pack_u32([1, 2]), "bad_word_counts": pack_u32([1, 1])}
    first, second = (with_fields(each, **words) for each in answers(2))
    value = {
        "bad_word_ids": pack_u32([1, 3]),
        "bad_word_counts": pack_u32([2]),
        "prompt_ids": b"1234" * 1000,
        "params": SamplingParams(temperature=0.6),
        "stop_token_ids": (3,),
        "logprobs": LOGPROBS,
        "prompt_logprobs": LOGPROBS,
        "label": "other",
        "cache_salt": "other",
        "adapter": "other",
        "frame": "other",
        "was_accepted": True,
        "keep": KeepOptions(b"record"),
        "reasoning": ReasoningIds("start", (5,), (6,)),
        "trace": TraceContext(bytes(16)),
        "times": RequestTimes("chat", 1.5),
        "answer": AnswerSettings("qwen3", b"digest"),
        "changed_turns": ("system-first",),
        "left_out": ("/properties/other/pattern",),
        "media": (media_item("image", b"other"),),
    }.get(field)
    if value is None:
        parts = (second, *[getattr(second, part) for part in PARTS])
        before = next(getattr(part, field) for part in parts if field in part.__struct_fields__)
        value = b"otherothe0123456" if isinstance(before, bytes) else 5
    second = with_fields(second, **{field: value})
    messages = sent([first, second])
    assert [each for body in messages for each in registrations_of(body)] == [first, second]
    assert len(messages) == (1 if field in OWN else 2)


def test_columns_of_others_are_checked() -> None:
    first, second = answers(2)
    body, _ = joined(first, [with_fields(second, output_ids=b"123")])
    with pytest.raises(ProtocolError, match="output_ids: got 3 bytes"):
        core_codec().decode(worker_codec().encode(Frame(1, 1, 0, body)))
