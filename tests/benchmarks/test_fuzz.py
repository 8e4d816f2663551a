"""The fuzzer's short form; `slipstream bench fuzz` is the long one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from slipstream.cli.main import main
from slipstream_verify.fuzz import fuzz as fuzz_command
from slipstream_verify.fuzz import fuzz_stack
from slipstream_verify.fuzz.attacker import KINDS
from slipstream_verify.fuzz.fuzz_run import FuzzFailed, fuzz
from slipstream_verify.fuzz.hostile_client import HostileClient
from slipstream_verify.fuzz.hostile_worker import HostileWorker
from slipstream_worker.streams.registration import Submission

MESSAGES = 20_000
MIB = 2**20


def test_twenty_thousand_messages_harm_nobody() -> None:
    result = fuzz(MESSAGES, seed=1)
    assert result.messages == MESSAGES
    assert result.errors == ()
    assert result.differences == ()
    assert result.identical == result.total > 0
    assert not any(result.held.values()), result.held
    assert result.rss_end < result.rss_start + 100 * MIB
    assert {kind for kind in KINDS if kind != "oversized"} <= set(result.by_kind)
    # they were not just turned away at the door
    assert result.admitted > MESSAGES / 200
    assert result.refused > MESSAGES / 20
    assert result.is_good


def test_the_command_tells_and_writes_the_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "fuzz.json"
    options = ["--messages", "3000", "--seed", "2", "--json", str(file)]
    assert main(["bench", "fuzz", *options]) == 0
    told = json.loads(file.read_text())
    assert (told["messages"], told["seed"], told["num_errors"]) == (3000, 2, 0)
    assert told["identical"] == told["total"] > 0
    shown = capsys.readouterr().out
    assert "3,000 messages" in shown
    assert f"{told['total']} of {told['total']} identical" in shown


def test_a_long_run_goes_on_where_it_was_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In parts, each with a seed of its own; the file has those that are done."""
    monkeypatch.setattr(fuzz_command, "_PART", 1000)
    file = tmp_path / "fuzz.json"
    options = ["bench", "fuzz", "--messages", "2500", "--seed", "3", "--json", str(file)]
    seeds: list[int] = []

    def ended_in_the_second_part(num: int, seed: int, on_progress: Callable[[int], object]) -> Any:
        if len(seeds) == 1:
            raise KeyboardInterrupt
        seeds.append(seed)
        return fuzz(num, seed, on_progress)

    monkeypatch.setattr(fuzz_command, "fuzz", ended_in_the_second_part)
    assert main(options) != 0
    begun = json.loads(file.read_text())
    assert (begun["messages"], begun["wanted"], begun["num_parts"]) == (1000, 2500, 1)

    def going_on(num: int, seed: int, on_progress: Callable[[int], object]) -> Any:
        seeds.append(seed)
        return fuzz(num, seed, on_progress)

    monkeypatch.setattr(fuzz_command, "fuzz", going_on)
    assert main(options) == 0
    done = json.loads(file.read_text())
    assert (done["messages"], done["num_parts"], len(set(seeds)), seeds[0]) == (2500, 3, 3, 3)
    assert sum(done["by_kind"].values()) == 2500
    assert done["commits"]
    assert done["identical"] == done["total"] > begun["total"]
    assert main(options) == 0  # all of it is there
    assert len(seeds) == 3
    assert "2,500 messages" in capsys.readouterr().out


def test_an_error_that_the_worker_survives_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(submit: object, *client: bytes, **options: bool) -> object:
        if ErrorOnce.is_due():
            raise KeyError("made up")
        return Submission(submit, *client, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("slipstream_worker.lifecycle.client_messages.Submission", failing)
    ErrorOnce.num = 0
    assert main(["bench", "fuzz", "--messages", "3000", "--seed", "2"]) == 1
    shown = capsys.readouterr().out
    assert "internal errors: 1;" in shown
    assert "KeyError: 'made up'" in shown


class ErrorOnce:
    """The hundredth submission: none of the honest client's first ones."""

    num = 0

    @classmethod
    def is_due(cls) -> bool:
        cls.num += 1
        return cls.num == 100


def test_a_loop_that_dies_is_told_with_its_last_messages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    turn = fuzz_stack.FuzzStack.turn
    num_turns: dict[str, int] = {}  # by stack: the one without attackers comes first

    def dying(self: fuzz_stack.FuzzStack) -> None:
        num = num_turns[self.core_address] = num_turns.get(self.core_address, 0) + 1
        if len(num_turns) > 1 and num > 50:
            raise ZeroDivisionError("made up")
        turn(self)

    monkeypatch.setattr(fuzz_stack.FuzzStack, "turn", dying)
    with pytest.raises(FuzzFailed, match="ZeroDivisionError: made up") as caught:
        fuzz(MESSAGES, seed=3)
    file = Path(str(caught.value).rpartition(" in ")[2].rstrip(")"))
    told = file.read_text()
    assert "Traceback" in told
    assert len(told.splitlines()) > 300
    file.unlink()


def test_what_is_said_follows_from_the_seed() -> None:
    def said() -> list[object]:
        shared: list[bytes] = []
        client = HostileClient(Random(5), shared, 4096)
        worker = HostileWorker(Random(5), 4096)
        return [*(client.body() for _ in range(500)), *(worker.body() for _ in range(500))]

    assert said() == said()
