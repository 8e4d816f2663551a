"""What becomes of registrations with images beside the loop, with an encoder that a test plays."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import structs
from tests.helpers.admits import admit_of
from tests.helpers.patience import PATIENCE_S

from slipstream_core.media.media_client import ImageError
from slipstream_core.media.preparer import MediaPreparer, PreparedMedia
from slipstream_ipc.columns import pack_u32
from slipstream_ipc.messages import Admit, MediaCard, ModelCard, SamplingParams
from slipstream_ipc.validation.media import media_item

HOLDER, MOST = 7, 10
MEDIA = MediaCard(HOLDER, max_tokens=MOST, max_pixels=400)
CARD = ModelCard("m", "p", 100, 99, (), media=MEDIA)


class Rows:
    """Features, which are equal to themselves alone."""

    def __init__(self, num: int) -> None:
        self._num = num

    def __len__(self) -> int:
        return self._num


class Encoder:
    """Makes as many rows of a file as it has bytes."""

    def __init__(self) -> None:
        self.asked: list[tuple[bytes, int]] = []
        self.begins = threading.Event()
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def prepare_thread(self) -> None: ...

    def close(self) -> None: ...

    def encode(self, data: bytes, max_pixels: int) -> Any:
        self.asked.append((data, max_pixels))
        self.begins.set()
        assert self.may_go_on.wait(PATIENCE_S)
        if data == b"bad":
            raise ImageError("it is no picture")
        if data == b"worse":
            raise RuntimeError("the model failed")
        return Rows(len(data))

    def with_rope(self, _prompt: object, places: Any) -> Any:
        return places


@pytest.fixture
def encoder() -> Encoder:
    return Encoder()


@pytest.fixture
def preparer(encoder: Encoder) -> Iterator[MediaPreparer]:
    made = MediaPreparer(encoder, CARD, MEDIA)
    yield made
    made.close()


def registration(
    number: int, *files: bytes, root: bytes = b"", holders: int = -1, tenant: bytes = b""
) -> Admit:
    media = tuple(media_item("image", file, max_pixels=900) for file in files)
    num = sum(map(len, files)) if holders < 0 else holders
    admit = admit_of(
        stream_id=number.to_bytes(16, "little"),
        prompt_ids=pack_u32([1, *[HOLDER] * num, 1]),
        params=SamplingParams(),
        stop_token_ids=(),
        seed=0,
        max_tokens=3,
    )
    derived = structs.replace(admit.derived, prefix_root=root)
    spec = structs.replace(admit.spec, tenant=tenant)
    return structs.replace(admit, derived=derived, media=media, spec=spec)


def all_taken(preparer: MediaPreparer, num: int) -> list[PreparedMedia]:
    """The next ones that are done."""
    done: list[PreparedMedia] = []
    while len(done) < num:
        readable, _, _ = select.select([preparer], [], [], PATIENCE_S)
        assert readable
        done += preparer.take_prepared()
    assert len(done) == num
    return done


def taken(preparer: MediaPreparer) -> PreparedMedia:
    """The next one that is done."""
    [done] = all_taken(preparer, 1)
    return done


def test_equal_images_are_encoded_once_where_prefixes_are_shared(
    preparer: MediaPreparer, encoder: Encoder
) -> None:
    for number, root in enumerate((b"one", b"one", b"other")):
        preparer.submit(registration(number, b"abc", b"abc", root=root))
        done = taken(preparer)
        assert done.places is not None
        assert done.places.items.tolist() == [0, 1]
        preparer.release(done.places)
    assert encoder.asked == [(b"abc", 400), (b"abc", 400)]
    assert preparer.cache.num_held == 0


@pytest.mark.parametrize(
    ("admit", "code", "field"),
    [
        (registration(1, b"abc", b"bad"), "bad_request", "media[1]"),
        (registration(1, b"abc", holders=4), "bad_request", "media"),
        (registration(1, b"abcdef", b"ghijkl"), "bad_request", "media"),
        (registration(1, b"worse"), "engine", None),
    ],
)
def test_what_cannot_be_prepared_is_refused_alone(
    preparer: MediaPreparer, admit: Admit, code: str, field: str | None
) -> None:
    preparer.submit(admit)
    done = taken(preparer)
    assert done.places is None
    assert done.fault is not None
    assert (done.fault.code, done.fault.field) == (code, field)
    preparer.submit(registration(2, b"abc"))
    assert taken(preparer).places is not None


def test_who_comes_later_waits_until_others_give_features_back(preparer: MediaPreparer) -> None:
    admits = [registration(number, bytes([65 + number]) * 6) for number in range(5)]
    for admit in admits:
        preparer.submit(admit)
    held = [done.places for done in all_taken(preparer, 2)]
    preparer.withdraw(admits[3].stream_id)
    assert not select.select([preparer], [], [], 0)[0]
    for number in (2, 4):
        places = held.pop(0)
        assert places is not None
        preparer.release(places)
        done = taken(preparer)
        assert done.admit is admits[number]
        held.append(done.places)
    assert preparer.num_jobs == 0


def test_tenants_take_turns_an_image_each(preparer: MediaPreparer, encoder: Encoder) -> None:
    """However many images and requests one of them has."""
    encoder.may_go_on.clear()
    admits = [
        registration(0, b"a", b"b", b"c", tenant=b"one"),
        registration(1, b"d", tenant=b"one"),
        registration(2, b"x", b"y", tenant=b"two"),
        registration(3, b"z", tenant=b"three"),
    ]
    for admit in admits:
        preparer.submit(admit)
        assert encoder.begins.wait(PATIENCE_S)
    encoder.may_go_on.set()
    done = all_taken(preparer, 4)
    assert [each.admit for each in done] == [admits[at] for at in (3, 2, 0, 1)]
    assert b"".join(data for data, _ in encoder.asked) == b"axzbycd"
    for each in done:
        assert each.places is not None
        preparer.release(each.places)
    assert preparer.cache.num_held == 0


def test_a_tenant_that_holds_what_it_may_keeps_no_other_waiting(preparer: MediaPreparer) -> None:
    admits = [registration(at, bytes([65 + at]) * 6, tenant=b"one") for at in range(3)]
    for admit in admits:
        preparer.submit(admit)
    held = all_taken(preparer, 2)
    other = registration(3, b"other", tenant=b"two")
    preparer.submit(other)
    assert taken(preparer).admit is other
    assert held[0].places is not None
    preparer.release(held[0].places)
    assert taken(preparer).admit is admits[2]


def test_a_job_is_withdrawn_between_its_images(preparer: MediaPreparer, encoder: Encoder) -> None:
    encoder.may_go_on.clear()
    admit = registration(0, b"abcd", b"efgh")
    preparer.submit(admit)
    assert encoder.begins.wait(PATIENCE_S)
    preparer.withdraw(admit.stream_id)
    again = structs.replace(admit)
    preparer.submit(again)
    encoder.may_go_on.set()
    first, second = all_taken(preparer, 2)
    assert first.admit is admit
    assert first.places is None
    assert second.admit is again
    assert second.places is not None
    assert [data for data, _ in encoder.asked] == [b"abcd", b"efgh"]
    assert preparer.num_jobs == 0
    assert preparer.cache.num_held == 8


def test_no_image_is_encoded_behind_those_that_fill_the_places(
    preparer: MediaPreparer, encoder: Encoder
) -> None:
    preparer.submit(registration(0, b"ab", b"cd", b"ef", holders=3))
    fault = taken(preparer).fault
    assert fault is not None
    assert fault.message.endswith(
        "got 3 placeholders (token 7) in the prompt, allowed: 4, as 2 images have rows"
    )
    assert [data for data, _ in encoder.asked] == [b"ab", b"cd"]


class Note:
    """Whose image is encoded, as the next core would read it."""

    def __init__(self) -> None:
        self.stream_id = b""

    def encode(self, stream_id: bytes) -> None:
        self.stream_id = stream_id

    def encoded(self) -> None:
        self.stream_id = b""


@pytest.mark.parametrize("file", [b"abc", b"bad", b"worse"])
def test_who_is_encoded_is_noted_until_then(encoder: Encoder, file: bytes) -> None:
    note = Note()
    preparer = MediaPreparer(encoder, CARD, MEDIA, note)
    encoder.may_go_on.clear()
    preparer.submit(admit := registration(1, file))
    assert encoder.begins.wait(PATIENCE_S)
    assert note.stream_id == admit.stream_id
    encoder.may_go_on.set()
    taken(preparer)
    assert not note.stream_id
    preparer.close()


def woken(preparer: MediaPreparer) -> None:
    """Until the loop is woken to ask again."""
    assert select.select([preparer], [], [], PATIENCE_S)[0]
    assert not preparer.take_prepared()


def test_the_image_of_a_suspect_is_encoded_beside_no_step(
    preparer: MediaPreparer, encoder: Encoder
) -> None:
    assert preparer.may_launch(0, has_suspects=False)  # and it does
    preparer.submit(registration(1, b"abc"), is_suspect=True)
    woken(preparer)
    assert not preparer.may_launch(1, has_suspects=False)
    assert not encoder.asked
    encoder.may_go_on.clear()
    assert not preparer.may_launch(0, has_suspects=False)
    assert encoder.begins.wait(PATIENCE_S)
    assert not preparer.may_launch(0, has_suspects=False)
    assert not preparer.may_launch(0, has_suspects=True)
    encoder.may_go_on.set()
    assert taken(preparer).places is not None
    assert preparer.may_launch(0, has_suspects=False)


def test_no_image_is_encoded_while_a_suspect_runs(
    preparer: MediaPreparer, encoder: Encoder
) -> None:
    encoder.may_go_on.clear()
    preparer.submit(registration(1, b"ab", b"cd"))
    assert encoder.begins.wait(PATIENCE_S)
    assert preparer.may_launch(0, has_suspects=False)
    assert not preparer.may_launch(0, has_suspects=True)  # it waits for the image
    encoder.may_go_on.set()
    woken(preparer)  # between its images
    assert preparer.may_launch(0, has_suspects=True)
    assert [data for data, _ in encoder.asked] == [b"ab"]
    assert preparer.may_launch(0, has_suspects=False)
    assert taken(preparer).places is not None


def test_a_suspect_that_is_withdrawn_keeps_no_step_waiting(
    preparer: MediaPreparer, encoder: Encoder
) -> None:
    assert preparer.may_launch(0, has_suspects=False)
    preparer.submit(admit := registration(1, b"abc"), is_suspect=True)
    assert select.select([preparer], [], [], PATIENCE_S)[0]
    preparer.withdraw(admit.stream_id)
    assert not select.select([preparer], [], [], 0)[0]
    assert preparer.may_launch(1, has_suspects=False)
    assert not encoder.asked


def test_closing_waits_for_no_image(encoder: Encoder) -> None:
    preparer = MediaPreparer(encoder, CARD, MEDIA)
    encoder.may_go_on.clear()
    preparer.submit(registration(1, b"abc"))
    assert encoder.begins.wait(PATIENCE_S)
    thread = preparer._thread
    assert thread is not None
    preparer.close()
    assert thread.is_alive()
    descriptor = os.eventfd(0, os.EFD_NONBLOCK)  # the thread's is not free for another
    assert descriptor != preparer.fileno()
    encoder.may_go_on.set()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    with pytest.raises(BlockingIOError):
        os.eventfd_read(descriptor)
    os.close(descriptor)
