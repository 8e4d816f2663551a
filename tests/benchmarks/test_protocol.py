"""`slipstream bench protocol`: whole histories bring the worker what deltas bring."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.admits import admit_of

from slipstream.cli.main import main
from slipstream_ipc.columns import pack_u32, u32
from slipstream_ipc.history.logprob_log import LogprobLog, Logprobs
from slipstream_ipc.history.token_log import TokenLog
from slipstream_ipc.messages import Admitted, Frame, SamplingParams, Step
from slipstream_ipc.row_set import RowSet
from slipstream_ipc.transport.codec import worker_codec
from slipstream_lab.protocol.cumulative import Counted, OnlyNew, SentSteps, WholeHistories

COUNTS = st.lists(st.integers(0, 3), min_size=3, max_size=3)


class Core:
    """Histories of three streams, and the deltas that a core would send of them."""

    def __init__(self, num_logprobs):
        self.tokens, self.logprobs = TokenLog(), LogprobLog()
        self.num_logprobs = num_logprobs
        self.random = np.random.default_rng(5)
        self.lengths = np.zeros(3, np.int64)

    def admit(self, row, prompt_len):
        """Take a stream in; its registration."""
        prompt = np.arange(prompt_len, dtype=np.uint32)
        self.tokens.open(row)
        self.tokens.extend(row, prompt)
        if self.num_logprobs is not None:
            self.logprobs.open(row, self.num_logprobs, prompt_len)
        self.lengths[row] = prompt_len
        params = SamplingParams(logprobs=self.num_logprobs)
        return admit_of(bytes([row]) * 16, pack_u32(prompt), params, (), 0, 1000)

    def step(self, number, counts):
        """So many new tokens of each row; the Step that says so."""
        rows = np.flatnonzero(counts)
        for row in rows.tolist():
            for _ in range(counts[row]):
                self._sample(RowSet(np.array([row])))
        some = np.array(counts)[rows]
        starts, self.lengths = self.lengths[rows], self.lengths + np.array(counts)
        each_one = bool((some == 1).all())
        columns = None
        if self.num_logprobs is not None:
            columns = self.logprobs.columns(rows, starts, some)
        return Step(
            number,
            pack_u32(rows),
            pack_u32(self.tokens.gather(rows, starts, some)),
            b"" if each_one else pack_u32(some),
            b"" if each_one else pack_u32(starts),
            columns,
        )

    def _sample(self, row):
        self.tokens.append(row, self.random.integers(0, 1000, 1).astype(np.uint32))
        if self.num_logprobs is not None:
            width = 1 + self.num_logprobs
            values = self.random.random((1, width)).astype(np.float32)
            ids = self.random.integers(0, 1000, (1, width)).astype(np.uint32)
            ranks = np.ones(1, np.uint32)
            self.logprobs.append(row, Logprobs(values, ids, ranks), np.array([0]))


@given(st.lists(COUNTS, min_size=1, max_size=12), st.sampled_from([None, 0, 5]))
def test_a_worker_gets_the_same_steps(all_counts, num_logprobs):
    core = Core(num_logprobs)
    sender, receiver = WholeHistories(), OnlyNew()
    sender.histories = core.tokens, core.logprobs
    encode = worker_codec().encode  # what a worker would send
    for row in range(3):
        admit = core.admit(row, prompt_len=1 + 70 * row)
        sender.decode(encode(Frame(1, row + 1, 0, admit)))
        told = Frame(1, row + 1, 0, Admitted(admit.stream_id, row))
        assert receiver.decode(sender.encode(told)) == told
    for number, counts in enumerate(all_counts):
        if not any(counts):
            continue
        frame = Frame(1, number + 4, 2, core.step(number, counts))
        assert receiver.decode(sender.encode(frame)) == frame


def test_a_row_that_goes_to_another_stream_begins_anew():
    core = Core(None)
    sender, receiver = WholeHistories(), OnlyNew()
    sender.histories = core.tokens, core.logprobs
    for life in range(2):
        admit = core.admit(0, prompt_len=3)
        sender.decode(worker_codec().encode(Frame(1, 1, 0, admit)))
        receiver.decode(sender.encode(Frame(1, 1, 0, Admitted(admit.stream_id, 0))))
        for number in range(3 - life):
            frame = Frame(1, number + 2, 0, core.step(number, [1, 0, 0]))
            assert receiver.decode(sender.encode(frame)) == frame


def test_what_travels_is_the_whole_history():
    core = Core(None)
    whole, delta = WholeHistories(), Counted()
    whole.histories = core.tokens, core.logprobs
    admit = core.admit(0, prompt_len=5)
    whole.decode(worker_codec().encode(Frame(1, 1, 0, admit)))
    whole.encode(Frame(1, 1, 0, Admitted(admit.stream_id, 0)))
    for number in range(200):
        frame = Frame(1, number + 2, 0, core.step(number, [1, 0, 0]))
        sent = worker_codec().decode(whole.encode(frame)).body
        assert u32(sent.token_ids).tolist() == core.tokens.read(0, 5, 6 + number).tolist()
        delta.encode(frame)
    assert sum(whole.sent.num_tokens) == sum(delta.sent.num_tokens) == 200
    begin, end = whole.sent.sent_s[0], delta.sent.sent_s[-1]
    whole_bytes = whole.sent.bytes_per_token(begin, end)
    delta_bytes = delta.sent.bytes_per_token(begin, end)
    assert whole_bytes - delta_bytes == pytest.approx(4 * 99.5, rel=0.1)
    assert SentSteps([], [], []).bytes_per_token(begin, end) is None


@pytest.mark.parametrize("words", ["--batch 0", "--output-len 5000", "--step-ms 0", "--runs 0"])
def test_what_cannot_be_measured_is_refused(words, capsys):
    assert main(["bench", "protocol", *words.split()]) == 2
    assert f"{words.split()[0]}: got" in capsys.readouterr().err


def test_the_table_is_measured(tmp_path, capsys):
    rows_file, picture = tmp_path / "rows.json", tmp_path / "bars.png"
    words = "bench protocol --quick --batch 3 --output-len 40 --step-ms 2"
    assert main([*words.split(), "--json", str(rows_file), "--png", str(picture)]) == 0
    rows = {(row["transport"], row["logprobs"]): row for row in json.loads(rows_file.read_text())}
    assert len(rows) == 6
    for row in rows.values():
        assert row["completed_requests"] == 3
        assert row["output_tokens"] == 120
        assert row["core_cpu_us_per_token"] > 0
    for logprobs in ("off", "sampled", "top5"):
        delta, whole = (rows[way, logprobs] for way in ("delta", "cumulative"))
        assert whole["bytes_per_token"] > delta["bytes_per_token"] > 4
    assert picture.read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "simulated" in shown
    assert "p99 ITL, ms" in shown
