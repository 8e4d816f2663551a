"""Streams that a fresh worker is told of by its core, which tests play."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs
from tests.helpers.admits import admit_of

from slipstream_ipc.columns import pack_u32
from slipstream_ipc.messages import (
    End,
    MediaCard,
    ModelCard,
    Registered,
    SamplingParams,
    Step,
    Welcome,
)
from slipstream_worker.clients.latency import RequestCounters
from slipstream_worker.clients.readers import StreamReaders
from slipstream_worker.config import WorkerConfig
from slipstream_worker.lifecycle.answer_keeper import AnswerKeeper
from slipstream_worker.lifecycle.core_messages import AnswerForm, CoreMessages
from slipstream_worker.lifecycle.lifecycle import StreamLifecycle
from slipstream_worker.lifecycle.stream_store import StreamStore
from slipstream_worker.streams.retention import Retention
from slipstream_worker.streams.stream import Stage, WorkerStream, WorkerStreamTable
from slipstream_worker.streams.stream_columns import StreamColumns

CARD = ModelCard("m", "/nowhere", vocab_size=1000, max_model_len=99, eos_token_ids=())
ROW = 3


class Anybody:
    """Hears everything, says nothing."""

    fast_table = None
    delimiter_ids = (("<|call|>", 12), ("<|end|>", 7), ("<|return|>", 2))

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: []


CONFIG = WorkerConfig(
    tokenizer="t",
    client_address="ipc:///nowhere/worker",
    core_address="ipc:///nowhere/core",
    runtime_dir="/nowhere",
    cache_dir="/nowhere",
)


class Told:
    """A fresh worker, and what its core tells it."""

    def __init__(self, answer_format: str = "", why_no_images: str = "") -> None:
        anybody: Any = Anybody()
        self.streams, self.columns, self.counters = (
            WorkerStreamTable(),
            StreamColumns(None),
            RequestCounters(),
        )
        self.retention = Retention(self.streams, 60.0)
        self.readers = StreamReaders(
            anybody, self.columns, anybody, self.counters, self.retention, max_unacked=None
        )
        self.store = StreamStore(self.streams, self.columns, self.readers, self.retention)
        keeper = AnswerKeeper(anybody, self.columns, anybody, max_bytes=0)
        self.lifecycle = StreamLifecycle(anybody, self.store, anybody, self.counters, keeper)
        self.from_core = CoreMessages(
            CONFIG,
            anybody,
            self.lifecycle,
            self.store,
            self.counters,
            anybody,
            anybody,
            anybody,
            answers=AnswerForm(answer_format, why_no_images=why_no_images),
        )

    def registered(self, end: End) -> WorkerStream:
        admit = admit_of(
            stream_id=b"a" * 16,
            prompt_ids=pack_u32([1, 2]),
            params=SamplingParams(detokenize=False),
            stop_token_ids=(),
            seed=1,
            max_tokens=10,
            priority=0,
            label="",
            owner=b"nobody",
            handle=0,
            fingerprint=b"f" * 16,
        )
        self.from_core.handle(Registered(ROW, admit, end, True))
        stream = self.streams.get(admit.stream_id)
        assert stream is not None
        return stream

    def step(self, token_id: int) -> None:
        self.from_core.handle(Step(1, pack_u32([ROW]), pack_u32([token_id])))

    @property
    def is_quick(self) -> bool:
        """Whether no stream is short of its replayed end, which every step would look for."""
        return not self.lifecycle.replaying


@pytest.fixture
def told() -> Told:
    return Told()


def test_an_end_that_no_token_precedes_holds_nobody_up(told: Told) -> None:
    assert told.registered(End("abort", 0)).stage is Stage.ENDED
    assert told.is_quick


def test_a_replayed_end_comes_behind_its_tokens(told: Told) -> None:
    stream = told.registered(End("abort", 2))
    told.step(5)
    assert stream.stage is Stage.RUNNING
    assert not told.is_quick
    told.step(6)
    assert stream.stage is Stage.ENDED
    assert told.columns.token_ids(stream).tolist() == [5, 6]
    assert told.is_quick


def test_who_ends_it_before_it_is_replayed_holds_nobody_up(told: Told) -> None:
    stream = told.registered(End("error", 2))
    assert not told.is_quick
    told.lifecycle.abort(stream)
    assert told.is_quick


def test_a_new_attach_begins_with_nothing(told: Told) -> None:
    told.registered(End("abort", 2))
    told.from_core.handle(Welcome(1, CARD))
    assert told.is_quick
    assert told.registered(End("abort", 0)).stage is Stage.ENDED


def test_streams_are_cancelled_whichever_client_reads_them() -> None:
    told = Told()
    told.streams.add(running := WorkerStream(b"r" * 16, Stage.RENDERING))
    told.streams.add(ended := WorkerStream(b"e" * 16, Stage.ENDED))
    told.retention.add_tombstone(b"f" * 16)
    asked = (ended.stream_id, running.stream_id, b"?" * 16, b"f" * 16)
    assert [told.lifecycle.cancel(each) for each in asked] == [
        "ended",
        "running",
        "unknown",
        "ended",
    ]
    assert told.streams.get(running.stream_id) is None
    assert told.streams.get(ended.stream_id) is ended


@pytest.mark.parametrize(("given", "expected"), [((), (2, 12)), ((5, 12), (5, 12, 2))])
def test_answers_in_channels_end_with_their_own_ids(given: Any, expected: Any) -> None:
    """Where a model's configuration lacks them, `<|call|>` would end a call and not the answer."""
    card = structs.replace(CARD, eos_token_ids=given)
    for name, ids in (("harmony", expected), ("qwen3+hermes", given), ("", given)):
        told = Told(name)
        told.from_core.handle(Welcome(1, card))
        assert told.from_core.card is not None
        assert told.from_core.card.eos_token_ids == ids


@pytest.mark.parametrize(
    ("media", "why", "told"),
    [
        (None, "", None),
        (None, "no processor", None),
        (MediaCard(7), "", MediaCard(7)),
        (MediaCard(7), "no processor", MediaCard(7, "no processor")),
        (MediaCard(7, "no tower"), "no processor", MediaCard(7, "no tower")),
    ],
)
def test_clients_are_told_of_images_if_core_and_tokenizer_have_a_place_for_them(
    media: MediaCard | None, why: str, told: MediaCard | None
) -> None:
    worker = Told(why_no_images=why)
    worker.from_core.handle(Welcome(1, structs.replace(CARD, media=media)))
    assert worker.from_core.card is not None
    assert worker.from_core.card.media == told
