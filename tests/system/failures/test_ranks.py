"""A core of two ranks: what it says is what one says, and it survives what happens to either.

The model's forward is code beside the weights here, so that a test can have it raise, or hang, on
one rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from tests.helpers.patience import PATIENCE_S, Patience
from tests.helpers.rank_streams import PROMPTS, core_ends, once_under_way, texts
from tests.helpers.stacks import spareless_stack

from slipstream import Client, SlipstreamError, Stack
from slipstream.demo_model import MODEL_PATH

pytestmark = pytest.mark.process

RAISING = """
import os
import threading
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def forward(self, *args, **kwargs):
        order = Path("{order}") / os.environ.get("LOCAL_RANK", "0")
        if order.exists():
            is_to_hang = order.read_text() == "hang"
            order.unlink()
            if is_to_hang:
                threading.Event().wait()
            raise RuntimeError("as it was told")
        return super().forward(*args, **kwargs)
"""
STEP_TIMEOUT_S = 15.0


class TwoRanks(NamedTuple):
    stack: Stack
    client: Client
    orders: Path  # a file named as a rank has that one raise in its next forward, or hang
    expected: list[str]  # of one rank
    is_recorded: bool  # so steps do not call the model's own forward

    def core(self) -> psutil.Process:
        """The core that serves, once it does: the last one's streams may have ended without it."""
        self.client.generate(PROMPTS[0], max_tokens=1)
        return named("slip:core")

    def rank(self) -> psutil.Process:
        """Its other rank."""
        return rank_of(self.core())


def named(name: str) -> psutil.Process:
    """The process below this one with this name, once it is there."""
    patience = Patience()
    while True:
        for each in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if each.name() == name:
                    return each
        patience.wait(f"there is no {name}")


def rank_of(core: psutil.Process) -> psutil.Process:
    """The other rank of a core, once it is there."""
    patience = Patience()
    while not (ranks := core.children()):
        patience.wait("it starts no rank")
    [rank] = ranks
    return rank


@pytest.fixture(scope="module", params=[False, True], ids=["gloo", "memory"])
def two_ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TwoRanks]:
    """Ranks that exchange sums by gloo, or through memory as our kernels' ranks do."""
    folder = tmp_path_factory.mktemp("own") / "model"
    shutil.copytree(MODEL_PATH, folder)
    orders = folder.parent / "orders"
    orders.mkdir()
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "architectures": ["OwnForCausalLM"]}
    config["auto_map"] = {
        "AutoConfig": "own.OwnConfig",
        "AutoModelForCausalLM": "own.OwnForCausalLM",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(RAISING.format(order=orders))
    settings = {
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
        "native": request.param,
        "trust_remote_code": True,
        "step_timeout_s": STEP_TIMEOUT_S,
        "max_restarts": 20,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_MODULES_CACHE", str(folder.parent / "modules"))
        with spareless_stack(str(folder), **settings) as stack, stack.client() as client:
            expected = texts(client, lambda _: None)
        settings |= {"tensor_parallel_size": 2, "spare_core": True}
        with spareless_stack(str(folder), **settings) as stack, stack.client() as client:
            yield TwoRanks(stack, client, orders, expected, is_recorded=request.param)


def move_in(path: Path, text: str) -> None:
    """Write a file that is there with all of its text at once."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


def test_two_ranks_say_what_one_says(two_ranks: TwoRanks) -> None:
    assert texts(two_ranks.client, lambda _: None) == two_ranks.expected


def test_a_rank_is_a_fork_of_its_core(two_ranks: TwoRanks) -> None:
    """As the core is of the process that has imported torch."""
    command = two_ranks.rank().cmdline()
    assert command == two_ranks.core().cmdline()
    assert "slipstream_ipc.fork_server" in command


def test_nothing_listens_beyond_loopback(two_ranks: TwoRanks) -> None:
    rank = two_ranks.rank()
    of_rank = [each.laddr for each in rank.net_connections("inet")]
    assert of_rank, "what this looks for is there"
    for process in [*psutil.Process().children(recursive=True), rank]:
        for each in process.net_connections("inet"):
            assert ip_address(each.laddr.ip).is_loopback, process


def test_rank_killed_streams_identical(two_ranks: TwoRanks) -> None:
    core_ends(two_ranks.stack)
    rank = two_ranks.rank()
    assert texts(two_ranks.client, once_under_way(rank.kill)) == two_ranks.expected
    patience = Patience()
    while not (found := core_ends(two_ranks.stack)):  # the last token may have been there before
        patience.wait("the core lives on without its rank")
    assert found == ["signal SIGKILL"]


def test_core_killed_takes_its_ranks_with_it(two_ranks: TwoRanks) -> None:
    rank = two_ranks.rank()
    core = two_ranks.core()
    assert texts(two_ranks.client, once_under_way(core.kill)) == two_ranks.expected
    assert rank.wait(PATIENCE_S) is None or not rank.is_running()


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_hangs_step_timeout(two_ranks: TwoRanks, rank: int) -> None:
    if two_ranks.is_recorded:
        pytest.skip("a recorded forward has no code that could hang as it is told")
    core_ends(two_ranks.stack)
    order = two_ranks.orders / str(rank)
    hang = once_under_way(lambda: move_in(order, "hang"))
    assert texts(two_ranks.client, hang) == two_ranks.expected
    [how] = core_ends(two_ranks.stack)
    assert f"a step did not finish within {STEP_TIMEOUT_S:g} s" in how


def test_stopped_rank_is_charged_to_no_request(two_ranks: TwoRanks) -> None:
    core_ends(two_ranks.stack)
    # before the first step: a busy client may read long after the last one
    os.kill(two_ranks.rank().pid, signal.SIGSTOP)
    assert texts(two_ranks.client, lambda _: None) == two_ranks.expected
    assert core_ends(two_ranks.stack) == ["signal SIGKILL"]  # an end from outside


def test_a_rank_that_is_stopped_before_its_core_serves(two_ranks: TwoRanks) -> None:
    """As a spare's, whose core loads when it is needed, and would wait for the rank."""
    core, waiting = two_ranks.core(), rank_of(named("spare:core"))
    os.kill(waiting.pid, signal.SIGSTOP)
    core.kill()
    assert texts(two_ranks.client, lambda _: None) == two_ranks.expected
    assert waiting.wait(PATIENCE_S) is None or not waiting.is_running()


@pytest.mark.parametrize("rank", [0, 1])
def test_forward_raises_on_one_rank(two_ranks: TwoRanks, rank: int) -> None:
    if two_ranks.is_recorded:
        pytest.skip("a recorded forward has no code that could raise as it is told")
    core_ends(two_ranks.stack)
    order = two_ranks.orders / str(rank)
    assert texts(two_ranks.client, once_under_way(order.touch)) == two_ranks.expected
    [how] = core_ends(two_ranks.stack)
    assert how.startswith("exit code 1")
    assert "RuntimeError: as it was told" in how


def test_a_number_of_ranks_that_does_not_divide_is_refused_with_those_that_do() -> None:
    with pytest.raises(SlipstreamError, match=r"tensor_parallel_size may be 1, 2, 6$"):
        spareless_stack(device="cpu", tensor_parallel_size=3)
