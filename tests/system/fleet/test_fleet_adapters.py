"""Adapters are loaded and unloaded at all replicas of a fleet or none, whatever dies meanwhile."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.loras import ALL_LINEAR, Lora, save_lora, save_merged
from tests.helpers.mini_fleet import MiniFleet
from tests.helpers.stepped_client import Reading

from slipstream.client.connection.cluster import Cluster
from slipstream.client.connection.queries import new_change
from slipstream.client.streams.stream_state import StreamState
from slipstream.request.requests import checked_params, new_submit
from slipstream.request.served_models import find_model
from slipstream_core.config import LoraConfig
from slipstream_ipc.messages import AdapterChanged, ModelCard
from slipstream_lab.models import tiny_models

pytestmark = pytest.mark.process

LORAS = (Lora(ALL_LINEAR, 8, 16, seed=1), Lora(("q_proj", "v_proj"), 16, 32, seed=2))
PROMPTS = [[5 + 7 * row + 3 * at for at in range(4 + 9 * row)] for row in range(3)]
NUM_OUTPUTS = 30
COMPUTED: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": tiny_models.MAX_MODEL_LEN,
    "max_num_batched_tokens": 16,
    "block_size": 4,
    "num_blocks": 200,
    "threads": 1,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, two adapters, and the models that these are merged into."""
    folder = tmp_path_factory.mktemp("loras")
    (tiny,) = [each for each in tiny_models.ARCHITECTURES if each.name == "Llama"]
    tiny_models.save(tiny, folder / "base")
    for at, each in enumerate(LORAS):
        save_lora(each, folder / "base", folder / f"a{at}")
        save_merged(each, folder / "base", folder / f"merged{at}")
    return folder


def are_over(streams: list[Any]) -> bool:
    return all(each.is_over for each in streams)


class Fleet(MiniFleet):
    """Replicas that may load adapters."""

    def change(
        self,
        name: str,
        path: str = "",
        *,
        load_inplace: bool = False,
        client: Cluster | None = None,
    ) -> AdapterChanged:
        """Change adapters; steps until it is answered."""
        answer = self.begin(name, path, load_inplace=load_inplace, client=client)
        self.until(answer.done)
        changed: AdapterChanged = answer.result()
        return changed

    def begin(
        self,
        name: str,
        path: str = "",
        *,
        load_inplace: bool = False,
        client: Cluster | None = None,
    ) -> Future[Any]:
        answer: Future[Any] = Future()
        change = new_change(name, path, load_inplace=load_inplace)
        (client or self.session).ask(change, answer, self.now(), lambda command: command())
        return answer

    def begin_texts(self, name: str) -> list[Reading]:
        """Streams of an adapter as the first client's list has it; empty: of the base."""
        models = self.session.models
        model = find_model(models, name) if name else models[0]
        assert model is not None, name
        params = {"temperature": 0.0, "max_tokens": NUM_OUTPUTS, "ignore_eos": True}
        given = checked_params(None, {**params, "detokenize": False})
        return [
            self.start(StreamState(new_submit(prompt, given, model=model), wants_whole=False))
            for prompt in PROMPTS
        ]

    def said(self, name: str) -> list[list[int]]:
        readings = self.begin_texts(name)
        self.finish(readings)
        return [each.token_ids for each in readings]

    def has_read(self, readings: list[Reading], num_tokens: int) -> bool:
        for each in readings:
            each.take()
        return max(len(each.token_ids) for each in readings) >= num_tokens

    def listed(self, client: Cluster | None = None) -> list[str]:
        """The names that requests find."""
        (model,) = (client or self.session).models
        return [each.name for each in model.adapters]

    def cards(self) -> list[tuple[tuple[str, bytes], ...]]:
        """What each replica that is there serves."""
        cards = [it.worker.card for it in self.stacks if it.worker is not None]
        return [
            tuple(sorted((each.name, each.digest) for each in card.adapters))
            for card in cards
            if isinstance(card, ModelCard)
        ]

    def are_alike(self) -> bool:
        """True if all replicas are there, serve the same, and are done with all changes."""
        cards = self.cards()
        if len(cards) < len(self.stacks) or len(set(cards)) > 1:
            return False
        cores = [it.core for it in self.stacks if it.core is not None]
        records = {it.changes.records.all for it in cores}
        return len(cores) == len(self.stacks) and len(records) == 1


@pytest.fixture
def make_fleet(make_stack: Any, saved: Path, tmp_path: Path) -> Iterator[Callable[..., Fleet]]:
    torch.set_num_threads(1)
    fleets: list[Fleet] = []

    def make(num: int = 3, roots: dict[int, Path] | None = None) -> Fleet:
        """roots: of replicas that may load from elsewhere than the others."""
        stacks = []
        for at in range(num):
            own = tmp_path / f"stack-{at}"
            own.mkdir()
            root = (roots or {}).get(at, saved)
            lora = LoraConfig(max_rank=16, max_loras=4, is_updatable=True, roots=(str(root),))
            stacks.append(
                make_stack(
                    model=str(saved / "base"),
                    **COMPUTED,
                    max_num_seqs=6,
                    lora=lora,
                    runtime_dir=str(own),
                )
            )
        fleets.append(Fleet(stacks))
        fleets[-1].attach()
        return fleets[-1]

    yield make
    for fleet in fleets:
        fleet.close()


@pytest.fixture
def expected(make_stack: Any, saved: Path) -> dict[str, list[list[int]]]:
    """The texts of the base and of each merged model."""
    found = {}
    for name, model in {"": "base", "a0": "merged0", "a1": "merged1"}.items():
        stack = make_stack(
            model=str(saved / model),
            **COMPUTED,
        )
        params = {"max_tokens": NUM_OUTPUTS, "ignore_eos": True, "detokenize": False}
        client = stack.client()
        streams = [client.submit(prompt, **params) for prompt in PROMPTS]
        stack.until(partial(are_over, streams))
        found[name] = [it.token_ids for it in streams]
    return found


def test_a_change_reaches_all_replicas(
    make_fleet: Any, saved: Path, expected: dict[str, Any]
) -> None:
    """Each client of the fleet finds it, and any replica computes it."""
    fleet = make_fleet()
    other = fleet.client()
    fleet.until(lambda: len(other._moves.open_members()) == 3)
    assert fleet.change("x", str(saved / "a0")) == AdapterChanged(0)
    assert fleet.listed() == fleet.listed(other) == ["x"]
    readings = fleet.begin_texts("x")
    assert fleet.said("x") == expected["a0"]
    fleet.finish(readings)
    assert {each.token_ids == want for each, want in zip(readings, expected["a0"], strict=True)}
    running = fleet.begin_texts("x")
    fleet.until(lambda: fleet.has_read(running, 5))
    changed = fleet.change("x", str(saved / "a1"), load_inplace=True, client=other)
    assert (changed.fault, changed.num_streams) == (None, len(PROMPTS))
    assert fleet.said("x") == expected["a1"]
    fleet.finish(running)
    assert [each.token_ids for each in running] == expected["a0"]
    assert fleet.change("x").fault is None
    assert fleet.listed() == fleet.listed(other) == []
    assert fleet.cards() == [()] * 3
    assert fleet.change("x").why == "missing"


def test_none_changes_where_one_refuses(make_fleet: Any, saved: Path, tmp_path: Path) -> None:
    fleet = make_fleet(roots={1: tmp_path})
    refused = fleet.change("x", str(saved / "a0"))
    assert (refused.fault.code, refused.why) == ("bad_request", "forbidden")
    begin = f"no replica has changed anything, as {fleet.stacks[1].client_address}: "
    assert refused.fault.message.startswith(begin)
    assert fleet.cards() == [()] * 3
    assert fleet.listed() == []
    # by itself a replica may: the others come to have it, but for the one that may not
    client = fleet.stacks[0].client()
    number = client.send_change("x", str(saved / "a0"))
    fleet.until(lambda: number in client.changed)
    fleet.until(lambda: [len(card) for card in fleet.cards()] == [1, 0, 1])
    for _ in range(4):
        readings = fleet.begin_texts("x")
        assert fleet.where(readings[0]) in (0, 2)
        fleet.finish(readings)


def test_streams_go_on_with_their_version_at_another_replica(
    make_fleet: Any, saved: Path, expected: dict[str, Any]
) -> None:
    """Also where no name has it any more: of a replica that is lost just after."""
    fleet = make_fleet(2)
    for path in ("", str(saved / "a1")):
        assert fleet.change("x", str(saved / "a0"), load_inplace=True).fault is None
        readings = fleet.begin_texts("x")
        fleet.until(lambda readings=readings: fleet.has_read(readings, 1))
        assert fleet.change("x", path, load_inplace=True).fault is None
        lost = fleet.where(next(each for each in readings if not each.is_over))
        fleet.kill(lost)
        fleet.finish(readings)
        assert any(each.state.moves > 0 for each in readings)
        assert [each.token_ids for each in readings] == expected["a0"]
        fleet.start_again(lost)
        fleet.until(lambda: len(fleet.attached) == 2)
        fleet.until(fleet.are_alike)


def test_one_that_joins_later_serves_them(
    make_fleet: Any, saved: Path, expected: dict[str, Any]
) -> None:
    """And forgets what was forgotten while it was away, which it has as it started."""
    fleet = make_fleet()
    assert fleet.change("a0", str(saved / "a0")).fault is None
    fleet.kill(2)
    fleet.until(lambda: len(fleet.attached) == 2)
    changed = fleet.change("a1", str(saved / "a1"))
    assert (changed.fault, changed.warning) == (None, "1 replica is away, and told later")
    assert fleet.change("a0").fault is None
    fleet.stacks[2].start_core()  # which still knows of the first change
    fleet.stacks[2].start_worker()
    fleet.until(fleet.are_alike)
    assert fleet.listed() == ["a1"]
    for lost in (0, 1):
        fleet.kill(lost)
    fleet.until(lambda: fleet.attached == [2])
    assert fleet.said("a1") == expected["a1"]


@pytest.mark.parametrize("seed", range(8))
def test_processes_die_between_the_stages(
    make_fleet: Any, saved: Path, expected: dict[str, Any], seed: int
) -> None:
    """At any step of a change: it reaches all that are there or come back, or none."""
    rng = random.Random(seed)
    fleet = make_fleet()
    assert fleet.change("x", str(saved / "a0")).fault is None
    running = fleet.begin_texts("x")
    fleet.until(lambda: all(each.state.prompt_ids is not None for each in running))
    for at in range(3):
        path, is_load = str(saved / f"a{(at + 1) % 2}"), rng.random() < 0.7
        answer = fleet.begin("x", path if is_load else "", load_inplace=True)
        for _ in range(rng.randrange(14)):
            fleet.step()
        stack = fleet.stacks[rng.randrange(3)]
        killed = rng.choice([["core"], ["worker"], ["core", "worker"]])
        for which in killed:
            getattr(stack, f"kill_{which}")()
        if len(killed) == 2 and rng.random() < 0.5:  # a stack of its own follows, later
            stack._core_ended_s = 0.0
            stack._worker_settings["stack_incarnation"] = at + 1
            fleet.until(lambda: len(fleet.attached) == 2)
        for _ in range(rng.randrange(4)):
            fleet.step()
        for which in killed:
            getattr(stack, f"start_{which}")()
        fleet.until(answer.done)
        changed = answer.result()
        fleet.until(fleet.are_alike)
        has_x = [dict(card).get("x") for card in fleet.cards()]
        if changed.fault is None:
            assert set(map(bool, has_x)) == {is_load}
        if changed.fault is None and is_load:
            assert fleet.said("x") == expected[f"a{(at + 1) % 2}"]
    fleet.finish(running)
    for each, want in zip(running, expected["a0"], strict=True):
        assert each.token_ids == want
