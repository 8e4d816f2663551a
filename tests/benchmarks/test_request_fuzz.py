"""Whole requests that ask for as much as they may; `slipstream bench fuzz --requests` is longer."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path

import msgspec
import pytest

from slipstream.cli.main import main
from slipstream_bench.fuzz import request_run
from slipstream_bench.fuzz.hostile_requests import KINDS, MOST_ANSWERS, Bounds, hostile_request
from slipstream_bench.fuzz.request_run import (
    MOST_STEPS,
    RequestFuzzResult,
    fuzz_requests,
    own_bytes,
)
from slipstream_ipc.errors import BadRequest
from slipstream_ipc.validation.sampling_params import check_params

MIB = 2**20
BOUNDS = Bounds(4096, 512)


def test_requests_follow_from_seed_and_number_and_most_of_them_are_allowed() -> None:
    requests = [hostile_request(3, index, BOUNDS) for index in range(300)]
    assert requests == [hostile_request(3, index, BOUNDS) for index in range(300)]
    assert requests != [hostile_request(4, index, BOUNDS) for index in range(300)]
    assert {kind for request in requests for kind in request.kinds} == set(KINDS)
    num_refused = 0
    for request in requests:
        try:
            check_params(request.params)
        except BadRequest:
            num_refused += 1
    assert 0 < num_refused < len(requests) / 3


def test_most_grammars_are_followed_for_a_few_tokens_and_some_for_long() -> None:
    requests = [hostile_request(3, index, BOUNDS) for index in range(600)]
    kinds = {"regex", "schema", "choice", "grammar"}
    given = [each for each in requests if kinds & set(each.kinds)]
    long = [
        each
        for each in given
        if each.answers > 2 or each.params.max_tokens is None or each.params.max_tokens > 4
    ]
    assert kinds <= {kind for each in long for kind in each.kinds}
    assert kinds <= {kind for each in given if each not in long for kind in each.kinds}
    assert len(given) / 20 < len(long) < len(given) / 6
    assert {each.answers for each in long} >= {1, 2, MOST_ANSWERS}
    assert None in {each.params.max_tokens for each in long}


def test_memory_is_told_without_what_the_allocator_keeps() -> None:
    """Much that was freed beneath a little that was not."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.free.argtypes = (ctypes.c_void_p,)
    before = own_bytes()
    blocks = [libc.malloc(1024) for _ in range(64 * 1024)]
    for block in blocks:
        ctypes.memset(block, 1, 1024)
    assert own_bytes() > before + 60 * MIB
    for block in blocks[:-1]:
        libc.free(block)
    assert own_bytes() < before + 16 * MIB
    libc.free(blocks[-1])


@pytest.mark.slow
def test_requests_that_ask_for_everything_harm_nobody() -> None:
    result = fuzz_requests(RequestFuzzResult(commit=None, seed=1, requests=150))
    assert result.differences == ()
    assert result.errors == ()
    assert result.identical == result.total > 0
    assert result.longest_wait <= MOST_STEPS
    assert not any(result.held.values()), result.held
    assert result.own_bytes[1] < result.own_bytes[0] + 64 * MIB
    assert set(result.by_kind) == set(KINDS)
    assert result.outcomes["length"] + result.outcomes["abort"] > 50, "they were all turned away"
    assert result.is_good


@pytest.mark.slow
def test_a_stream_that_is_passed_over_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_run, "MOST_STEPS", 0)
    monkeypatch.setattr(request_run, "_BATCHED", 32)  # tokens a step: prompts wait for each other
    result = fuzz_requests(RequestFuzzResult(commit=None, seed=1, requests=20))
    assert result.longest_wait > 0
    assert result.waited_for
    assert not result.is_good


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "requests.json"
    options = ["bench", "fuzz", "--seed", "5", "--json", str(file), "--requests"]
    monkeypatch.setattr(request_run, "_SAVE_EVERY", 5)
    turns = iter(range(10**9))

    def interrupted(_request: object, turn: object = request_run._HostileReaders.turn) -> None:
        turn(_request)  # type: ignore[operator]
        if file.exists() and next(turns) == 20:
            raise KeyboardInterrupt

    with monkeypatch.context() as stopping:
        stopping.setattr(request_run._HostileReaders, "turn", interrupted)
        assert main([*options, "24"]) == 1
    assert "interrupted" in capsys.readouterr().err
    part = json.loads(file.read_bytes())
    assert part["done"] < part["requests"] == 24
    assert main([*options, "24"]) == 0
    whole = msgspec.json.decode(file.read_bytes(), type=RequestFuzzResult)
    assert whole.done == 24
    assert whole.steps > part["steps"]
    assert whole.seconds > part["seconds"]
    told = capsys.readouterr().out
    assert "24 of 24 requests" in told
    assert f"commit {whole.commit}" in told
    assert main([*options, "24"]) == 0  # it is done: nothing is run again
    assert msgspec.json.decode(file.read_bytes(), type=RequestFuzzResult) == whole
    assert main([*options, "23"]) == 2
    assert main([*options, "30", "--seed", "6"]) == 2
    assert "this one is of seed 5" in capsys.readouterr().err
