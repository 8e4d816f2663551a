"""Log-probabilities of all requests together: who finds no room waits, and nobody else."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from tests.helpers.admits import admit_of, with_fields

from slipstream_core.media.preparer import PreparedMedia
from slipstream_core.scheduler.logprob_budget import LogprobBudget, first_bytes, outputs_bytes
from slipstream_core.workers.adapters import Adapters
from slipstream_core.workers.pending import PendingAdmissions
from slipstream_ipc.columns import pack_u32
from slipstream_ipc.messages import Admit, Fault, LogprobColumns, SamplingParams
from slipstream_ipc.validation.media import media_item

BYTES = outputs_bytes(5, 20)  # of 20 tokens with 5 each, and their own
PROMPT = [5, 6, 7, 8]


def gib(num_bytes: int) -> float:
    return num_bytes / 2**30


class NoGrammars:
    num_jobs = 0

    def take_compiled(self) -> list[object]:
        return []


def registration(number: int, logprobs: int | None) -> Admit:
    return admit_of(
        stream_id=number.to_bytes(16, "little"),
        prompt_ids=pack_u32([1]),
        params=SamplingParams(logprobs=logprobs),
        stop_token_ids=(),
        seed=0,
        max_tokens=1000,
    )


@settings(deadline=None)
@given(
    most=st.integers(1, 10 * outputs_bytes(2, 1)),
    actions=st.lists(st.tuples(st.integers(-1, 5), st.booleans(), st.booleans()), max_size=60),
)
def test_never_more_is_promised_and_everybody_gets_his_turn(
    most: int, actions: list[tuple[int, bool, bool]]
) -> None:
    """Each action: a request comes that wants so many, or (-1) one that runs is forgotten, or given
    up while it waits."""
    logprob_budget = LogprobBudget(most)
    held = PendingAdmissions(NoGrammars(), logprob_budget, Adapters())  # type: ignore[arg-type]
    asking: deque[Admit] = deque()
    running: deque[tuple[int, Admit]] = deque()

    def take(admit: Admit) -> None:
        row = int.from_bytes(admit.stream_id, "little")
        logprob_budget.open(row, first_bytes(admit))
        running.append((row, admit))

    def take_ready() -> None:
        for ready in held.ready():
            assert ready.admit is asking.popleft()
            take(ready.admit)

    for number, (wanted, wants_some, is_first) in enumerate(actions):
        if wanted >= 0:
            admit = registration(number, wanted if wants_some else None)
            if held.reserve(admit):
                take(admit)
                assert not (wants_some and asking)
            else:
                assert wants_some
                held.put(b"w", admit)
                asking.append(admit)
        elif is_first and running:
            logprob_budget.close(running.popleft()[0])
        elif asking:
            held.drop(asking.pop().stream_id)
        take_ready()
        sizes = [size for _, it in running if (size := first_bytes(it))]
        assert sum(sizes) == logprob_budget.num_reserved
        assert sum(sizes) <= most or len(sizes) == 1
        assert len(held) == len(asking)
        if asking:
            assert sizes
            assert sum(sizes) + first_bytes(asking[0]) > most
    while running:
        logprob_budget.close(running.popleft()[0])
        take_ready()
    assert not len(held)
    assert logprob_budget.num_reserved == 0


def test_a_stream_that_another_core_accepted_waits_for_room_behind_no_new_one() -> None:
    size = first_bytes(registration(0, 1))
    logprob_budget = LogprobBudget(10 * size)
    held = PendingAdmissions(NoGrammars(), logprob_budget, Adapters())  # type: ignore[arg-type]
    running = [with_fields(registration(row, 1), was_accepted=True) for row in range(20)]
    for row, admit in enumerate(running):  # up to twice of it
        assert held.reserve(admit)
        logprob_budget.open(row, first_bytes(admit))
    fresh, other = registration(100, 1), registration(101, 1)
    again = with_fields(registration(102, 1), was_accepted=True)
    for admit in (fresh, other, again):
        assert not held.reserve(admit)
        held.put(b"w", admit)
    assert not [*held.ready()]
    logprob_budget.close(0)
    assert [ready.admit for ready in held.ready()] == [again]
    held.put(b"w", with_fields(fresh, was_accepted=True))  # its worker has said more of it
    for row in range(1, 3):
        logprob_budget.close(row)
    assert [ready.admit.stream_id for ready in held.ready()] == [fresh.stream_id]
    assert len(held) == 1


class Images:
    """Prepares what it is told to."""

    def __init__(self) -> None:
        self.jobs: list[Admit] = []
        self.done: list[PreparedMedia] = []
        self.released: list[object] = []

    @property
    def num_jobs(self) -> int:
        return len(self.jobs) + len(self.done)

    def submit(self, admit: Admit, *, is_suspect: bool) -> None:
        assert is_suspect == (admit.begun.strikes > 1)
        self.jobs.append(admit)

    def withdraw(self, stream_id: bytes) -> None:
        self.jobs = [job for job in self.jobs if job.stream_id != stream_id]

    def prepare(self, places: Any, fault: Fault | None = None) -> None:
        self.done.append(PreparedMedia(self.jobs.pop(0), places, fault))

    def take_prepared(self) -> list[PreparedMedia]:
        done, self.done = self.done, []
        return done

    def release(self, places: object) -> None:
        self.released.append(places)


def test_images_are_prepared_before_there_is_room_and_released_unless_they_are_taken() -> None:
    size = first_bytes(registration(0, 1))
    logprob_budget, images = LogprobBudget(size), Images()
    held = PendingAdmissions(NoGrammars(), logprob_budget, Adapters(), images)  # type: ignore[arg-type]
    media = (media_item("image", b"a picture"),)
    first, second, third, bad = (
        structs.replace(registration(number, 1), media=media) for number in range(4)
    )
    for admit in (first, second, third, bad):
        assert not held.is_ready(admit)
        held.put(b"w", admit)
    assert not [*held.ready()]
    for places in ("of first", "of second"):
        images.prepare(places)
    [ready] = held.ready()
    assert (ready.admit, ready.media) == (first, "of first")
    logprob_budget.open(0, size)
    held.drop(second.stream_id)  # while it waits for room
    assert images.released == ["of second"]
    images.prepare("of third")
    held.drop(third.stream_id)  # while the thread has it
    images.prepare(None, Fault("bad_request", "no image", "media[0]"))
    [refused] = held.ready()
    assert refused.fault is not None
    assert images.released == ["of second", "of third"]
    assert not held.has_any


def test_outputs_that_come_without_their_logprobs_take_no_room() -> None:
    plain = registration(1, 2)
    again = with_fields(plain, output_ids=pack_u32(range(10)))
    assert first_bytes(again) == first_bytes(plain)
    last = LogprobColumns(3, bytes(4 * 3 * 4), bytes(4 * 3 * 4), bytes(4 * 4))  # of four
    assert first_bytes(with_fields(again, logprobs=last)) == first_bytes(plain) + 4 * 3 * 8


def test_who_finds_no_room_waits_until_others_are_forgotten(make_core, undisturbed) -> None:
    box = make_core(logprobs_gib=gib(2 * BYTES))
    worker = box.worker()
    first = [worker.admit(PROMPT, 20, logprobs=5) for _ in range(2)]
    late = worker.admit(PROMPT, 20, logprobs=5)
    plain = worker.admit(PROMPT, 20)
    narrow = worker.admit(PROMPT, 1, logprobs=0)  # would fit nowhere either: behind the late one
    box.until(lambda: all(it.is_over for it in (*first, plain)))
    assert all(it.is_whole for it in (*first, plain))
    assert [it.row for it in (late, narrow)] == [None, None]
    assert box.core.handler.num_streams == 3
    worker.forget(first[0])
    box.until(lambda: late.is_over)
    assert late.logprobs == first[0].logprobs
    assert late.token_ids == undisturbed(late.admit).token_ids
    assert narrow.row is None
    worker.forget(late)
    box.until(lambda: narrow.is_over)


def test_one_that_is_larger_than_all_runs_alone(make_core) -> None:
    box = make_core(logprobs_gib=gib(BYTES // 2))
    worker = box.worker()
    held = [worker.admit(PROMPT, 20, logprobs=5) for _ in range(2)]
    box.until(lambda: held[0].is_over)
    assert held[1].row is None
    worker.forget(held[0])
    box.until(lambda: held[1].is_over)


def test_who_waits_for_room_counts_as_waiting(make_core) -> None:
    box = make_core(logprobs_gib=gib(BYTES), max_waiting=1, max_num_seqs=1)
    worker = box.worker()
    first = worker.admit(PROMPT, 20, logprobs=5)
    box.until(lambda: first.row is not None and len(first.token_ids) > 1)
    worker.admit(PROMPT, 20, logprobs=5)
    refused = worker.admit(PROMPT, 20)
    box.until(lambda: refused.fault is not None)
    assert refused.fault.code == "overloaded"


def test_who_waits_for_room_is_asked_for_again_after_an_attach(make_core) -> None:
    box = make_core(logprobs_gib=gib(BYTES))
    worker = box.worker()
    first, second = (worker.admit(PROMPT, 20, logprobs=5) for _ in range(2))
    box.until(lambda: first.is_over)
    assert second.row is None
    worker.hop.attach(time.monotonic())  # the first is over, and stated no more: it is forgotten
    box.until(lambda: second.is_over)
    assert second.logprobs == first.logprobs


def test_who_was_accepted_once_waits_for_nobody(make_core) -> None:
    """After a core's death who waited may be heard first."""
    box = make_core(logprobs_gib=gib(3 * BYTES // 2))
    worker = box.worker()
    first, second = (worker.admit(PROMPT, 20, logprobs=5) for _ in range(2))
    box.until(lambda: len(first.token_ids) > 3)
    box.kill()
    box.start()
    box.until(lambda: first.is_over and second.is_over)
    assert second.token_ids == first.token_ids
    worker.forget(first)
    late = [worker.admit(PROMPT, 20, logprobs=5, was_accepted=n > 0) for n in range(2)]
    box.until(lambda: late[1].is_over)
    assert late[0].row is None
    for held in (second, late[1]):
        worker.forget(held)
    box.until(lambda: late[0].is_over)


def test_who_is_taken_when_it_asks_again_is_not_held_any_longer() -> None:
    logprob_budget = LogprobBudget(1)
    held = PendingAdmissions(NoGrammars(), logprob_budget, Adapters())  # type: ignore[arg-type]
    first, second = registration(1, 0), with_fields(registration(2, 0), was_accepted=True)
    assert held.reserve(first)
    logprob_budget.open(0, first_bytes(first))
    assert not held.reserve(second)
    held.put(b"w", second)
    logprob_budget.close(0)
    assert held.reserve(second)  # said again, before anybody looked who is ready
    assert list(held.ready()) == []
    assert len(held) == 0


def test_short_answers_leave_room_for_many_though_they_might_have_been_long(make_core) -> None:
    """A promise is for what is there, not for max_tokens: each of these may have 8 MB."""
    box = make_core(logprobs_gib=gib(2**22), max_model_len=2**16, num_blocks=2**13)
    worker = box.worker()
    held = [worker.admit(PROMPT, 50_000, logprobs=20, seed=n) for n in range(40)]
    box.until(lambda: all(len(it.token_ids) > 4 for it in held))
    for it in held:
        worker.forget(it)
    box.until(lambda: box.core.handler.num_streams == 0)


def test_who_grows_where_there_is_no_room_waits_and_misses_nothing(make_core, undisturbed) -> None:
    box = make_core(logprobs_gib=gib(4 * BYTES), max_model_len=512)
    worker = box.worker()
    held = [worker.admit([5, 6, 7 + n], 200, logprobs=5) for n in range(4)]
    plain = worker.admit(PROMPT, 200)
    box.until(lambda: plain.is_over)
    box.until(lambda: any(it.is_over for it in held))  # all have a page: the first goes beyond
    done = set()
    while len(done) < len(held):
        box.until(lambda: any(it.is_over and it.row not in done for it in held))
        for it in held:
            if it.is_over and it.row not in done:
                done.add(it.row)
                worker.forget(it)
    assert all(it.is_whole for it in held)
    for it in held:
        alone = undisturbed(it.admit)
        assert (it.token_ids, it.logprobs) == (alone.token_ids, alone.logprobs)
