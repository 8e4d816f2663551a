"""Streams that a core is given again: after its own death, a worker's, or a link's."""

from __future__ import annotations

import time

import pytest
from msgspec import structs
from tests.helpers.admits import with_fields
from tests.helpers.core_box import columns

from slipstream_ipc.columns import pack_u32
from slipstream_ipc.messages import LogprobColumns, Registered
from slipstream_ipc.messages.budgets import MAX_MESSAGE_BYTES

PROMPTS = [[n + 1, 5, 9 * n + 2, 7] for n in range(6)]


def finished(box, held) -> bool:
    box.until(lambda: all(it.is_over for it in held))
    return all(it.is_whole for it in held)


@pytest.mark.parametrize("num_steps", [1, 3, 8, 20])
def test_a_core_that_died_is_told_everything_again(make_core, undisturbed, num_steps) -> None:
    box = make_core()
    worker = box.worker()
    held = [worker.admit(p, 30, logprobs=n % 3 or None) for n, p in enumerate(PROMPTS)]
    for _ in range(num_steps):
        box.step()
    box.kill()
    box.start()
    assert finished(box, held)
    for it in held:
        plain = undisturbed(it.admit)
        assert it.token_ids == plain.token_ids
        assert it.logprobs == plain.logprobs


def test_log_probabilities_of_before_survive_core_and_worker(make_core, undisturbed) -> None:
    box = make_core()
    worker = box.worker()
    it = worker.admit(PROMPTS[0], 40, logprobs=2)
    box.until(lambda: len(it.token_ids) > 9)
    had = len(it.token_ids)
    box.kill()
    box.start()
    box.until(lambda: len(it.token_ids) > had + 5)
    box.kill_worker(worker)
    fresh = box.worker()
    box.until(lambda: fresh.is_synced)
    [registered] = fresh.heard(Registered)
    registration = registered.registration
    assert len(registration.begun.output_ids) // 4 >= had
    assert len(registration.begun.logprobs.ranks) == len(registration.begun.output_ids)
    replayed = fresh.streams[it.admit.stream_id]
    box.until(lambda: replayed.is_over)
    plain = undisturbed(it.admit)
    assert (replayed.token_ids, replayed.logprobs) == (plain.token_ids, plain.logprobs)


def resubmitted(it, num_outputs: int, logprobs: LogprobColumns | None):
    """A registration of the same request that comes with some of its outputs."""
    return with_fields(
        it.admit,
        stream_id=b"r" * 16,
        output_ids=pack_u32(it.token_ids[:num_outputs]),
        logprobs=logprobs,
        was_accepted=True,
    )


def test_log_probabilities_of_the_last_outputs_alone_are_handed_on(make_core, undisturbed) -> None:
    """Those of the outputs before went to the client, which brought the outputs back alone."""
    box = make_core()
    worker = box.worker()
    plain = worker.admit(PROMPTS[0], 30, logprobs=2)
    assert finished(box, [plain])
    tail = columns(plain.logprobs[6:10])
    again = worker.send_admit(resubmitted(plain, 10, tail))
    box.until(lambda: again.is_over)
    assert again.is_whole
    assert again.token_ids == plain.token_ids
    assert again.logprobs == plain.logprobs[10:]
    box.kill_worker(worker)
    fresh = box.worker()
    box.until(lambda: fresh.is_synced)
    found = {body.registration.stream_id: body for body in fresh.heard(Registered)}
    assert found[again.admit.stream_id].registration.begun.logprobs == tail
    replayed = fresh.streams[again.admit.stream_id]
    box.until(lambda: replayed.is_over)
    assert replayed.logprobs == plain.logprobs[6:]


def test_a_registration_larger_than_any_clients_message(make_core) -> None:
    num, width = 105_000, 21
    box = make_core(max_model_len=2 * num, num_blocks=16_000)
    worker = box.worker()
    given = LogprobColumns(width, bytes(4 * num * width), bytes(4 * num * width), bytes(4 * num))
    prompt = worker.admit(PROMPTS[0]).admit
    it = worker.send_admit(
        with_fields(
            prompt,
            stream_id=b"l" * 16,
            params=structs.replace(prompt.spec.params, logprobs=width - 1),
            max_tokens=num + 5,
            output_ids=bytes(4 * num),
            logprobs=given,
            was_accepted=True,
        )
    )
    assert len(given.values) + len(given.ids) > MAX_MESSAGE_BYTES
    box.until(lambda: it.row is not None)
    box.kill_worker(worker)
    fresh = box.worker()
    box.until(lambda: fresh.is_synced)
    found = {body.registration.stream_id: body for body in fresh.heard(Registered)}
    assert found[it.admit.stream_id].registration.begun.logprobs == given


# ---- what was accepted once ----------------------------------------------------------------------


def test_what_was_accepted_once_passes_the_bound_on_waiting_requests(make_core) -> None:
    box = make_core(max_waiting=2, max_num_seqs=1)
    worker = box.worker()
    first = worker.admit(PROMPTS[0], 200)
    box.until(lambda: len(first.token_ids) > 2)
    waiting = [worker.admit(PROMPTS[1], 5) for _ in range(2)]
    refused = worker.admit(PROMPTS[2], 5)
    box.until(lambda: refused.fault is not None)
    assert refused.fault.code == "overloaded"
    accepted = [worker.admit(PROMPTS[n], 5, was_accepted=True) for n in range(3)]
    assert finished(box, [first, *waiting, *accepted])


def test_outputs_alone_do_not_pass_the_bound(make_core, undisturbed) -> None:
    box = make_core(max_waiting=1, max_num_seqs=1)
    worker = box.worker()
    first = worker.admit(PROMPTS[0], 200)
    box.until(lambda: len(first.token_ids) > 2)
    second = worker.admit(PROMPTS[1], 5)
    refused = worker.admit(PROMPTS[2], 5, output_ids=pack_u32([3]))
    box.until(lambda: refused.fault is not None)
    assert refused.fault.code == "overloaded"
    assert finished(box, [first, second])


def test_even_what_was_accepted_once_has_a_bound(make_core) -> None:
    box = make_core(max_waiting=1, max_num_seqs=1)
    worker = box.worker()
    streams = [worker.admit(PROMPTS[0], 200, was_accepted=True) for _ in range(40)]
    box.until(lambda: any(it.fault is not None for it in streams))
    box.until(lambda: all(it.fault is not None or it.row is not None for it in streams))
    refused = [it for it in streams if it.fault is not None]
    assert {it.fault.code for it in refused} == {"overloaded"}
    assert len(refused) == 40 - 16 * (1 + 1) - 1  # one runs


# ---- a stream that is here already ---------------------------------------------------------------


def test_the_same_admission_twice_is_one_stream(make_core, undisturbed) -> None:
    box = make_core()
    worker = box.worker()
    box.until(lambda: worker.is_synced)
    it = worker.admit(PROMPTS[0], 20)
    worker.send(it.admit)
    box.until(lambda: it.num_admitted == 2)
    assert finished(box, [it])
    assert it.token_ids == undisturbed(it.admit).token_ids
    assert box.core.handler.num_streams == 1


def test_a_stream_that_is_admitted_again_over_a_new_link(make_core, undisturbed) -> None:
    """Its worker does so instead of stating a position, and it is not forgotten for that."""
    box = make_core()
    worker = box.worker()
    it = worker.admit(PROMPTS[0], 60, logprobs=1)
    box.until(lambda: len(it.token_ids) > 5)
    row = it.row
    it.was_admitted = False
    it.token_ids, it.logprobs = it.token_ids[:3], it.logprobs[:3]
    worker.hop.attach(time.monotonic())
    assert finished(box, [it])
    assert it.row == row
    plain = undisturbed(it.admit)
    assert (it.token_ids, it.logprobs) == (plain.token_ids, plain.logprobs)


def test_a_worker_that_has_more_of_a_stream_than_its_core(make_core, undisturbed) -> None:
    box = make_core(max_num_seqs=1)
    worker = box.worker()
    running = worker.admit(PROMPTS[1], 200)
    box.until(lambda: len(running.token_ids) > 5)
    it = worker.admit(PROMPTS[0], 40)
    box.until(lambda: it.row is not None)
    assert not it.token_ids, "the one slot there is belongs to another"
    plain = undisturbed(it.admit)
    it.token_ids = plain.token_ids[:12]
    it.was_admitted = False
    worker.hop.attach(time.monotonic())
    assert finished(box, [running, it])
    assert it.token_ids == plain.token_ids


@pytest.mark.parametrize(
    "change",
    [
        {"prompt_ids": pack_u32([1, 2, 3])},
        {"seed": 5},
        {"max_tokens": 21},
        {"fingerprint": b"another"},
    ],
)
def test_another_request_under_the_same_id_is_a_conflict(make_core, change) -> None:
    box = make_core()
    worker = box.worker()
    it = worker.admit(PROMPTS[0], 20)
    box.until(lambda: len(it.token_ids) > 2)
    worker.send(with_fields(it.admit, **change))
    box.until(lambda: it.fault is not None)
    assert it.fault.code == "conflict"


def test_the_same_fingerprint_is_the_same_request(make_core) -> None:
    """Whoever reads it now, and however far it is."""
    box = make_core()
    worker = box.worker()
    it = worker.admit(PROMPTS[0], 20, fingerprint=b"f")
    box.until(lambda: len(it.token_ids) > 2)
    worker.send(with_fields(it.admit, owner=b"another", handle=7, strikes=1))
    box.hear_until(lambda: it.num_admitted == 2)
    assert finished(box, [it])


def test_other_outputs_than_the_cores_are_never_spliced(make_core) -> None:
    box = make_core()
    worker = box.worker()
    it = worker.admit(PROMPTS[0], 100)
    box.until(lambda: len(it.token_ids) > 5)
    it.was_admitted = False
    it.token_ids = [(it.token_ids[0] + 1) % 997]
    worker.hop.attach(time.monotonic())
    box.until(lambda: it.fault is not None)
    assert it.fault.code == "diverged"


# ---- what cannot be taken ------------------------------------------------------------------------

ONE = LogprobColumns(2, b"\0" * 8, b"\0" * 8, b"\0" * 4)
TWO = LogprobColumns(2, b"\0" * 16, b"\0" * 16, b"\0" * 8)


@pytest.mark.parametrize(
    ("changes", "logprobs"),
    [
        ({"output_ids": pack_u32([1]), "logprobs": TWO}, 1),  # of two tokens, and there is one
        ({"output_ids": pack_u32([1]), "logprobs": ONE}, 2),  # too narrow
        ({"output_ids": pack_u32([1]), "logprobs": ONE}, None),  # not wanted
        ({"logprobs": ONE}, 1),  # of no output
        ({"output_ids": pack_u32([1]), "logprobs": structs.replace(ONE, ranks=b"")}, 1),
        ({"output_ids": pack_u32([1]), "logprobs": structs.replace(ONE, ranks=b"abc")}, 1),
        ({"output_ids": pack_u32([1, 2]), "logprobs": structs.replace(TWO, values=b"")}, 1),
        ({"output_ids": pack_u32([1]), "logprobs": structs.replace(ONE, widths=b"\2\0\0\0")}, 1),
    ],
)
def test_columns_that_do_not_fit_the_outputs_are_refused(make_core, changes, logprobs) -> None:
    box = make_core()
    worker = box.worker()
    good = worker.admit(PROMPTS[0]).admit
    params = structs.replace(good.spec.params, logprobs=logprobs)
    bad = worker.send_admit(with_fields(good, stream_id=b"b" * 16, params=params, **changes))
    box.until(lambda: bad.fault is not None)
    assert (bad.fault.code, bad.fault.field) == ("bad_request", "logprobs")
    assert finished(box, [it for it in worker.streams.values() if it is not bad])


def test_a_stream_id_is_16_bytes(make_core) -> None:
    box = make_core()
    worker = box.worker()
    bad = worker.admit(PROMPTS[0], stream_id=b"short")
    box.until(lambda: bad.fault is not None)
    assert (bad.fault.code, bad.fault.field) == ("bad_request", "stream_id")
    assert "5 bytes, allowed: 16" in bad.fault.message


def test_what_could_not_be_told_again_in_one_message_is_refused(make_core, monkeypatch) -> None:
    from slipstream_core.workers import admission

    monkeypatch.setattr(admission, "MAX_CORE_MESSAGE_BYTES", admission._OTHER_BYTES + 2000)
    box = make_core()
    worker = box.worker()
    fits = worker.admit(PROMPTS[0], 100, logprobs=0)
    bad = worker.admit(PROMPTS[0], 100, logprobs=1)
    assert finished(box, [fits])
    assert (bad.fault.code, bad.fault.field) == ("bad_request", "logprobs")
    assert "allowed" in bad.fault.message
