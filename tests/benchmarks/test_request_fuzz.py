"""Whole requests that ask for as much as they may; `slipstream bench fuzz --requests` is longer."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from slipstream.cli.main import main
from slipstream_bench.common.provenance import commit
from slipstream_bench.common.report import write_result
from slipstream_ipc.errors import BadRequest
from slipstream_ipc.validation.sampling_params import check_params
from slipstream_verify.fuzz import fuzz as fuzz_command
from slipstream_verify.fuzz import request_run
from slipstream_verify.fuzz.hostile_requests import KINDS, MOST_ANSWERS, Bounds, hostile_request
from slipstream_verify.fuzz.request_run import (
    MOST_GROWTH_BYTES,
    MOST_STEPS,
    RequestFuzzResult,
    Sitting,
    fuzz_requests,
    own_bytes,
)

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


def test_requests_that_ask_for_everything_harm_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_run, "_PART", 100)
    *_, whole = sittings = list(fuzz_requests(1, 1000, 1300))
    assert [(each.begin, each.end) for each in sittings] == [
        (1000, 1100),
        (1000, 1200),
        (1000, 1300),
    ]
    assert whole.differences == ()
    assert whole.errors == ()
    assert whole.identical == whole.total > 0
    assert whole.longest_wait <= MOST_STEPS
    assert whole.held is not None
    assert not any(whole.held.values()), whole.held
    assert whole.own_bytes[1] < whole.own_bytes[0] + 64 * MIB
    assert set(whole.by_kind) == set(KINDS)
    assert whole.outcomes["length"] + whole.outcomes["abort"] > 100, "they were all turned away"
    assert whole.is_good


def test_a_stream_that_is_passed_over_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_run, "MOST_STEPS", 0)
    monkeypatch.setattr(request_run, "_BATCHED", 32)  # tokens a step: prompts wait for each other
    (sitting,) = fuzz_requests(1, 0, 20)
    assert sitting.longest_wait > 0
    assert sitting.waited_for
    assert not sitting.is_good


def test_what_makes_a_sitting_bad() -> None:
    good = Sitting(commit="a", begin=0, end=9, identical=3, total=3, own_bytes=(MIB, 2 * MIB))
    assert good.is_good
    for change in (
        {"identical": 2},
        {"total": 0, "identical": 0},
        {"longest_wait": MOST_STEPS + 1},
        {"num_errors": 1},
        {"held": {"blocks": 1}},
        {"own_bytes": (MIB, 2 * MIB + MOST_GROWTH_BYTES)},
    ):
        bad = msgspec.structs.replace(good, **change)
        assert not bad.is_good, change
        assert not RequestFuzzResult(seed=1, sittings=(bad, good)).is_good


def test_a_run_goes_on_behind_what_it_has_on_whatever_commit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "requests.json"

    def sit(commit: str, interrupted_at: int | None) -> int:
        def played(seed: int, begin: int, end: int) -> Iterator[Sitting]:
            for done in range(begin + 10, end + 1, 10):
                if done == interrupted_at:
                    raise KeyboardInterrupt
                num = done - begin
                yield Sitting(commit=commit, begin=begin, end=done, identical=num, total=num)

        monkeypatch.setattr(fuzz_command, "fuzz_requests", played)
        words = ["bench", "fuzz", "--seed", "5", "--json", str(file), "--requests", "100"]
        return main(words)

    def ranges() -> list[tuple[str | None, int, int]]:
        result = msgspec.json.decode(file.read_bytes(), type=RequestFuzzResult)
        return [(each.commit, each.begin, each.end) for each in result.sittings]

    assert sit("abc", interrupted_at=60) == 1
    assert "interrupted" in capsys.readouterr().err
    assert ranges() == [("abc", 0, 50)]
    assert sit("abd", interrupted_at=60) == 1
    assert ranges() == [("abc", 0, 50)]
    assert sit("abd", interrupted_at=80) == 1
    assert sit("abd", interrupted_at=None) == 0
    assert ranges() == [("abc", 0, 50), ("abd", 50, 70), ("abd", 70, 100)]
    told = capsys.readouterr().out
    assert "100 requests of seed 5" in told
    assert "100 of 100 identical" in told


def test_the_command_tells_and_writes_the_sittings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "requests.json"
    before = Sitting(commit="abc", begin=0, end=1000, identical=7, total=7)
    write_result(file, RequestFuzzResult(seed=5, sittings=(before,)))
    options = ["bench", "fuzz", "--seed", "5", "--json", str(file), "--requests"]
    assert main([*options, "1024"]) == 0
    whole = msgspec.json.decode(file.read_bytes(), type=RequestFuzzResult)
    assert whole.sittings[0] == before
    assert [(each.begin, each.end) for each in whole.sittings] == [(0, 1000), (1000, 1024)]
    assert whole.sittings[1].commit == commit()
    told = capsys.readouterr().out
    assert "1,024 requests" in told
    num = 7 + whole.sittings[1].total
    assert f"{num} of {num} identical" in told
    assert main([*options, "1024"]) == 0  # it is done: nothing is run again
    assert msgspec.json.decode(file.read_bytes(), type=RequestFuzzResult) == whole
    assert main([*options, "1023"]) == 2
    assert main([*options, "2000", "--seed", "6"]) == 2
    assert "1024 requests of seed 5" in capsys.readouterr().err
