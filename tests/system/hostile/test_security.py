"""What a client can do to another's streams without their ids, and what comes of wrong fields."""

from __future__ import annotations

import logging
import os
import secrets
from typing import Any

import msgspec
import pytest
import zmq
from msgspec import structs

from slipstream_ipc.columns import pack_u32
from slipstream_ipc.messages import (
    PROTOCOL_VERSION,
    Abort,
    Accepted,
    AttachRefused,
    ClientToWorker,
    Deltas,
    Frame,
    Goodbye,
    Hello,
    Rejected,
    Resume,
    SamplingParams,
    Submit,
    UnknownStreams,
    Welcome,
    WorkerToClient,
)
from slipstream_ipc.messages.budgets import MAX_MESSAGE_BYTES
from slipstream_ipc.transport.codec import client_codec, encode_params
from slipstream_ipc.transport.dealer import Dealer, LinkOptions
from slipstream_ipc.transport.sockets import new_dealer
from slipstream_worker.detokenizer.factory import Detokenizer, DetokenizerFactory

PROMPTS = [f"Appendix {n}: what is nobody else's business." for n in range(4)]
PARAMS = {"max_tokens": 150, "ignore_eos": True}


class Stranger:
    """A client that says what it likes and remembers every answer."""

    def __init__(self, stack: Any, identity: bytes | None = None) -> None:
        self._stack = stack
        self._waiting: list[ClientToWorker] = []
        self.answers: list[WorkerToClient] = []
        self.hop: Dealer[ClientToWorker, WorkerToClient, None] = Dealer(
            stack.context,
            stack.client_address,
            client_codec(),
            zmq.Poller(),
            identity=identity or secrets.token_bytes(16),
            now=stack.now(),
            options=LinkOptions(
                welcome_within_s=20.0
            ),  # one attach: what is said in it is not said again
        )
        stack.clients.append(self)

    def say(self, *bodies: ClientToWorker) -> None:
        self._waiting += bodies

    def step(self) -> None:
        self.answers += self.hop.receive(self._stack.now())
        while self._waiting and self.hop.send(self._waiting[0], None):
            self._waiting.pop(0)
        self.hop.beat(self._stack.now())

    @property
    def has_said_all(self) -> bool:
        return not self._waiting and self.hop.is_attached and self.hop.num_unacked == 0

    def of(self, kind: type) -> list[Any]:
        return [answer for answer in self.answers if isinstance(answer, kind)]


def guesses_of(stream_id: bytes) -> list[bytes]:
    """As near as can be, and what somebody may take for an id."""
    number = int.from_bytes(stream_id, "big")
    flipped = [(number ^ (1 << bit)).to_bytes(16, "big") for bit in range(128)]
    return [
        *flipped,
        *(stream_id[:n] for n in range(16)),
        stream_id[::-1],
        bytes(16),
        b"\xff" * 16,
        stream_id.hex().encode()[:16],
    ]


def test_guesses_find_and_end_nothing(make_stack, expected, outcome) -> None:
    plain = expected(PROMPTS, **PARAMS)
    stack = make_stack()
    client, stranger = stack.client(), Stranger(stack)
    streams = [client.submit(p, **PARAMS) for p in PROMPTS]
    stack.until(lambda: all(s.token_ids for s in streams))
    num = 0
    for it in streams:
        for guess in guesses_of(it.stream_id):
            handle = it.submit.handle
            stranger.say(Abort(guess), Abort(guess, handle), Resume(handle, guess, 0, 0))
            num += 1
    stack.until(lambda: stranger.has_said_all)
    stack.until(lambda: all(s.is_over for s in streams))
    assert outcome(streams) == outcome(plain)
    assert [s.end for s in streams] == [s.end for s in plain]
    stack.until(lambda: len(stranger.of(UnknownStreams)) >= num)  # the last are under way
    assert len(stranger.of(UnknownStreams)) == num
    assert {type(answer) for answer in stranger.answers} == {Welcome, UnknownStreams}
    assert not any(s.is_superseded for s in streams)


def submit_like(it: Any, **changes: Any) -> Submit:
    return structs.replace(it.submit, stream_id=secrets.token_bytes(16), **changes)


def test_label_handle_and_prompt_grant_nothing(make_stack, expected, outcome) -> None:
    plain = expected(PROMPTS[:1], **PARAMS)
    stack = make_stack()
    client, stranger = stack.client(), Stranger(stack)
    submit = Submit(
        7,
        secrets.token_bytes(16),
        encode_params(SamplingParams(temperature=0.0, **PARAMS)),
        text=PROMPTS[0],
        label="my own name",
    )
    it = client.send_submit(submit)
    stack.until(lambda: it.token_ids)
    copy = submit_like(it)  # the same handle, label, prompt and parameters
    stranger.say(copy, Resume(7, b"my own name", 0, 0), Abort(b"my own name", 7), Abort(b"", 7))
    stack.until(lambda: stranger.of(Accepted))
    stranger.say(Abort(copy.stream_id, 7))
    stack.until(lambda: any(d.ends for d in stranger.of(Deltas)))
    stack.until(lambda: it.is_over)
    assert outcome([it]) == outcome(plain)
    assert stranger.of(Deltas)[-1].ends[0].reason == "abort"
    assert len(stranger.of(UnknownStreams)) == 1


def test_a_goodbye_ends_ones_own_streams_alone(make_stack, expected, outcome) -> None:
    plain = expected(PROMPTS, **PARAMS)
    stack = make_stack()
    client, stranger = stack.client(), Stranger(stack)
    streams = [client.submit(p, **PARAMS) for p in PROMPTS]
    stack.until(lambda: all(s.token_ids for s in streams))
    stranger.say(submit_like(streams[0], handle=0))
    stack.until(lambda: stranger.of(Accepted))
    stranger.say(Goodbye())
    stack.until(lambda: stranger.has_said_all)
    stack.until(lambda: all(s.is_over for s in streams))
    assert outcome(streams) == outcome(plain)


def test_an_id_with_other_content_is_a_conflict_that_its_owner_does_not_notice(
    make_stack, expected, outcome
) -> None:
    plain = expected(PROMPTS[:1], **PARAMS)
    stack = make_stack()
    client, stranger = stack.client(), Stranger(stack)
    it = client.submit(PROMPTS[0], **PARAMS)
    stack.until(lambda: it.token_ids)
    stranger.say(structs.replace(it.submit, text="something else"))
    stack.until(lambda: stranger.of(Rejected))
    stack.until(lambda: it.is_over)
    assert stranger.of(Rejected)[0].fault.code == "conflict"
    assert stranger.of(Deltas) == []
    assert outcome([it]) == outcome(plain)


@pytest.mark.parametrize(
    "identity_of",
    [
        lambda mine: mine[:8],
        lambda mine: mine + b"\0",
        lambda mine: bytes([mine[0] ^ 1]) + mine[1:],
        lambda mine: mine[::-1],
    ],
)
def test_an_identity_nearly_anothers_takes_nothing_over(
    make_stack, expected, outcome, identity_of
) -> None:
    plain = expected(PROMPTS, **PARAMS)
    stack = make_stack()
    client = stack.client()
    streams = [client.submit(p, **PARAMS) for p in PROMPTS]
    stack.until(lambda: all(s.token_ids for s in streams))
    stranger = Stranger(stack, identity_of(client.hop._identity))
    for _ in range(3):  # later epochs than the client's own
        stack.until(lambda: stranger.hop.is_attached)
        stranger.hop.attach(stack.now())
    stack.until(lambda: all(s.is_over for s in streams))
    assert outcome(streams) == outcome(plain)
    assert stranger.of(Deltas) == []
    assert client.hop.epoch == 1


# ---- wrong fields ------------------------------------------------------------------------------

ID = os.urandom(16)
GOOD = [10, 0, ID, {"max_tokens": 2}, None, pack_u32([5, 6])]


def changed(at: int, value: object) -> list[object]:
    defaults: list[object] = [*GOOD, [], "", 0, False, b"", 0, ""]
    defaults[at] = value
    return defaults


@pytest.mark.parametrize(
    ("body", "kind", "field"),
    [
        (changed(1, -1), AttachRefused, "handle"),
        (changed(1, 2**32), AttachRefused, "handle"),
        (changed(2, bytes(17)), AttachRefused, "stream_id"),
        (changed(2, bytes(15)), Rejected, "stream_id"),
        (changed(3, {"temperature": -1.0}), Rejected, "temperature"),
        (changed(3, {"stop": ["x"] * 65}), Rejected, "stop"),
        (changed(3, {"stop": ["x"] * 3_000_000}), Rejected, "params"),
        (changed(3, {"stop": "x" * 1025}), Rejected, "stop"),
        (changed(3, {"stop_token_ids": [2**32]}), Rejected, "stop_token_ids"),
        (changed(3, {"max_tokens": 2**40}), Rejected, "max_tokens"),
        (changed(3, {"seed": 2**63}), Rejected, "seed"),
        (changed(3, {"logprobs": 21}), Rejected, "logprobs"),
        (changed(3, {"unheard_of": 1}), Rejected, "params"),
        (changed(3, [1]), Rejected, "params"),
        (changed(4, "both"), Rejected, "prompt"),
        (changed(5, b"abc"), Rejected, "prompt_token_ids"),
        (changed(5, b"\xff" * 8), Rejected, "prompt_token_ids"),
        (changed(5, bytes(4 * 600)), Rejected, "prompt"),
        (changed(6, [{"role": "user"}]), AttachRefused, "messages"),
        (changed(6, [{"role": "user", "content": "x"}] * 16385), AttachRefused, "messages"),
        (changed(7, "x" * 1025), Rejected, "label"),
        (changed(7, "x" * 70_000), AttachRefused, "label"),
        (changed(8, 2**31), Rejected, "priority"),
        (changed(8, 2**63), Rejected, "priority"),
        (changed(9, 1), AttachRefused, "was_accepted"),
        (changed(10, b"abc"), Rejected, "output_ids"),
        (changed(10, b"\xff" * 4), Rejected, "output_ids"),
        (changed(11, -1), AttachRefused, "num_chars"),
        (changed(12, "x" * 1025), Rejected, "cache_salt"),
        (changed(12, "x" * 70_000), AttachRefused, "cache_salt"),
        (changed(12, 3), AttachRefused, "cache_salt"),
        ([11, 0, ID, -1, 0], AttachRefused, "num_chars"),
        ([12, bytes(40)], AttachRefused, "stream_id"),
        ([12, ID, -1], AttachRefused, "handle"),
        ([31, 1], AttachRefused, "tag"),
    ],
)
def test_a_wrong_field_is_named_to_whoever_sent_it(make_stack, body, kind, field) -> None:
    stack = make_stack()
    client = stack.client()
    it = client.submit(PROMPTS[0], max_tokens=30)
    stack.until(lambda: it.num_deltas)  # so nobody is told to wait
    raw = new_dealer(stack.context, stack.client_address, os.urandom(16))
    codec = client_codec()
    raw.send(codec.encode(Frame(1, 0, 0, Hello(PROTOCOL_VERSION, os.urandom(16)))))
    stack.until(lambda: raw.poll(0))
    assert isinstance(codec.decode(raw.recv()).body, Welcome)
    raw.send(msgspec.msgpack.encode([1, 1, 0, body]))
    answers: list[Any] = []

    def answered() -> bool:
        while raw.poll(0):
            answers.append(codec.decode(raw.recv()).body)
        return any(answer is not None for answer in answers)

    stack.until(answered)
    answer = next(answer for answer in answers if answer is not None)
    assert isinstance(answer, kind), answer
    assert answer.fault.field == field, answer
    assert answer.fault.code == "bad_request"
    assert len(answer.fault.message) < 700
    stack.until(lambda: it.is_over)
    assert it.end is not None
    raw.close()


def test_a_message_that_is_too_large_is_refused(make_stack) -> None:
    stack = make_stack()
    raw = new_dealer(stack.context, stack.client_address, os.urandom(16))
    raw.send(bytes(MAX_MESSAGE_BYTES + 1))
    stack.until(lambda: raw.poll(0))
    refusal = client_codec().decode(raw.recv()).body
    assert isinstance(refusal, AttachRefused)
    assert str(MAX_MESSAGE_BYTES) in refusal.fault.message
    raw.close()


# ---- logs --------------------------------------------------------------------------------------


class Broken(DetokenizerFactory):
    """Makes no detokeniser for one prompt, and one that breaks for another."""

    delimiter_ids = ()

    def __init__(self, factory: DetokenizerFactory) -> None:
        self._factory = factory
        self.num_asked = 0

    @property
    def fast_table(self) -> Any:
        return None  # or nobody would ask a detokeniser

    def create(self, prompt_ids: Any, skip_special_tokens: bool) -> Detokenizer:
        self.num_asked += 1
        if self.num_asked == 1:
            raise RuntimeError("not this one")
        real = self._factory.create(prompt_ids, skip_special_tokens)
        if self.num_asked > 2:
            return real

        class Breaking:
            num_pending = 0

            def step(self, _token_id: int) -> str:
                raise RuntimeError("no further")

            def flush(self) -> str:
                raise RuntimeError("no end")

        return Breaking()


def test_no_id_identity_or_prompt_is_ever_logged(make_stack, detokenizers, caplog) -> None:
    """Whoever can read the log could read, resume and end the streams."""
    caplog.set_level(logging.DEBUG)
    broken = Broken(detokenizers)
    stack = make_stack(detokenizers=broken)
    client, stranger = stack.client(), Stranger(stack)
    marked = [f"a secret called xyzzy-{n}" for n in range(4)]
    streams = [client.submit(p, max_tokens=40, stop=("zzz",)) for p in marked]
    stack.until(lambda: broken.num_asked >= len(streams))  # the stranger's submission is no second
    stranger.say(structs.replace(streams[3].submit, text="xyzzy-9"))
    stranger.say(Resume(1, secrets.token_bytes(16), 0, 0))
    stack.until(lambda: all(s.is_over for s in streams))
    assert [s.end is None or s.end.reason == "error" for s in streams].count(True) >= 2
    raw = new_dealer(stack.context, stack.client_address, os.urandom(16))
    raw.send(msgspec.msgpack.encode([1, 1, 1, [10, 1, streams[0].stream_id + b"x", {}]]))
    stack.until(lambda: raw.poll(0))
    stack.kill_core()
    stack.start_core()
    for _ in range(50):
        stack.step()
    raw.close()
    assert "failed" in caplog.text
    hidden = [s.stream_id for s in streams]
    hidden += [client.hop._identity, stranger.hop._identity]
    for secret in hidden:
        assert secret.hex() not in caplog.text
        assert repr(secret)[2:-1] not in caplog.text
    assert "xyzzy" not in caplog.text
