"""Replicas of two models behind one address: a loss among one model's is none to the other's."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.http_front import Raw, read_events
from tests.helpers.patience import Patience
from tests.helpers.routing import routing
from tests.helpers.stacks import spareless_stack

from slipstream import Client, Stack
from slipstream.cli.main import main
from slipstream.demo_model import MODEL_PATH

SIMULATED = f"simulated:step_ms=10,prefill_us=20,tokenizer={MODEL_PATH},mode="
MODES = {"one": "chain", "two": "playback"}  # whose texts differ
PROMPTS = [f"Chapter {n}: how names are bound, and where." for n in range(8)]
COMPLETIONS = "/v1/completions"


def body_of(model: str, prompt: str, **more: Any) -> dict[str, Any]:
    sampling = {"max_tokens": 600, "seed": 1, "ignore_eos": True}
    return {"model": model, "prompt": prompt, **sampling, **more}


@pytest.fixture(scope="module")
def stacks() -> Iterator[dict[str, list[Stack]]]:
    """Two replicas of the first model, one of the second."""
    with ExitStack() as opened:
        yield {
            name: [
                opened.enter_context(
                    spareless_stack(SIMULATED + MODES[name], served_model_name=name)
                )
                for _ in range(number)
            ]
            for name, number in (("one", 2), ("two", 1))
        }


def texts_at(stack: Stack, model: str) -> list[str]:
    """The answers to all prompts, without a front."""
    with stack.client() as client:
        given = body_of(model, "")
        del given["prompt"]
        return [output.text for output in client.generate_many(PROMPTS, **given)]


@pytest.mark.process
def test_a_replica_killed_under_load_moves_its_own_models_streams_alone(
    stacks: dict[str, list[Stack]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = ",".join([stack.address for name in stacks for stack in stacks[name]])
    plain = {
        (name, prompt): text
        for name in stacks
        for prompt, text in zip(PROMPTS, texts_at(stacks[name][-1], name), strict=True)
    }
    assert len(set(plain.values())) == len(plain)
    with ExitStack() as opened:
        _, port = opened.enter_context(routing(tmp_path, address))
        streams = {}
        for name, prompt in plain:
            raw = streams[name, prompt] = opened.enter_context(Raw(port))
            raw.post(COMPLETIONS, body_of(name, prompt, stream=True))
        begun = {}
        for each, raw in streams.items():
            assert raw.read_until(b"\r\n\r\n").startswith(b"HTTP/1.1 200")
            begun[each] = raw.read_chunk()
        lost, left = stacks["one"]
        assert moved(port) == 0
        os.kill(lost.pids["supervisor"], signal.SIGKILL)
        for each, raw in streams.items():
            text, _, is_whole = read_events(raw, begun[each])
            assert (text, is_whole) == (plain[each], True)
        patience = Patience()
        while not moved(port):
            patience.wait("a front tells its counters with its beats")
        assert moved(port) == moved(port, "one") <= len(PROMPTS)
        with Client(address) as client:
            assert [card.name for card in client.models] == ["one", "two"]
            for name in stacks:
                text = client.generate(PROMPTS[0], model=name, seed=1, max_tokens=9).text
                assert plain[name, PROMPTS[0]].startswith(text)
        assert main(["replicas", *address.split(",")]) == 0
        rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
        states = {row[-1]: (row[1], row[2]) for row in rows}
        assert states[left.address] == ("one", "serving")
        assert states[stacks["two"][0].address] == ("two", "serving")
        os.kill(left.pids["supervisor"], signal.SIGKILL)
        patience = Patience()
        while status(port, "/ready") == 200:
            patience.wait("a model without a replica")
        with Raw(port) as raw:
            raw.post(COMPLETIONS, body_of("two", PROMPTS[1]))
            assert raw.read().json["choices"][0]["text"] == plain["two", PROMPTS[1]]


def moved(port: int, model: str = "") -> float:
    """The streams that have changed their replica, of a model or of all."""
    with Raw(port) as raw:
        lines = raw.get("/metrics").body.decode().splitlines()
    return sum(
        float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith("slipstream:router_moves_total{") and f'model_name="{model}' in line
    )


def status(port: int, path: str) -> int:
    with Raw(port) as raw:
        return raw.get(path).status
