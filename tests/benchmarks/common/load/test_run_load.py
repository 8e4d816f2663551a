"""Datasets and arrivals of a load; the CPU time of a process tree."""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.processes import started

from slipstream.errors import BadRequestError
from slipstream_bench.common.load.datasets import as_words, random_requests, requests_from
from slipstream_bench.common.load.run_load import poisson_starts, run_load
from slipstream_bench.common.measures import RequestTimeline
from slipstream_bench.common.process_census import tree_cpu_s


@given(st.integers(1, 300), st.integers(1, 300), st.floats(0, 0.99), st.integers(2, 5000))
def test_random_requests_keep_their_ranges(input_len, output_len, ratio, vocab_size):
    requests = random_requests(
        20,
        input_len=input_len,
        output_len=output_len,
        range_ratio=ratio,
        vocab_size=vocab_size,
        random=np.random.default_rng(1),
    )
    for request in requests:
        for found, mean in ((len(request.prompt), input_len), (request.max_tokens, output_len)):
            assert max(1, math.floor(mean * (1 - ratio))) <= found <= math.ceil(mean * (1 + ratio))
        assert all(min(100, vocab_size // 2) <= one < vocab_size for one in request.prompt)
        assert len(request.text.split()) == len(request.prompt)


def test_lengths_reach_both_ends_of_their_range():
    requests = random_requests(
        500,
        input_len=10,
        output_len=4,
        range_ratio=0.5,
        vocab_size=1000,
        random=np.random.default_rng(0),
    )
    assert {len(request.prompt) for request in requests} == set(range(5, 16))
    assert {request.max_tokens for request in requests} == {2, 3, 4, 5, 6}


def test_words_are_the_same_for_the_same_ids():
    assert as_words([3, 4, 3]) == as_words([3, 4, 3])
    assert as_words([3, 4]) != as_words([4, 3])


def test_a_file_may_be_one_array(tmp_path):
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([{"id": "x", "conversations": [{"from": "human", "value": "Hi"}]}]))
    (request,) = requests_from(str(path), None, 17)
    assert (request.prompt, request.max_tokens) == ("Hi", 17)
    assert len(requests_from(str(path), 5, 17)) == 5


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "at least one request"),
        ("{", "JSON lines"),
        ('{"prompt": 5}', "documented form"),
        ('{"prompt": [1, -2]}', "documented form"),
        ('{"prompt": "x", "max_tokens": 0}', "documented form"),
        ('{"prompt": "x"}\n{"text": "y"}', "entry 2"),
        ('{"conversations": []}', "entry 1"),
    ],
)
def test_files_that_hold_something_else(tmp_path, content, said):
    path = tmp_path / "load.jsonl"
    path.write_text(content)
    with pytest.raises(BadRequestError, match=said):
        requests_from(str(path), None, 5)


def test_poisson_arrivals_have_their_rate():
    starts = poisson_starts(4000, 50.0, np.random.default_rng(3))
    gaps = np.diff(starts)
    assert starts[0] == 0
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.05)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.1)  # as exponential gaps have it
    assert starts == poisson_starts(4000, 50.0, np.random.default_rng(3))
    assert poisson_starts(3, math.inf, np.random.default_rng(3)) == [0, 0, 0]


def test_a_place_is_taken_when_it_is_free_and_results_keep_their_order():
    done = []

    async def load() -> list[RequestTimeline]:
        gates = [asyncio.Event() for _ in range(4)]
        running: set[int] = set()

        async def ask(index: int) -> RequestTimeline:
            running.add(index)
            assert len(running) <= 2
            if index == 0:
                gates[3].set()  # the third waits for its place
            else:
                await gates[3].wait()
            running.discard(index)
            return RequestTimeline(float(index))

        sends = [lambda index=index: ask(index) for index in range(3)]
        return await run_load(sends, [0.0] * 3, 2, done.append)

    assert [timeline.sent_s for timeline in asyncio.run(load())] == [0, 1, 2]
    assert len(done) == 3


def test_cpu_time_of_a_tree_counts_children_that_run_and_that_ended():
    before = tree_cpu_s(os.getpid())
    burn = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True); input()"
    burning = [sys.executable, "-c", burn]
    with started(burning, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        assert tree_cpu_s(os.getpid()) - before >= 0.18
        assert tree_cpu_s(child.pid) >= 0.18
        child.communicate(b"\n")
    assert tree_cpu_s(os.getpid()) - before >= 0.18
    with pytest.raises(BadRequestError, match="pid: got "):
        tree_cpu_s(child.pid)
