"""Streams through a whole stack: right text, one end, everything freed, one's fault one's own."""

from __future__ import annotations

import pytest
from msgspec import Raw, structs
from tests.helpers.patience import PATIENCE_S

from slipstream_ipc.messages import Frame, SamplingParams, Submit, Tokenize
from slipstream_ipc.transport.codec import encode_params
from slipstream_ipc.transport.sockets import new_dealer
from slipstream_worker.detokenizer.factory import Detokenizer, DetokenizerFactory

PROMPTS = [f"The {n}. question is: what does a generator yield?" for n in range(8)]


def test_text_equals_decode_of_the_ids(make_stack, tokenizer) -> None:
    stack = make_stack()
    client = stack.client()
    streams = [client.submit(prompt, max_tokens=60) for prompt in PROMPTS]
    stack.until(lambda: all(s.is_over for s in streams))
    for prompt, it in zip(PROMPTS, streams, strict=True):
        prompt_ids = tokenizer.encode(prompt).ids
        whole = tokenizer.decode(prompt_ids + it.token_ids)
        assert whole == prompt + it.text
        assert it.accepted == 1
        assert (it.end.reason, it.end.num_tokens) == ("length", 60)


def test_stop_string_cuts_text_ids_and_logprobs(make_stack, expected) -> None:
    [plain] = expected(PROMPTS[:1], max_tokens=60)
    stop = plain.text[20:24]
    at = plain.text.index(stop)
    stack = make_stack()
    client = stack.client()
    it = client.submit(PROMPTS[0], max_tokens=60, stop=(stop,), logprobs=2)
    stack.until(lambda: it.is_over)
    assert it.text == plain.text[:at]
    assert (it.end.reason, it.end.stop_reason) == ("stop", stop)
    assert it.token_ids == plain.token_ids[: len(it.token_ids)]
    assert len(it.ranks) == len(it.token_ids) == it.end.num_tokens


def test_stop_token_ids_and_min_tokens(make_stack, expected) -> None:
    [plain] = expected(PROMPTS[:1], max_tokens=60)
    stop_id = plain.token_ids[10]
    first = plain.token_ids.index(stop_id)
    stack = make_stack()
    client = stack.client()
    soon = client.submit(PROMPTS[0], max_tokens=60, stop_token_ids=(stop_id,))
    late = client.submit(PROMPTS[0], max_tokens=60, stop_token_ids=(stop_id,), min_tokens=30)
    stack.until(lambda: soon.is_over and late.is_over)
    assert soon.token_ids == plain.token_ids[: first + 1]
    assert (soon.end.reason, soon.end.stop_reason) == ("stop", stop_id)
    assert stop_id not in late.token_ids[:30]


@pytest.mark.parametrize("interval", [1, 3, 10, 100])
def test_interval_changes_the_cut_not_the_text(make_stack, expected, interval: int) -> None:
    [plain] = expected(PROMPTS[:1], max_tokens=40)
    stack = make_stack()
    client = stack.client()
    it = client.submit(PROMPTS[0], max_tokens=40, stream_interval=interval)
    stack.until(lambda: it.is_over)
    assert (it.text, it.token_ids) == (plain.text, plain.token_ids)
    if interval > 1:
        # the first token, every n-th after it, and the end; merging can only make it fewer
        assert it.num_deltas <= 2 + 39 // interval


def test_a_reader_without_room_is_coalesced_and_delays_nobody(make_stack, expected) -> None:
    plain = expected(PROMPTS[:2], max_tokens=200)
    stack = make_stack()
    slow, quick = stack.client(), stack.client()
    a = slow.submit(PROMPTS[0], max_tokens=200)
    b = quick.submit(PROMPTS[1], max_tokens=200)
    stack.until(lambda: len(a.token_ids) > 5)
    slow.is_reading = False
    stack.until(lambda: b.is_over)
    assert not a.is_over
    slow.is_reading = True
    stack.until(lambda: a.is_over)
    assert [(s.text, s.token_ids) for s in (a, b)] == [(s.text, s.token_ids) for s in plain]
    assert a.num_deltas < 100


def test_auto_sends_first_tokens_and_ends_to_a_reader_that_has_no_room(make_stack) -> None:
    stack = make_stack(stream_interval="auto")
    client = stack.client()
    first = client.submit(PROMPTS[0], max_tokens=400)
    stack.until(lambda: len(first.token_ids) > 5)
    second = client.submit(PROMPTS[1], max_tokens=2)
    client.step()
    client.is_reading = False
    link = stack.worker.readers.port(client.hop._identity).session.link
    stack.until(lambda: stack.core.handler.num_streams == 2 and link.num_unacked >= 2)
    # tokens of the first stream pile up, the second one's Accepted, first token and end do not
    for _ in range(300):
        stack.step()
    assert 2 < link.num_unacked <= 6
    client.is_reading = True
    stack.until(lambda: first.is_over and second.is_over)
    assert first.num_deltas < 350


@pytest.mark.long
def test_abort_races_submit_tokenising_preemption_and_final_one_end(make_stack) -> None:
    for num_steps in range(0, 60, 2):
        stack = make_stack(num_blocks=34, max_num_batched_tokens=64, grace_s=0.0)
        client = stack.client()
        stack.prompts.is_held = num_steps % 4 == 0
        streams = [client.submit(p, max_tokens=40) for p in PROMPTS * 3]
        for _ in range(num_steps):
            stack.step()
        stack.prompts.is_held = False
        for it in streams[::2]:
            client.abort(it)
        stack.until(lambda streams=streams: all(s.is_over for s in streams))
        for it in streams[1::2]:
            assert it.end.reason == "length"
        for it in streams[::2]:
            if it.end is not None:
                assert it.end.reason in ("abort", "length")
            else:
                assert "abort" in it.fault.message
        stack.until(stack.holds_nothing)


def test_what_is_aborted_while_it_is_tokenised_is_not_begun_again(make_stack) -> None:
    """However late it is asked for: by its own client that attached anew, and by others."""
    stack = make_stack()
    client, other = stack.client(), stack.client()
    stack.prompts.is_held = True
    it = client.submit(PROMPTS[0], max_tokens=5)
    stays = client.submit(PROMPTS[1], max_tokens=5)
    stack.until(lambda: len(stack.worker.streams) == 2)
    client.abort(it)
    stack.until(lambda: it.is_over)
    assert (it.fault.code, it.accepted) == ("bad_request", 0)
    late = client.send_submit(structs.replace(it.submit, handle=7))
    foreign = other.send_submit(it.submit)
    resumed = other.take_over(it)
    again = [late, foreign, resumed]
    stack.until(lambda: all(one.is_over for one in again))
    assert [one.fault for one in again] == [it.fault] * 3
    assert len(stack.worker.streams) == 1
    stack.prompts.is_held = False
    stack.until(lambda: stays.is_over)
    assert stays.end.reason == "length"
    for _ in range(20):
        stack.step()  # `RawClient` asserts that nobody is told twice
    assert [one.accepted for one in again] == [0, 0, 0]


def test_an_abort_whose_answer_is_lost_is_answered_after_the_attach(make_stack) -> None:
    stack = make_stack()
    client = stack.client()
    stack.prompts.is_held = True
    it = client.submit(PROMPTS[0], max_tokens=5)
    stack.until(lambda: len(stack.worker.streams) == 1)
    client.abort(it)
    client.is_reading = False  # it was sent, nothing is heard
    assert client.hop.send(client._waiting.pop(), None)
    for _ in range(1000):
        stack.step()
        if not len(stack.worker.streams):
            break
    assert not len(stack.worker.streams)
    client.hop.attach(stack.now())
    client.is_reading = True
    stack.prompts.is_held = False
    stack.until(lambda: it.is_over)
    assert "aborted" in it.fault.message
    assert it.accepted == 0
    stack.until(stack.holds_nothing)


def test_a_client_that_says_goodbye_leaves_nothing_behind(make_stack) -> None:
    stack = make_stack(num_blocks=40)
    client = stack.client()
    streams = [client.submit(p, max_tokens=400) for p in PROMPTS]
    stack.until(lambda: any(s.text for s in streams))
    client.goodbye()
    stack.until(stack.holds_nothing)
    assert stack.worker.readers.num_clients == 0


def test_a_client_that_vanishes_is_cancelled_after_the_grace_time(make_stack) -> None:
    stack = make_stack(client_timeout_s=1.0, grace_s=5.0)
    gone, stays = stack.client(), stack.client()
    streams = [gone.submit(p, max_tokens=450) for p in PROMPTS]
    other = stays.submit(PROMPTS[0], max_tokens=300)
    stack.until(lambda: any(s.text for s in streams))
    gone.is_reading = False
    gone.hop.close()
    stack.clients.remove(gone)
    stack.until(lambda: other.is_over)
    stack.let_pass(11.0)
    stack.until(stack.holds_nothing)
    assert other.end.reason == "length"
    assert stack.worker.readers.num_clients == 1


class Fragile(DetokenizerFactory):
    """A detokeniser factory whose product breaks on the n-th token of one stream."""

    delimiter_ids = ()

    def __init__(self, factory: DetokenizerFactory, breaks_for: list[int]) -> None:
        self._factory = factory
        self._breaks_for = breaks_for

    def create(self, prompt_ids: list[int], skip_special_tokens: bool) -> Detokenizer:
        detokenizer = self._factory.create(prompt_ids, skip_special_tokens)
        if list(prompt_ids) == self._breaks_for:
            real_step, countdown = detokenizer.step, iter(range(5))

            class Broken:
                num_pending = 0

                def step(self, token_id: int) -> str:
                    next(countdown)
                    return real_step(token_id)

                def flush(self) -> str:
                    raise AssertionError("a broken detokeniser must not be asked again")

            return Broken()
        return detokenizer


def test_an_exception_in_one_stream_ends_that_stream_alone(make_stack, expected, tokenizer) -> None:
    plain = expected(PROMPTS, max_tokens=30)
    stack = make_stack()
    stack.kill_worker()
    stack.detokenizers = Fragile(stack.detokenizers, tokenizer.encode(PROMPTS[3]).ids)
    stack.start_worker()
    client = stack.client()
    streams = [client.submit(p, max_tokens=30) for p in PROMPTS]
    stack.until(lambda: all(s.is_over for s in streams))
    for n, (it, undisturbed) in enumerate(zip(streams, plain, strict=True)):
        if n == 3:
            assert it.end.reason == "error"
            assert it.end.fault.code == "engine"
            assert plain[3].text.startswith(it.text)
        else:
            assert (it.text, it.token_ids) == (undisturbed.text, undisturbed.token_ids)


def test_a_step_that_raises_ends_its_requests_and_no_others(make_stack, monkeypatch) -> None:
    stack = make_stack()
    client = stack.client()
    first = client.submit(PROMPTS[0], max_tokens=30)
    stack.until(lambda: len(first.token_ids) > 3)
    runner = stack.core.runner
    real = runner._sample

    def raises(plan: object, masks: object) -> object:
        monkeypatch.setattr(runner, "_sample", real)
        raise ValueError("the device is unwell")

    monkeypatch.setattr(runner, "_sample", raises)
    stack.until(lambda: first.is_over)
    assert first.end.reason == "error"
    assert "the device is unwell" in first.end.fault.message
    second = client.submit(PROMPTS[1], max_tokens=30)
    stack.until(lambda: second.is_over)
    assert second.end.reason == "length"


def test_bad_requests_name_the_field_and_leave_the_others_alone(make_stack, expected) -> None:
    [plain] = expected(PROMPTS[:1], max_tokens=100)
    stack = make_stack(grace_s=0.0)
    client, bad = stack.client(), stack.client()
    good = client.submit(PROMPTS[0], max_tokens=100)
    stack.until(lambda: len(good.token_ids) > 2)
    cases: list[tuple[str, object, dict[str, object]]] = [
        ("prompt", "", {}),
        ("prompt_token_ids", [1, 2, 4096], {}),
        ("prompt", [5] * 512, {}),
        ("max_tokens", [5] * 500, {"max_tokens": 100}),
        ("temperature", "x", {"temperature": -0.1}),
        ("top_p", "x", {"top_p": 0.0}),
        ("top_p", "x", {"top_p": 1.5}),
        ("min_p", "x", {"min_p": -1.0}),
        ("stream_interval", "x", {"stream_interval": 0}),
        ("stop", "x", {"stop": ("a", "")}),
        ("stop", "x", {"stop": ("a",), "detokenize": False}),
        ("stop_token_ids", "x", {"stop_token_ids": (4096,)}),
        ("logprobs", "x", {"logprobs": 21}),
        ("max_tokens", "x", {"max_tokens": 0}),
        ("min_tokens", "x", {"min_tokens": 17}),
        ("seed", "x", {"seed": 2**63}),
    ]
    for field, prompt, params in cases:
        it = bad.submit(prompt, **params)
        stack.until(lambda it=it: it.is_over)
        assert it.fault is not None, (field, params)
        assert (it.fault.code, it.fault.field) == ("bad_request", field)
        assert "allowed" in it.fault.message
    stack.until(lambda: good.is_over)
    assert (good.text, good.token_ids) == (plain.text, plain.token_ids)
    stack.until(stack.holds_nothing)


def test_params_that_are_none_are_refused_with_the_allowed_fields(make_stack) -> None:
    stack = make_stack()
    client = stack.client()
    raw = Raw(b"\x81\xa9temprture\x01")
    it = client.send_submit(Submit(0, b"i" * 16, raw, text="x"))
    stack.until(lambda: it.is_over)
    assert it.fault.code == "bad_request"
    assert "temprture" in it.fault.message
    assert "temperature" in it.fault.message


def test_late_or_foreign_duplicate_submit(make_stack) -> None:
    stack = make_stack()
    client, stranger = stack.client(), stack.client()
    it = client.submit(PROMPTS[0], max_tokens=100)
    stack.until(lambda: len(it.token_ids) > 3)
    params = encode_params(SamplingParams(max_tokens=5))
    foreign = stranger.send_submit(Submit(0, it.stream_id, params, text="other"))
    own = client.send_submit(Submit(7, it.stream_id, params, text="other"))
    stack.until(lambda: foreign.is_over and own.is_over)
    assert foreign.fault.code == own.fault.code == "conflict"
    stack.until(lambda: it.is_over)
    assert it.end.reason == "length"


def test_garbage_is_refused_and_disturbs_nobody(make_stack, expected) -> None:
    [plain] = expected(PROMPTS[:1], max_tokens=100)
    stack = make_stack()
    client, bad = stack.client(), stack.client()
    it = client.submit(PROMPTS[0], max_tokens=100)
    stack.until(lambda: len(it.token_ids) > 2 and bad.hop.is_attached)
    bad.is_reading = False
    for garbage in (b"", b"\xc1", b"\x00" * 100, b"\x94\x01\x02\x03\x04", bytes(range(256))):
        bad.hop._channel.send(garbage)
    bad.hop._channel.send(bad.hop._codec.encode(Frame(bad.hop.epoch, 99, 0, None)))
    other = new_dealer(stack.context, stack.client_address, b"over ZeroMQ")
    other.send_multipart([b"two", b"parts"])
    stack.until(lambda: it.is_over)
    assert (it.text, it.token_ids) == (plain.text, plain.token_ids)
    assert bad._poller.poll(int(PATIENCE_S * 1e3))
    assert other.poll(int(PATIENCE_S * 1e3))


def test_a_prompt_that_can_never_fit_is_refused_one_that_does_not_fit_now_waits(make_stack) -> None:
    stack = make_stack(num_blocks=33)
    client = stack.client()
    streams = [client.submit([5 + n] * 200, max_tokens=100) for n in range(4)]
    stack.until(lambda: all(s.is_over for s in streams))
    assert {s.end.reason for s in streams} == {"length"}


@pytest.mark.parametrize("limit", ["MAX_RENDERING", "MAX_RENDERING_CHARS"])
def test_more_prompts_than_can_wait_are_turned_away(make_stack, monkeypatch, limit) -> None:
    most = 3 if limit == "MAX_RENDERING" else sum(map(len, PROMPTS[:3]))
    monkeypatch.setattr(f"slipstream_worker.tokenizer.queue.{limit}", most)
    stack = make_stack()
    client = stack.client()
    stack.prompts.is_held = True
    streams = [client.submit(p, max_tokens=5) for p in PROMPTS[:5]]
    stack.until(lambda: sum(s.is_over for s in streams) == 2)
    stack.prompts.is_held = False
    stack.until(lambda: all(s.is_over for s in streams))
    assert [s.fault.code for s in streams if s.fault is not None] == ["overloaded"] * 2
    assert [s.end.reason for s in streams if s.end is not None] == ["length"] * 3
    again = client.submit(PROMPTS[0], max_tokens=5)
    stack.until(lambda: again.is_over)
    assert again.fault is None


def test_whose_client_leaves_gives_its_place_to_others(make_stack, monkeypatch) -> None:
    monkeypatch.setattr("slipstream_worker.tokenizer.queue.MAX_RENDERING_CHARS", 40)
    stack = make_stack()
    leaver, other = stack.client(), stack.client()
    stack.prompts.is_held = True
    kept, aborted = (leaver.submit(prompt, max_tokens=5) for prompt in ("a" * 20, "b" * 20))
    stack.until(lambda: len(stack.worker.streams) == 2)
    refused = leaver.submit("c", max_tokens=5)
    stack.until(lambda: refused.is_over)
    assert refused.fault.code == "overloaded"
    first = other.submit("d" * 20, max_tokens=5)  # there is room for another's
    stack.until(lambda: len(stack.worker.streams) == 3)
    refused = other.submit("e", max_tokens=5)
    stack.until(lambda: refused.is_over)
    assert refused.fault.code == "overloaded"
    leaver.abort(aborted)
    stack.until(lambda: aborted.is_over)
    leaver.goodbye()
    stack.until(lambda: len(stack.worker.streams) == 1)
    second = other.submit("f" * 20, max_tokens=5)
    stack.until(lambda: len(stack.worker.streams) == 2)
    stack.prompts.is_held = False
    stack.until(lambda: first.is_over and second.is_over)
    assert (first.fault, second.fault, kept.end) == (None, None, None)


def test_one_prompt_of_several_streams_is_tokenised_once(make_stack, expected) -> None:
    [plain] = expected(PROMPTS[:1], max_tokens=5)
    stack = make_stack()
    client, other = stack.client(), stack.client()
    stack.prompts.is_held = True
    streams = [each.submit(PROMPTS[0], max_tokens=5) for each in (client, client, other)]
    stack.until(lambda: len(stack.worker.streams) == 3)
    client.abort(streams[0])
    stack.until(lambda: streams[0].is_over)
    assert len(stack.prompts.asked) == 1
    stack.prompts.is_held = False
    stack.until(lambda: all(it.is_over for it in streams))
    assert [it.text for it in streams] == ["", plain.text, plain.text]
    again = client.submit(PROMPTS[0], stream_id=streams[1].stream_id, max_tokens=5)
    stack.until(lambda: again.is_over)
    assert again.text == plain.text, "the same submission still, though its text was let go"


def test_questions_of_who_leaves_or_attaches_anew_are_withdrawn(make_stack) -> None:
    stack = make_stack(client_timeout_s=1.0)
    leaver, other, lost = stack.client(), stack.client(), stack.client()
    stack.prompts.is_held = True
    for client in (leaver, other, lost):
        client.send(Tokenize(1, "a question"))
    stack.until(lambda: len(stack.prompts.asked) == 3)
    leaver.goodbye()
    stack.until(lambda: len(stack.prompts.asked) == 2)
    other.hop.attach(stack.now())
    stack.until(lambda: len(stack.prompts.asked) == 1)
    stack.until(lambda: other.hop.is_attached)
    lost.is_reading = False
    stack.until(lambda: not stack.prompts.asked)
