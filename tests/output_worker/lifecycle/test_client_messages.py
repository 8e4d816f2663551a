"""What clients ask of a worker, whose core tests play."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec import structs
from tests.output_worker.lifecycle.test_core_messages import CARD, CONFIG, Anybody, Told

from slipstream_ipc.columns import pack_u32
from slipstream_ipc.messages import (
    Admitted,
    Fault,
    MediaCard,
    ModelCard,
    OtherAnswer,
    Rejected,
    SamplingParams,
    Submit,
)
from slipstream_ipc.telemetry.statistics import WorkerGauges
from slipstream_ipc.validation import media
from slipstream_ipc.validation.image_header import ImageHeader, image_header
from slipstream_ipc.validation.media import media_item
from slipstream_worker.lifecycle import media_store
from slipstream_worker.lifecycle.client_messages import ClientMessages
from slipstream_worker.streams.registration import Submission

IDS = [bytes([at]) * 16 for at in range(1, 5)]


class Asked(Told):
    """A fresh worker, what its core tells it, and what its client asks."""

    def __init__(self) -> None:
        super().__init__()
        anybody: Any = Anybody()
        self.from_client = ClientMessages(
            CONFIG,
            anybody,
            self.lifecycle,
            self.store,
            anybody,
            anybody,
            anybody,
            anybody,
            anybody,
        )
        self.session: Any = SimpleNamespace(identity=b"client", public_key=b"")
        self.readers.attach_client(self.session)

    def submit(self, *stream_ids: bytes) -> None:
        """One Submit for all of these answers."""
        params = msgspec.Raw(msgspec.msgpack.encode(SamplingParams(detokenize=False)))
        others = tuple(OtherAnswer(at, each) for at, each in enumerate(stream_ids[1:], 1))
        message = Submit(0, stream_ids[0], params, token_ids=pack_u32([1, 2]), others=others)
        self.from_client.handle(self.session, message, CARD)

    def admit(self, stream_id: bytes) -> None:
        """The core accepts an answer."""
        self.from_core.handle(Admitted(stream_id, 1 + IDS.index(stream_id)))

    @property
    def num_answers(self) -> tuple[int, float]:
        """Requests and answers that `request_params_n` has counted."""
        counted = self.counters.numbers(WorkerGauges()).counters.num_answers
        return sum(counted.counts), counted.sum


def test_a_request_counts_once_its_first_answer_is_accepted() -> None:
    asked = Asked()
    asked.submit(*IDS[:3])
    assert asked.num_answers == (0, 0)
    for _ in range(2):  # said again where some of the prompt was found in the cache
        for stream_id in IDS[:3]:
            asked.admit(stream_id)
        assert asked.num_answers == (1, 3)


def test_a_request_that_is_sent_again_before_it_is_accepted_counts_once() -> None:
    asked = Asked()
    asked.submit(*IDS[:3])
    asked.submit(*IDS[:3])
    for stream_id in IDS[:3]:
        asked.admit(stream_id)
    asked.submit(*IDS[:3])  # its answer was under way
    assert asked.num_answers == (1, 3)


def test_what_is_left_of_a_request_that_is_sent_again_leaves_its_size() -> None:
    asked = Asked()
    asked.submit(*IDS[:3])
    asked.admit(IDS[1])
    asked.submit(IDS[0], IDS[2])
    asked.admit(IDS[0])
    asked.admit(IDS[2])
    assert asked.num_answers == (1, 3)


def test_a_request_that_a_worker_dies_over_before_it_is_accepted_counts_once() -> None:
    dead, successor = Asked(), Asked()
    for worker in (dead, successor):
        worker.submit(*IDS)
    for stream_id in IDS:
        successor.admit(stream_id)
    assert dead.num_answers == (0, 0)
    assert successor.num_answers == (1, 4)


IMAGE_CARD = structs.replace(CARD, media=MediaCard(placeholder_id=7))
# the header of a PNG of 3 x 2 pixels
HEADER = bytes.fromhex("89504e470d0a1a0a0000000d4948445200000003000000020802000000")
IMAGE = media_item("image", HEADER + b"a picture")


def with_image(stream_id: bytes, **fields: Any) -> Submit:
    params = msgspec.Raw(msgspec.msgpack.encode(SamplingParams(detokenize=False)))
    return Submit(0, stream_id, params, token_ids=pack_u32([7, 2]), media=(IMAGE,), **fields)


def test_images_are_registered_and_held_until_their_streams_end() -> None:
    asked = Asked()
    others = (OtherAnswer(1, IDS[1]),)
    asked.from_client.handle(asked.session, with_image(IDS[0], others=others), IMAGE_CARD)
    streams = [asked.streams.get(each) for each in IDS[:2]]
    assert all(each is not None and each.registration is not None for each in streams)
    for stream in streams:
        assert stream is not None
        assert stream.registration is not None
        assert stream.registration.media == (IMAGE,)
        assert asked.lifecycle.readmission(stream).media == (IMAGE,)
        assert asked.lifecycle.media.num_bytes == len(IMAGE.data)
        asked.lifecycle.abort(stream)
        assert stream.registration.media == ()
    assert asked.lifecycle.media.num_bytes == 0


@pytest.mark.parametrize(
    ("card", "field", "code"),
    [
        (CARD, "media", "bad_request"),
        (structs.replace(CARD, media=MediaCard(7, "it has none")), "media", "bad_request"),
        (IMAGE_CARD, None, "overloaded"),
    ],
)
def test_images_are_refused_where_there_is_no_place_for_them(
    card: ModelCard, field: str | None, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, told = Asked(), list[Fault]()
    monkeypatch.setattr(media_store, "MAX_MEDIA_BYTES", 4)
    port = SimpleNamespace(enqueue=lambda rejected: told.append(rejected.fault))
    monkeypatch.setattr(asked.readers, "port", lambda identity: port)
    asked.from_client.handle(asked.session, with_image(IDS[0]), card)
    assert [(each.code, each.field) for each in told] == [(code, field)]
    assert asked.streams.get(IDS[0]) is None
    assert asked.lifecycle.media.num_bytes == 0


def test_a_file_that_is_no_picture_is_refused_whatever_sent_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client may be none of ours."""
    asked, told = Asked(), list[Fault]()
    port = SimpleNamespace(enqueue=lambda rejected: told.append(rejected.fault))
    monkeypatch.setattr(asked.readers, "port", lambda identity: port)
    huge = HEADER[:16] + b"\0\1" + HEADER[18:20] + b"\0\1" + HEADER[22:]
    for data in (b"GIF98a", HEADER[:20], huge):
        submit = structs.replace(with_image(IDS[0]), media=(media_item("image", data),))
        asked.from_client.handle(asked.session, submit, IMAGE_CARD)
    assert [(each.code, each.field) for each in told] == [("bad_request", "media[0]")] * 3
    assert asked.streams.get(IDS[0]) is None


@pytest.mark.parametrize("is_refused", [False, True])
def test_headers_are_read_once_however_many_answers_there_are(
    is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are strangers' files, and the loop serves others."""
    read: list[bytes] = []

    def noted(data: bytes, field: str) -> ImageHeader:
        read.append(data)
        return image_header(data, field)

    monkeypatch.setattr(media, "image_header", noted)
    asked, told = Asked(), list[object]()
    port = SimpleNamespace(enqueue=told.append)
    monkeypatch.setattr(asked.readers, "port", lambda identity: port)
    submit = with_image(IDS[0], others=tuple(OtherAnswer(at, IDS[at]) for at in range(1, 4)))
    if is_refused:
        submit = structs.replace(submit, media=(IMAGE, media_item("image", b"GIF98a")))
    asked.from_client.handle(asked.session, submit, IMAGE_CARD)
    assert read == [item.data for item in submit.media]
    is_known = [asked.streams.get(each) is not None for each in IDS]
    assert is_known == [not is_refused] * 4
    assert sum(isinstance(each, Rejected) for each in told) == (4 if is_refused else 0)


def test_another_image_is_another_request() -> None:
    """Under the same id and with the same tokens."""
    one, other = with_image(IDS[0]), with_image(IDS[0])
    other = structs.replace(other, media=(media_item("image", b"another"),))
    assert Submission(one).fingerprint(one) == Submission(one).fingerprint(with_image(IDS[0]))
    assert Submission(one).fingerprint(one) != Submission(other).fingerprint(other)
