"""What a client is sent of its streams, cut into messages."""

from __future__ import annotations

from slipstream_ipc.codec import MESSAGE_BUDGET_BYTES
from slipstream_ipc.columns import check_deltas, u32
from slipstream_ipc.messages import End
from slipstream_ipc.text_log import START
from slipstream_worker import deltas
from slipstream_worker.output import StreamOutput
from slipstream_worker.streams import Reader, Stage, Stream


def stream(units: list[str], *, interval: int = 1, width: int = 0) -> Stream:
    """A running stream with these units, one token to each."""
    output = StreamOutput(
        detokenizer=None,
        stops=None,
        stop_ids=frozenset(),
        eos_ids=frozenset(),
        min_tokens=0,
        max_tokens=1000,
        include_stop=False,
    )
    for n, text in enumerate(units, 1):
        output.token_ids.append(n)
        output.log.append(text, n)
    it = Stream(b"s" * 16, Stage.RUNNING, interval=interval, output=output, width=width)
    it.reader = Reader(b"client", 7, START)
    it.logprobs = [(bytes(4 * width), bytes(4 * width), n) for n in range(len(units))]
    return it


def end(it: Stream, reason: str = "stop") -> None:
    assert it.output is not None
    it.output.end = End(reason, len(it.output.token_ids))  # type: ignore[arg-type]


def move(it: Stream, num_units: int) -> None:
    assert it.output is not None
    assert it.reader is not None
    it.reader.cursor = it.output.log.find(
        sum(len(t) for t in it.output.log._texts[:num_units]), num_units
    )


def test_first_token_and_end_are_due_at_once_the_rest_by_interval() -> None:
    it = stream(["a"], interval=4)
    assert deltas.is_due(it)
    move(it, 1)
    assert not deltas.is_due(it)
    for n, due in ((2, False), (3, False), (4, False), (5, True)):
        it.output.token_ids.append(n)
        it.output.log.append("x", n)
        assert deltas.is_due(it) is due
    move(it, 5)
    assert not deltas.is_due(it)
    end(it)
    assert deltas.is_due(it)


def test_an_entry_carries_what_lies_behind_the_cursor() -> None:
    it = stream(["a", "", "bc"], width=2)
    move(it, 1)
    end(it)
    message, sent = deltas.build([it])
    check_deltas(message)
    assert message.texts == ["bc"]
    assert u32(message.chars).tolist() == [1]
    assert u32(message.tokens).tolist() == [1]
    assert u32(message.counts).tolist() == [2]
    assert u32(message.token_ids).tolist() == [2, 3]
    assert [e.reason for e in message.ends] == ["stop"]
    assert message.logprobs is not None
    assert u32(message.logprobs.ranks).tolist() == [1, 2]
    assert sent[0].is_end
    assert sent[0].cursor == it.output.log.end


def test_one_wide_request_does_not_widen_all() -> None:
    message, _ = deltas.build([stream(["a"]), stream(["b"], width=3), stream(["c"], width=1)])
    check_deltas(message)
    assert message.logprobs is not None
    assert u32(message.logprobs.widths).tolist() == [0, 3, 1]
    assert len(message.logprobs.values) == 4 * (3 + 1)


def test_without_logprobs_there_are_no_columns() -> None:
    message, _ = deltas.build([stream(["a"]), stream(["b"])])
    assert message.logprobs is None
    assert message.counts == b""


def test_a_message_keeps_to_its_budget_and_the_end_comes_last() -> None:
    it = stream(["x" * 1000] * 3000)
    end(it)
    texts, num_messages = [], 0
    while True:
        message, sent = deltas.build([it])
        check_deltas(message)
        num_messages += 1
        texts += message.texts
        assert len(message.texts[0]) <= MESSAGE_BUDGET_BYTES
        it.reader.cursor = sent[0].cursor
        assert bool(message.ends) == sent[0].is_end
        if sent[0].is_end:
            break
    assert num_messages > 1
    assert "".join(texts) == "x" * 3_000_000


def test_streams_behind_the_budget_are_left_for_the_next_message() -> None:
    many = [stream(["y" * (MESSAGE_BUDGET_BYTES // 4)]) for _ in range(10)]
    _, sent = deltas.build(many)
    assert 1 <= len(sent) < 10


def test_urgent_are_first_tokens_and_ends_alone() -> None:
    it = stream(["a", "b"])
    assert deltas.is_urgent(it)
    move(it, 1)
    assert deltas.is_due(it)
    assert not deltas.is_urgent(it)
    end(it)
    assert deltas.is_urgent(it)
