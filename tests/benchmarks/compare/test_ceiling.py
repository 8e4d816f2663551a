"""`slipstream bench compare ceiling`: whole answers count, others are refused, rows compare."""

from __future__ import annotations

import json
import socket
import threading

import pytest

from slipstream.cli.main import main
from slipstream.errors import EngineError
from slipstream_lab.compare.ceiling import _part_of, with_ratios
from slipstream_lab.compare.closed_loop import run_closed_loop
from slipstream_lab.peers import peer_process

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _answer(num_tokens: int) -> list[bytes]:
    events = [b'data: {"text":"a"}\n\n', b'data: {"text":"bc"}\n\n']
    usage = b'data: {"usage":{"completion_tokens":%d}}\n\n' % num_tokens
    chunks = [*map(_chunk, events), _chunk(usage), _chunk(b"data: [DONE]\n\n"), b"0\r\n\r\n"]
    return [HEAD, *chunks]


@pytest.fixture
def serve():
    """Answers every request on every connection with the given pieces, one `send` each."""
    server = socket.create_server(("127.0.0.1", 0))

    def answer(connection: socket.socket, pieces: list[bytes]) -> None:
        with connection:
            while connection.recv(65536):
                for piece in pieces:
                    connection.sendall(piece)

    def accept(pieces: list[bytes]) -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection, pieces), daemon=True).start()

    def start(pieces: list[bytes]) -> tuple[str, int]:
        threading.Thread(target=accept, args=(pieces,), daemon=True).start()
        return server.getsockname()

    yield start
    server.shutdown(socket.SHUT_RDWR)
    server.close()


def _cpu() -> dict[str, float]:
    return {"part": 1.0}


def test_every_request_is_answered_once(serve):
    address = serve(_answer(7))
    result = run_closed_loop(address, [b"GET"] * 5, 2, 7, _cpu)
    assert len(result.ttfts_s) == 5
    assert result.num_events == 5 * 4
    assert result.used == {"part": 0.0}
    assert result.wall_s >= max(result.ttfts_s) > 0


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        (_answer(6), "completion_tokens"),
        ([b"HTTP/1.1 503 Busy\r\n\r\n"], "503"),
    ],
)
def test_an_answer_that_is_not_whole_is_refused(serve, pieces, said):
    with pytest.raises(EngineError, match=said):
        run_closed_loop(serve(pieces), [b"GET"], 1, 7, _cpu)


def test_processes_belong_to_parts():
    names = ("http", "http-3", "worker", "worker-1", "core", "tokenizer")
    assert [*map(_part_of, names)] == ["front", "front", "worker", "worker", "core", "other"]


def test_ratios_are_those_of_the_same_point():
    def row(engine: str, streams: int, rate: float) -> dict[str, object]:
        rates = {"tokens_per_core_s": rate, "text_tokens_per_core_s": 2 * rate}
        return {"engine": engine, "streams": streams, "fronts": 1} | rates

    ours, alone, *_ = with_ratios(
        [
            row("slipstream", 8, 400),
            row("slipstream", 16, 300),
            row("vllm", 8, 100),
            row("vllm_without_stats", 8, 200),
        ]
    )
    assert (ours["ratio_to_vllm"], ours["text_ratio_to_vllm"]) == (4, 4)
    assert "ratio_to_vllm" not in alone


def test_what_cannot_be_is_refused(capsys):
    for words, said in (
        (["--streams", "0"], "streams"),
        (["--fronts", "x"], "fronts"),
        (["--against", "vllm"], "--vllm-python"),
    ):
        assert main(["bench", "compare", "ceiling", "--quick", *words]) == 2
        assert said in capsys.readouterr().err


def test_the_mock_executor_is_there():
    assert (peer_process.FOLDER / "vllm_mock_executor.py").is_file()


def test_the_command_tells_a_row_for_each_point(tmp_path, capsys):
    file = tmp_path / "rows.json"
    words = ["--quick", "--streams", "4", "--fronts", "1,2", "--output-len", "16"]
    words += ["--output-workers", "1,2"]
    assert main(["bench", "compare", "ceiling", *words, "--json", str(file)]) == 0
    rows = json.loads(file.read_text())
    assert [(row["fronts"], row["workers"]) for row in rows] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    for row in rows:
        assert row["num_requests"] == 8
        assert row["tokens_per_core_s"] > 0
        assert row["tokens_per_event"] >= 1
        assert min(row[f"{part}_tokens_per_core_s"] for part in ("front", "worker", "core")) > 0
    assert "tokens_per_core_s" in capsys.readouterr().out
