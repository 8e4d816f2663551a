"""`slipstream bench compare front`: which events count, and what is told of a real front."""

from __future__ import annotations

import json
import socket
import threading

import pytest
from tests.helpers.patience import PATIENCE_S

from slipstream.cli.main import main
from slipstream.errors import EngineError
from slipstream_lab.compare.event_reader import _read, read_streams
from slipstream_lab.compare.front import (
    VARIANTS,
    _bare,
    _chunk,
    _request,
    _stack,
    add_over_chat,
)

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b"9\r\ndata: x\n\n\r\n"
END = b"0\r\n\r\n"


class Played:
    """A poller and all of its sockets, which say what a test says: (descriptor, bytes) in turn."""

    def __init__(self, *said: tuple[int, bytes]) -> None:
        self._said = list(said)
        self.sockets = dict.fromkeys([fd for fd, _ in said], self)
        self.left: list[int] = []

    def poll(self, _timeout_s: float) -> list[tuple[int, int]]:
        return [(self._said[0][0], 1)] if self._said else []

    def recv(self, _size: int) -> bytes:
        return self._said.pop(0)[1]

    def unregister(self, fd: int) -> None:
        self.left.append(fd)


def test_events_count_while_all_streams_run():
    played = Played(
        (1, HEAD + EVENT),
        (1, EVENT),
        (2, HEAD),
        (2, EVENT),  # now all have begun
        (1, EVENT),
        (2, EVENT),
        (1, EVENT * 2),
        (1, EVENT + END),  # and now they do not all run any more
        (2, EVENT),
        (2, END),
    )
    readings = iter([1.0, 3.5])
    span = _read(played, played.sockets, lambda: {"one": next(readings)})
    assert span.num_events == 4
    assert span.num_bytes == 4 * len(EVENT)
    assert span.used == {"one": 2.5}
    assert played.left == [1, 2]


def test_streams_that_fall_silent_are_told():
    played = Played((1, HEAD + EVENT), (2, HEAD + EVENT))
    with pytest.raises(EngineError, match="2 streams were silent"):
        _read(played, played.sockets, dict)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 404 Not Found\r\n\r\n", "404 Not Found"),
        (HEAD + EVENT + END, "never ran all at once"),
    ],
)
def test_what_is_no_stream_is_told(answer, said):
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        one, _ = listener.accept()
        one.recv(100)
        one.sendall(answer)
        one.close()

    threading.Thread(target=run, daemon=True).start()
    with listener, pytest.raises(EngineError, match=said):
        read_streams(listener.getsockname(), [b"x"], dict)


def test_a_chunk_has_the_size_it_is_to_have():
    for size in (100, 187, 1000, 5000):
        assert abs(len(_chunk(size)) - size) <= 1


def test_bare_writes_cost_something():
    span = _bare(EVENT, 2.0, 4, 30)
    assert span.used["bare"] > 0
    assert 0 < span.num_events <= 4 * 30


def test_a_shape_is_compared_with_chat_of_the_same_load():
    costs = {
        ("chat", 8): 10.0,
        ("responses", 8): 12.0,
        ("messages", 64): 9.0,
        ("chat_call", 8): 20.0,
        ("messages_call", 8): 25.0,
        ("plain", 8): 7.0,
    }
    rows = [
        {"variant": variant, "streams": streams, "front_cpu_us_per_event": cost}
        for (variant, streams), cost in costs.items()
    ]
    add_over_chat(rows)
    assert [row.get("over_chat") for row in rows] == [1.0, 1.2, None, 1.0, 1.25, None]


DELTAS = {
    "chat": b'"delta":{"content":',
    "responses": b"event: response.output_text.delta",
    "messages": b'"type":"text_delta"',
    "chat_call": b'"function":{"arguments":',
    "responses_call": b"event: response.function_call_arguments.delta",
    "messages_call": b'"type":"input_json_delta"',
}


@pytest.mark.parametrize("variant", DELTAS)
def test_a_shapes_events_are_deltas_of_what_it_is_named_for(variant):
    with _stack(variant, 10.0, 1) as stack:
        host, port = stack.http_address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), PATIENCE_S) as one:
            one.sendall(_request(variant, 0, 60))
            answer = b""
            while not answer.endswith(END):
                data = one.recv(2**16)
                assert data
                answer += data
    num_deltas = answer.count(DELTAS[variant])
    assert num_deltas > 2  # a late reader gets several tokens in one
    assert answer.count(b"\n\n") - num_deltas <= 10  # what begins and ends an answer


def test_a_front_is_measured(tmp_path, capsys):
    file, picture = tmp_path / "rows.json", tmp_path / "bars.png"
    words = ["bench", "compare", "front", "--quick", "--streams", "3", "--events", "40"]
    words += ["--variants", ",".join(VARIANTS)]
    assert main([*words, "--json", str(file), "--png", str(picture)]) == 0
    rows = {row["variant"]: row for row in json.loads(file.read_text())}
    assert rows.keys() == set(VARIANTS)
    for row in rows.values():
        assert min(row["front_cpu_us_per_event"], row["bare_cpu_us_per_event"]) > 0
        assert row["events"] > 0
        assert row["tokens_per_event"] > 0.5
    assert rows["logprobs5"]["event_bytes"] > rows["resumable"]["event_bytes"] > 100
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "simulated" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", ["--streams 0", "--events 1", "--runs 0", "--variants none", "--variants plain,x"]
)
def test_what_cannot_be_measured_is_refused(words, capsys):
    assert main(["bench", "compare", "front", *words.split()]) == 2
    assert words.split()[0].removeprefix("--") in capsys.readouterr().err
