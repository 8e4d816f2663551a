"""Lost and doubled output: what users of the peers ran into, and what ours get in its place."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.helpers.scripted import EOS, Watch, catch_up, play, shown

from slipstream.delta_batch import DeltaBatch
from slipstream.outputs import Delta, join
from slipstream_ipc.columns import pack_u32, u32

PROMPT = (5, 6, 7)
OTHER = (5, 6, 8)
TEXT = (
    "A generator yields one value after the other; between two of them it stands still, and "
    "keeps its names, its place and whatever it was about to do."
)


@pytest.fixture(scope="module")
def answer(tokenizer) -> list[int]:
    """TEXT as tokens; all prefixes of it are text, too."""
    ids = tokenizer.encode(TEXT).ids
    assert len(ids) > 30
    return ids


@pytest.mark.parametrize("interval", ["auto", 1, 10, 100])
@pytest.mark.parametrize("late", ["nobody", "worker", "client", "link", "crowded"])
def test_first_token_is_never_missing_vllm_30866(
    make_stack, tokenizer, answer, interval, late
) -> None:
    """There the first delta of a stream came empty, and its text never came at all."""
    stack = play(make_stack, {PROMPT: answer, OTHER: answer}, stream_interval=interval)
    client = stack.client()
    watch = Watch(client)
    if late == "crowded":  # messages of another stream are under way, and nobody reads them
        other = client.submit(list(OTHER), max_tokens=400)
        stack.until(lambda: len(other.token_ids) > 2)
    it = client.submit(list(PROMPT), max_tokens=30)
    if late == "crowded":
        client.step()
        client.is_reading = False
        stack.until(lambda: stack.held["running"] == 2)
        stack.until(lambda: stack.held["running"] == 1)
        client.is_reading = True
    elif late != "nobody":
        stack.until(lambda: it.accepted > 0)
    if late == "worker":
        worker, stack.worker = stack.worker, None
        for _ in range(200):
            stack.step()
        stack.worker = worker
    if late == "client":
        client.is_reading = False
        stack.until(lambda: stack.core.scheduler.num_running == 0)
        client.is_reading = True
    if late == "link":
        client.hop.attach(stack.now())
    stack.until(lambda: it.is_over)
    first_text, first_ids = watch.of(it.submit.handle)[0]
    assert first_ids[0] == answer[0]
    assert first_text.startswith(tokenizer.decode(answer[:1]))
    if late in ("nobody", "client"):
        assert len(first_ids) < 30, "it did not wait for an interval"
    assert it.token_ids == answer[:30]
    assert it.text == tokenizer.decode(answer[:30])


@pytest.mark.parametrize("interval", [1, 5, 10])
@pytest.mark.parametrize("how", ["length", "eos", "stop", "abort"])
def test_an_interval_loses_no_tail_vllm_31501_41691(
    make_stack, tokenizer, answer, interval, how
) -> None:
    """There what was buffered when a stream ended between two intervals was never sent."""
    lengths = range(1, 2 * 10 + 3)
    prompts = {n: (5, 6, 7, 100 + n) for n in lengths}
    last = {"eos": [EOS], "stop": tokenizer.encode("}").ids}.get(how, [])
    stack = play(make_stack, {prompts[n]: [*answer[:n], *last] for n in lengths})
    client = stack.client()
    params = {"stream_interval": interval, "stop": ("}",) if how == "stop" else ()}
    streams = {}
    for n in lengths:
        most = n if how == "length" else 400
        streams[n] = client.submit(list(prompts[n]), max_tokens=most, **params)
    if how == "abort":
        stack.until(lambda: all(len(s.token_ids) > 0 for s in streams.values()))
        for it in streams.values():
            client.abort(it)
    stack.until(lambda: all(s.is_over for s in streams.values()))
    for n, it in streams.items():
        if how == "abort":
            made = [*answer[:n], *[92] * 400][: it.end.num_tokens]
            assert it.token_ids == made, "all that was made has come"
            assert it.text == tokenizer.decode(made)
        else:
            kept = [*answer[:n], *(last if how == "eos" else [])]
            assert it.text == tokenizer.decode(answer[:n])
            assert it.token_ids == kept
            assert it.end.num_tokens == len(kept)
            # the first token, every interval-th one behind it, the end
            assert it.num_deltas <= 2 + n // interval


def test_streams_of_several_intervals_share_a_stack(make_stack, tokenizer, answer) -> None:
    """vLLM tests its per-request interval; here each keeps its own, also in one message."""
    intervals = (1, 5, 10, 1000)
    stack = play(make_stack, {(*PROMPT, i): answer for i in intervals})
    client = stack.client()
    streams = {i: client.submit([*PROMPT, i], max_tokens=30, stream_interval=i) for i in intervals}
    stack.until(lambda: all(s.is_over for s in streams.values()))
    for interval, it in streams.items():
        assert it.token_ids == answer[:30]
        assert it.num_deltas <= 2 + 29 // interval
    assert streams[1].num_deltas >= streams[10].num_deltas >= streams[1000].num_deltas
    assert streams[1].num_deltas > 3


@pytest.mark.parametrize("num_logprobs", [0, 5])
def test_a_delta_without_tokens_carries_no_logprobs_vllm_37037(
    make_stack, answer, num_logprobs
) -> None:
    """There `logprobs[-0:]` of a delta without tokens was the whole history, once more."""
    stack = play(make_stack, {PROMPT: answer})
    client = stack.client()
    watch = Watch(client)
    it = client.submit(list(PROMPT), max_tokens=400, logprobs=num_logprobs)
    stack.until(lambda: len(it.token_ids) > 20)
    core, stack.core = stack.core, None  # nothing more is made, and all that was arrives
    for _ in range(50):
        stack.step()
    client.abort(it)
    stack.until(lambda: it.is_over)
    stack.core = core
    last = watch.messages[-1]
    assert [ids for _, ids in watch.of(it.submit.handle)][-1] == [], "the end came alone"
    assert last.logprobs is None or last.logprobs.values == last.logprobs.ranks == b""
    assert Delta(last.texts[0], DeltaBatch(last, {}), 0).logprobs in (None, [])
    assert len(it.ranks) == len(it.token_ids) == it.end.num_tokens


@pytest.mark.parametrize("how", ["each", "interval", "slow reader", "replay"])
def test_logprobs_are_deltas_as_ids_are_sglang_21583(make_stack, answer, how) -> None:
    """There ids came as deltas, and beside them the log-probabilities of all tokens so far."""
    stack = play(make_stack, {PROMPT: answer})
    client = stack.client()
    watch = Watch(client)
    interval = 7 if how == "interval" else 1
    it = client.submit(list(PROMPT), max_tokens=60, logprobs=3, stream_interval=interval)
    stack.until(lambda: len(it.token_ids) > 10)
    if how == "slow reader":
        client.is_reading = False
        stack.until(lambda: stack.core.scheduler.num_running == 0)
        client.is_reading = True
    if how == "replay":
        stack.kill_worker()
        stack.start_worker()
    stack.until(lambda: it.is_over)
    deltas = [Delta(m.texts[0], DeltaBatch(m, {}), 0) for m in watch.messages]
    assert sum(delta.num_tokens for delta in deltas) == 60
    assert how != "slow reader" or max(delta.num_tokens for delta in deltas) > 1
    for delta in deltas:
        own = [next(iter(candidates)) for candidates in delta.logprobs]
        assert own == delta.token_ids, "each token has its own, and none has another's"
    whole = join(deltas)
    assert [next(iter(candidates)) for candidates in whole.logprobs] == it.token_ids


def test_logprobs_of_every_width_in_one_batch(make_stack, answer) -> None:
    """vLLM tests a matrix of sample log-probabilities, one request at a time; here all at once."""
    widths = [None, 0, 1, 5, 20]
    ends = [{"max_tokens": 25}, {"max_tokens": 60, "stop": ("still",)}]
    cases = [(width, end) for width in widths for end in ends]
    stack = play(make_stack, {(*PROMPT, n): answer for n in range(len(cases))})
    client = stack.client()
    watch = Watch(client)
    streams = [
        client.submit([*PROMPT, n], logprobs=width, **end) for n, (width, end) in enumerate(cases)
    ]
    stack.until(lambda: all(s.is_over for s in streams))
    found: list[list[dict]] = [[] for _ in cases]
    for message in watch.messages:
        batch = DeltaBatch(message, {})
        for entry, handle in enumerate(u32(message.handles).tolist()):
            found[handle] += batch.logprobs(entry, 0) or []
    for (width, _), it, candidates in zip(cases, streams, found, strict=True):
        if width is None:
            assert candidates == []
            continue
        assert len(candidates) == len(it.token_ids) == it.end.num_tokens
        for token_id, of_token in zip(it.token_ids, candidates, strict=True):
            # the sampled one is the likeliest of the k, too: then it is there once
            assert list(of_token) == list(range(token_id, token_id + max(width, 1)))


@pytest.mark.parametrize("num_steps", [*range(0, 30, 3), 60])
@pytest.mark.parametrize("what", ["link", "worker", "abort"])
def test_the_end_is_said_once_lmdeploy_4833(make_stack, answer, what, num_steps) -> None:
    """There the last output was repeated, with its text, when the end was already out."""
    stack = play(make_stack, {PROMPT: [*answer[:12], EOS]})
    client = stack.client()
    watch = Watch(client)
    it = client.submit(list(PROMPT), max_tokens=40)
    stack.until(lambda: len(it.token_ids) > 5)
    for _ in range(num_steps):
        stack.step()
    if what == "link":
        client.hop.attach(stack.now())
    elif what == "worker":
        stack.kill_worker()
        stack.start_worker()
    else:
        client.abort(it)
    stack.until(lambda: it.is_over)
    for _ in range(30):  # whatever would come behind it
        stack.step()
    assert watch.num_ends(it.submit.handle) == 1
    if what != "abort" or it.end.reason != "abort":
        assert it.text == TEXT[: len(it.text)]
        assert it.token_ids == [*answer[:12], EOS]


@pytest.mark.parametrize("how", ["kept", "forgotten"])
def test_reused_id_leaks_no_old_text_sglang_12205(make_stack, tokenizer, answer, how) -> None:
    """There the detokeniser kept what it knew of an id, and the next request of that id began
    with the tail of the last one."""
    grace_s = 1000.0 if how == "kept" else 0.0
    stack = play(make_stack, {PROMPT: answer, OTHER: answer[10:]}, grace_s=grace_s)
    client = stack.client()
    first = client.submit(list(PROMPT), max_tokens=20)
    stack.until(lambda: first.is_over)
    if how == "forgotten":
        stack.until(stack.holds_nothing)
    again = client.send_submit(replace(first.submit, handle=7))
    other = client.send_submit(replace(first.submit, handle=8, token_ids=pack_u32(OTHER)))
    stack.until(lambda: again.is_over and other.is_over)
    if how == "kept":  # it is the same stream: its text once more, from the beginning
        assert (again.text, again.token_ids) == (first.text, first.token_ids)
        assert other.fault.code == "conflict"
    else:
        assert (again.text, again.fault.code) == ("", "unknown_stream")
        assert other.fault.code == "unknown_stream"
    assert (other.text, other.token_ids) == ("", [])
    renewed = client.submit(list(OTHER), max_tokens=20)
    stack.until(lambda: renewed.is_over)
    assert renewed.text == tokenizer.decode(answer[10:30])


def test_the_place_of_an_ended_stream_is_clean_for_the_next_one_sglang_12205(
    make_stack, tokenizer
) -> None:
    """The same leak by another way: the row, the line, the handle and the label of a stream that
    ended inside a character are the next one's."""
    half = tokenizer.encode("😀").ids[:2]
    whole = tokenizer.encode("é").ids
    answers = {(5,): [50, *half], (6,): [*whole, 51]}
    stack = play(make_stack, answers, max_num_seqs=1, grace_s=0.0)
    client = stack.client()
    for _ in range(3):
        rows, lines = [], []
        for prompt, num, text in ((5, 3, tokenizer.decode([50]) + "\ufffd"), (6, 2, "é")):
            it = client.submit([prompt], max_tokens=num, stop=("zz",) if prompt == 5 else ())
            stack.until(lambda it=it: it.accepted > 0)
            stream = stack.worker.streams.get(it.stream_id)
            rows.append(stream.core_row)
            lines.append(stream.worker_row)
            stack.until(lambda it=it: it.is_over)
            assert it.text == text
            client.streams.pop(it.submit.handle)  # its handle is free
            stack.until(stack.holds_nothing)
        assert len(set(rows)) == len(set(lines)) == 1, "they did have the same place"


@pytest.mark.parametrize("interval", ["auto", 1])
def test_a_reader_that_lags_loses_no_field_lmdeploy_4054(
    make_stack, tokenizer, answer, interval
) -> None:
    """There one slot held the latest output of a stream: deltas that were not read in time, and
    every field that nobody had thought of merging, were gone."""
    stop = "<END>"
    long = answer * 3
    answers = {PROMPT: [*long, *tokenizer.encode(stop).ids]}
    stack = play(make_stack, answers, stream_interval=interval)
    client = stack.client()
    watch = Watch(client)
    it = client.submit(list(PROMPT), max_tokens=400, logprobs=2, stop=(stop,))
    stack.until(lambda: len(it.token_ids) > 2)
    client.is_reading = False
    before = len(watch.messages)
    stack.until(lambda: stack.core.scheduler.num_running == 0)
    client.is_reading = True
    stack.until(lambda: it.is_over)
    assert it.text == tokenizer.decode(long)
    assert (it.end.reason, it.end.stop_reason) == ("stop", stop)
    assert it.token_ids == long
    assert len(it.ranks) == it.end.num_tokens == len(long)
    merged = [len(ids) for _, ids in watch.of(it.submit.handle)[before:]]
    assert len(merged) <= 17, "a window of 16, and what was merged behind it"


def test_preemption_with_output_in_flight_vllm(make_stack, expected, outcome) -> None:
    """vLLM tests it; here what was computed anew is neither sent again nor left out."""
    prompts = [
        f"{n}. Who gives way to others comes back, and says no word twice." for n in "ab"
    ] * 4
    params = {"max_tokens": 120, "logprobs": 1, "stream_interval": 3}
    plain = expected(prompts, **params)
    stack = make_stack(num_blocks=40)
    client = stack.client()
    streams = [client.submit(p, **params) for p in prompts]
    stack.until(lambda: all(s.is_over for s in streams))
    assert stack.core.scheduler.num_preemptions > 3
    assert outcome(streams) == outcome(plain)
    assert [s.ranks for s in streams] == [s.ranks for s in plain]


def test_tokens_that_come_at_once_are_shown_once(make_stack, answer) -> None:
    """Message loss and doubling, which vLLM has no test of: here a worker falls behind, and the
    reader attaches anew in the middle of what comes then."""
    stack = play(make_stack, {PROMPT: answer})
    client = stack.client()
    it = client.submit(list(PROMPT), max_tokens=60)
    stack.until(lambda: len(it.token_ids) > 3)
    assert len(catch_up(stack, it, 45)) > 10
    client.hop.attach(stack.now())
    states = shown(it, stack.until)
    assert it.token_ids == [*answer, *[92] * 60][:60]
    assert [num for _, num in states] == sorted(num for _, num in states)
