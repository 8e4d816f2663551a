"""A worker that means harm: it can harm itself."""

from __future__ import annotations

import secrets
import time
from typing import Any

import pytest
import zmq
from tests.helpers.admits import admit_of, with_fields

from slipstream_ipc.columns import pack_u32, pack_u64
from slipstream_ipc.messages import (
    MAX_PREDICTION_TOKENS,
    AdmissionRefused,
    Admit,
    Admitted,
    AttachRefused,
    CoreToWorker,
    End,
    Forget,
    Positions,
    Report,
    SamplingParams,
    Step,
    SyncDone,
    UnknownToCore,
    Welcome,
    Withdraw,
    WorkerToCore,
)
from slipstream_ipc.transport.codec import worker_codec
from slipstream_ipc.transport.dealer import Dealer

PROMPT = [3, 5, 7]


class Hostile:
    """Says what it is told to, and remembers the answers."""

    def __init__(self, box: Any, *, fresh: bool = True) -> None:
        self._waiting: list[WorkerToCore] = []
        self.answers: list[CoreToWorker] = []
        self.hop: Dealer[WorkerToCore, CoreToWorker, None] = Dealer(
            box.context,
            box.address,
            worker_codec(),
            zmq.Poller(),
            identity=b"another",
            now=time.monotonic(),
            fresh=fresh,
        )
        box.workers.append(self)

    def say(self, *bodies: WorkerToCore) -> None:
        self._waiting += bodies

    def step(self) -> None:
        self.answers += self.hop.receive(time.monotonic())
        while self._waiting and self.hop.send(self._waiting[0], None):
            self._waiting.pop(0)
        self.hop.beat(time.monotonic())

    @property
    def has_said_all(self) -> bool:
        return not self._waiting and self.hop.is_attached and self.hop.num_unacked == 0

    def of(self, kind: type) -> list[Any]:
        return [answer for answer in self.answers if isinstance(answer, kind)]


def admit(num_outputs: int = 0, logprobs: int | None = None, **fields: Any) -> Admit:
    plain = admit_of(
        stream_id=secrets.token_bytes(16),
        prompt_ids=pack_u32(PROMPT),
        params=SamplingParams(temperature=0.0, logprobs=logprobs),
        stop_token_ids=(),
        seed=0,
        max_tokens=30,
        output_ids=pack_u32(list(range(num_outputs))),
        fingerprint=b"f" * 16,
    )
    return with_fields(plain, **fields)


def test_anothers_streams_are_none_of_its_business(make_core, undisturbed) -> None:
    box = make_core()
    worker, hostile = box.worker(), Hostile(box)
    it = worker.admit(PROMPT, 100)
    box.until(lambda: it.token_ids)
    stream_id = it.admit.stream_id
    nothing = pack_u64([0])
    hostile.say(
        Withdraw(stream_id, End("abort", 1)),
        Forget((stream_id,)),
        Positions((stream_id,), pack_u32([2**32 - 1]), nothing, last=True),
        with_fields(it.admit, max_tokens=5),
    )
    box.until(lambda: hostile.has_said_all and hostile.of(AdmissionRefused))
    hostile.say(Report(1, pack_u32([it.row]), pack_u32([1])))
    box.until(lambda: hostile.hop.epoch > 1)  # which costs it its link
    box.until(lambda: it.is_over)
    assert it.token_ids == undisturbed(it.admit).token_ids
    assert hostile.of(UnknownToCore)[0].stream_ids == (stream_id,)
    assert hostile.of(AdmissionRefused)[0].fault.code == "conflict"
    assert hostile.of(Step) == []


def test_a_diverging_statement_about_a_stream_that_has_ended(make_core) -> None:
    """What it was admitted with has no log-probabilities here: there is nothing to be sent."""
    box = make_core()
    hostile = Hostile(box)
    given = admit(num_outputs=5, logprobs=3)
    hostile.say(given, Withdraw(given.stream_id, End("abort", 5)))
    box.until(lambda: hostile.has_said_all)
    again = Hostile(box, fresh=False)
    hostile.hop.close()
    box.workers.remove(hostile)
    again.hop.attach(time.monotonic())  # a later epoch
    box.until(lambda: again.hop.is_attached)
    again.say(Positions((given.stream_id,), pack_u32([0]), pack_u64([1]), last=True))
    box.until(lambda: again.of(SyncDone))
    assert [refused.fault.code for refused in again.of(AdmissionRefused)] == ["diverged"]
    assert again.of(Admitted) == []


def test_an_admission_with_fewer_outputs_than_before(make_core) -> None:
    box = make_core()
    hostile = Hostile(box)
    given = admit(num_outputs=5, logprobs=3)
    hostile.say(given)
    box.until(lambda: hostile.of(Admitted))
    hostile.hop.fresh = False
    hostile.hop.attach(time.monotonic())
    box.until(lambda: len(hostile.of(Welcome)) == 2)
    hostile.say(with_fields(given, output_ids=b""))
    box.until(lambda: hostile.of(AdmissionRefused))
    assert hostile.of(AdmissionRefused)[0].fault.code == "diverged"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"priority": 2**31}, "priority"),
        ({"stop_token_ids": (2**32,)}, "stop_token_ids"),
        ({"stream_id": bytes(17)}, "stream_id"),
        ({"prompt_ids": b"abc"}, "prompt_ids"),
        ({"prediction_ids": b"abc"}, "prediction_ids"),
        ({"prediction_ids": bytes(4 + 4 * MAX_PREDICTION_TOKENS)}, "prediction_ids"),
        ({"params": SamplingParams(logprobs=2**40)}, "logprobs"),
        ({"params": SamplingParams(temperature=float("nan"))}, "temperature"),
        ({"params": SamplingParams(top_k=2**63)}, "top_k"),
        ({"label": "x" * 1025}, "label"),
        ({"strikes": -1}, "strikes"),
        ({"params": SamplingParams(repetition_penalty=0.0)}, "repetition_penalty"),
        ({"params": SamplingParams(logit_bias={-1: 1.0})}, "logit_bias"),
        ({"params": SamplingParams(allowed_token_ids=())}, "allowed_token_ids"),
        ({"bad_word_ids": b"abc"}, "bad_words"),
        ({"bad_word_ids": pack_u32([1]), "bad_word_counts": pack_u32([2])}, "bad_words"),
    ],
)
def test_a_wrong_registration_is_refused_by_its_field(make_core, fields, named) -> None:
    box = make_core()
    worker, hostile = box.worker(), Hostile(box)
    it = worker.admit(PROMPT, 20)
    hostile.say(admit(**fields))
    box.until(lambda: hostile.of(AttachRefused))
    assert hostile.of(AttachRefused)[0].fault.field == named
    box.until(lambda: it.is_over)
    assert it.is_whole


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"stop_token_ids": (2, 997), "params": SamplingParams(min_tokens=5)}, "stop_token_ids"),
        ({"prediction_ids": pack_u32([3, 997])}, "prediction_ids"),
        ({"params": SamplingParams(logit_bias={997: 1.0})}, "logit_bias"),
        ({"params": SamplingParams(allowed_token_ids=(3, 997))}, "allowed_token_ids"),
        ({"bad_word_ids": pack_u32([1, 997]), "bad_word_counts": pack_u32([2])}, "bad_words"),
        (
            {
                "params": SamplingParams(allowed_token_ids=(3,)),
                "bad_word_ids": pack_u32([3]),
                "bad_word_counts": pack_u32([1]),
            },
            "bad_words",
        ),
    ],
)
def test_tokens_that_the_model_lacks_or_has_none_of_left(make_core, fields, named) -> None:
    """It knows best which those are; its device would never get over them."""
    box = make_core()
    hostile = Hostile(box)
    hostile.say(admit(**fields))
    box.until(lambda: hostile.of(AdmissionRefused))
    fault = hostile.of(AdmissionRefused)[0].fault
    assert (fault.code, fault.field) == ("bad_request", named)
    assert not box.core.scheduler.has_work
