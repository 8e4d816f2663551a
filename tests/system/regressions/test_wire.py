"""What lies on sockets and in memory: pickles, buffers used again, garbage collections."""

from __future__ import annotations

import gc
import pickle
import shutil
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import zmq
from tests.helpers.patience import PATIENCE_S
from tests.helpers.pickles import payloads
from tests.helpers.scripted import Watch

import slipstream_ipc.transport.channel
import slipstream_ipc.transport.dealer
from slipstream_ipc.columns import check_deltas
from slipstream_ipc.messages import (
    AttachRefused,
    Frame,
    Hello,
    Kept,
    ModelCard,
    Reattach,
    Rejected,
    SyncDone,
    Welcome,
)
from slipstream_ipc.transport.codec import client_codec, worker_codec
from slipstream_ipc.transport.dealer import Dealer
from slipstream_ipc.transport.link import WINDOW
from slipstream_ipc.transport.sockets import private_directory
from slipstream_worker.detokenizer.table import TableFileError, load_table
from slipstream_worker.tokenizer.process import prepare_table

PROMPTS = [f"Chapter {n}: how names are bound, and where." for n in range(4)]


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def address() -> Iterator[str]:
    directory = private_directory()
    yield f"ipc://{directory}/server.sock"
    shutil.rmtree(directory)


def test_the_pickles_of_these_tests_do_something(tmp_path) -> None:
    """What is refused below would have been felt."""
    pickle.loads(next(payloads(tmp_path / "made")))
    assert (tmp_path / "made").is_dir()


@pytest.mark.parametrize("server", ["worker", "core"])
@pytest.mark.parametrize("is_attached", [False, True])
def test_pickles_to_a_server_are_refused_cve_2024_11041_2025_32444_2026_3059_3060_lmdeploy_4015(
    make_stack, expected, tmp_path, server, is_attached
) -> None:
    """There whoever reached the socket had their code run in the server."""
    [plain] = expected(PROMPTS[:1], max_tokens=200)
    stack = make_stack()
    client = stack.client()
    it = client.submit(PROMPTS[0], max_tokens=200)
    stack.until(lambda: len(it.token_ids) > 2)
    address = stack.client_address if server == "worker" else f"ipc://{stack.directory}/core"
    codec = client_codec() if server == "worker" else worker_codec()
    socket = stack.context.socket(zmq.DEALER)
    socket.connect(address)
    answers: list[object] = []

    def num_answers() -> int:
        while socket.poll(0):
            body = codec.decode(socket.recv()).body
            if not isinstance(body, SyncDone | Kept | None):
                answers.append(body)
        return len(answers)

    if is_attached:
        socket.send(msgspec.msgpack.encode(Frame(1, 0, 0, Hello(codec.version, b"somebody"))))
        stack.until(lambda: num_answers() > 0 and isinstance(answers.pop(0), Welcome))
    made = tmp_path / "made"
    sent = 0
    for payload in payloads(made):
        socket.send(payload)
        socket.send_multipart([payload, payload])
        sent += 2
        stack.step()
    stack.until(lambda: num_answers() >= sent)
    others = [body for body in answers if not isinstance(body, AttachRefused)]
    # a pickle in place of a Submit's parameters: for one attached they are wrong, for others moot
    assert all(isinstance(body, Rejected | Reattach) for body in others)
    assert len(others) <= 1
    stack.until(lambda: it.is_over)
    socket.close(linger=0)
    assert not made.exists()
    assert (it.text, it.token_ids) == (plain.text, plain.token_ids)


@pytest.mark.parametrize("is_attached", [False, True])
def test_pickles_from_a_server_are_refused_cve_2025_30165(
    context, address, tmp_path, is_attached
) -> None:
    """There the attaching side loaded what its server, or whoever was in its place, had sent."""
    made = tmp_path / "made"
    router = context.socket(zmq.ROUTER)
    router.bind(address)
    for codec in (client_codec(), worker_codec()):
        poller = zmq.Poller()
        hop: Dealer = Dealer(context, address, codec, poller, identity=b"me", now=0.0)
        route, _ = router.recv_multipart()
        if is_attached:
            card = ModelCard("m", "/nowhere", 10, 10, ())
            welcome = Frame(hop.epoch, 0, 0, Welcome(codec.version, card))
            router.send_multipart([route, msgspec.msgpack.encode(welcome)])
        sent = list(payloads(made))
        for payload in sent:
            router.send_multipart([route, payload])
        bodies: list[object] = []
        while len(bodies) < len(sent) + is_attached:
            assert poller.poll(int(PATIENCE_S * 1e3)), "each is answered for"
            bodies += hop.receive(0.0)
        refusals = [body for body in bodies if isinstance(body, AttachRefused)]
        assert len(refusals) == len(sent)
        assert hop.is_attached == is_attached, "it goes on"
        hop.close()
    router.close(linger=0)
    assert not made.exists()


@pytest.mark.long
def test_pickles_in_the_cache_folder_are_compiled_anew_cve_2026_3989(tmp_path, tokenizer) -> None:
    """There a file that somebody had left was unpickled; the table of tokens is our only one."""
    made = tmp_path / "made"
    has = SimpleNamespace(backend_tokenizer=tokenizer, is_fast=True)
    path = Path(prepare_table(has, tmp_path / "cache").table_path)
    good = path.read_bytes()
    header = good[: good.index(b"\n") + 1]
    for payload in payloads(made):
        checksum = blake2b(payload, digest_size=16).digest()
        for content in (payload, header + payload, header + checksum + payload):
            path.write_bytes(content)
            with pytest.raises(TableFileError):
                load_table(path)
            assert prepare_table(has, tmp_path / "cache").table_path == str(path)
            assert path.read_bytes() == good
    assert not made.exists()


def test_no_message_is_signed_by_itself_trtllm_6241(make_stack, monkeypatch) -> None:
    """There an HMAC for each message, against forged pickles, took half of the time to send; here
    nothing that is forged can do harm, and the folder or CURVE says who may send."""

    def sign(*_: object) -> None:
        raise AssertionError("a message is signed")

    for name in ("new", "digest", "compare_digest"):
        monkeypatch.setattr(f"hmac.{name}", sign)
    stack = make_stack()
    streams = [stack.client().submit(p, max_tokens=20) for p in PROMPTS]
    stack.until(lambda: all(s.is_over for s in streams))
    assert {s.end.reason for s in streams} == {"length"}


# ---- buffers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("hop", ["worker to client", "core to worker"])
def test_a_message_that_waits_to_be_read_is_never_changed_vllm_24655_50053(
    make_stack, monkeypatch, hop
) -> None:
    """There the buffer of a large message was filled with the next one while ZeroMQ still sent the
    first; here as many as may be under way lie unread, each too large to be copied on the side."""
    new_dealer = slipstream_ipc.transport.channel.new_dealer

    def narrow(*args, **kwargs):
        socket = new_dealer(*args, **kwargs)
        socket.setsockopt(zmq.RCVHWM, 1)  # or the reader's own thread would take all of them in
        return socket

    monkeypatch.setattr(slipstream_ipc.transport.channel, "new_dealer", narrow)
    monkeypatch.setattr(slipstream_ipc.transport.dealer, "connect_local", lambda *_: None)
    # none ends before all have begun, one in some twenty steps, or while others acknowledge theirs
    num, most = 400, 32_000
    stack = make_stack(
        max_num_seqs=num, max_model_len=2**15, max_num_batched_tokens=4096, stream_interval=1
    )
    client = stack.client()
    watch = Watch(client)
    streams = [client.submit([5, 6 + n], max_tokens=most, logprobs=20) for n in range(num)]
    stack.until(lambda: all(len(s.token_ids) > 2 for s in streams))
    if hop == "worker to client":
        sender, receiver = stack.worker.readers._front._codec, client.hop._codec
        link = stack.worker.readers.port(client.hop._identity).session.link
    else:
        sender, receiver = stack.core.handler._acceptor._codec, stack.worker._core._dealer._codec
        [link] = [session.link for session in stack.core.handler._acceptor.sessions]
    sent: list[tuple[bytes, int]] = []
    got: list[bytes] = []
    encode, decode = sender.encode, receiver.decode

    def digest(data) -> bytes:
        return blake2b(data, digest_size=16).digest()

    def note_sent(frame):
        data = encode(frame)
        sent.append((digest(data), len(data)))
        return data

    def note_got(data):
        got.append(digest(data))
        return decode(data)

    stack.until(lambda: link.num_unacked < WINDOW // 4)  # the others will be those to look at
    monkeypatch.setattr(sender, "encode", note_sent)
    monkeypatch.setattr(receiver, "decode", note_got)
    worker = stack.worker
    if hop == "worker to client":
        client.is_reading = False
    else:
        stack.worker = None

    def large() -> list[bytes]:
        return [one for one, size in sent if size > 2**16]

    stack.until(lambda: len(large()) >= WINDOW // 2)
    held = large()
    assert len(got) < 2, "they lie there"
    client.is_reading, stack.worker = True, worker
    stack.until(lambda: len(got) > len(sent) - WINDOW and set(held) <= set(got))
    known = [one for one, _ in sent]
    while got[0] not in known:  # it was under way before we looked
        got.pop(0)
    begin = known.index(got[0])
    assert got == known[begin : begin + len(got)]
    for message in watch.messages:
        check_deltas(message)


# ---- garbage collection --------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("params", [{}, {"logprobs": 2}, {"stop": ("zq}",)}])
def test_serving_calls_for_no_garbage_collection_vllm_30088_33575_trtllm_13910(
    make_stack, params
) -> None:
    """There lists and objects for each token made the collector run, at worst over all that the
    process holds, for up to a second; here a thousand streams make none run at all."""
    num, num_steps = 1024, 150
    stack = make_stack(max_num_seqs=num, max_num_batched_tokens=8192)
    client = stack.client()
    streams = [client.submit([5, 6 + n], max_tokens=400, **params) for n in range(num)]
    stack.until(lambda: all(len(s.token_ids) > 2 for s in streams))
    have = sum(len(s.token_ids) for s in streams)
    runs = [0, 0, 0]

    def count(phase: str, info: dict[str, int]) -> None:
        runs[info["generation"]] += phase == "stop"

    # as both processes do when they are ready; the second run makes the collector forget how large
    # the heap was, by which it would put off full collections
    gc.collect()
    gc.freeze()
    try:
        gc.collect()
        gc.callbacks.append(count)
        stop_at = stack.core.engine._collected_step + num_steps
        stack.until(lambda: stack.core.engine._collected_step >= stop_at)
    finally:
        gc.callbacks.remove(count)
        gc.unfreeze()
    made = sum(len(s.token_ids) for s in streams) - have
    assert made > num * (num_steps - 50)
    assert runs[1:] == [0, 0]
    assert runs[0] < num_steps / 10
