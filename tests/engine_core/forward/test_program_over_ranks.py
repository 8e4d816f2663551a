"""Lists of operations with sums over ranks, which are threads here or processes in lockstep."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.lockstep_ranks import LockstepRanks, lockstep_ranks
from tests.helpers.patience import PATIENCE_S
from transformers import LlamaConfig, LlamaForCausalLM

from slipstream_core.forward import trace
from slipstream_core.forward.operations import (
    ADD,
    NORM,
    PRODUCT,
    SUM,
    Operation,
    OperationList,
    Part,
)
from slipstream_core.kernels.cpu.kernels import Kernels, kernels
from slipstream_core.model.loader import load_model
from slipstream_core.sharding.collectives import ExchangeFailed
from slipstream_core.sharding.exchange import ExchangeTimeoutError, SharedExchange
from slipstream_core.sharding.rank import Rank
from slipstream_lab.models import tiny_models

torch.set_num_threads(1)
FOUND = kernels()
pytestmark = pytest.mark.skipif(FOUND is None, reason="there is no C compiler")
SLOT_BYTES = 1024  # 256 numbers, so that some sums take several turns
WIDTH = 40
LATE = "another rank has not come to an exchange in time"
TINY = {each.name: each for each in tiny_models.ARCHITECTURES}


@pytest.fixture
def ours() -> Iterator[Kernels]:
    assert FOUND is not None
    yield FOUND
    FOUND.set_threads(1)


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[LockstepRanks]:
    with lockstep_ranks(2) as ranks:
        yield ranks


@contextmanager
def exchange_memory() -> Iterator[int]:
    fd = os.memfd_create("exchange")
    try:
        yield fd
    finally:
        os.close(fd)


def on_ranks(size: int, work: Callable[[SharedExchange, int], Any], timeout_s: float) -> list[Any]:
    """What `work` returns on each rank, or raises."""
    found: list[Any] = [None] * size
    with exchange_memory() as fd:

        def run(index: int) -> None:
            try:
                exchange = SharedExchange(fd, Rank(index, size), timeout_s, SLOT_BYTES)
                found[index] = work(exchange, index)
            except ExchangeTimeoutError as error:
                found[index] = error

        threads = [threading.Thread(target=run, args=(index,)) for index in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
    return found


def total_of(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3), st.integers(1, 20), st.integers(1, WIDTH), st.integers(1, 3), st.data())
def test_any_chain_with_sums(
    size: int, rows: int, width: int, threads: int, data: st.DataObject
) -> None:
    """Every rank has what torch makes of all ranks' values in turn."""
    ours = FOUND
    assert ours is not None
    torch.manual_seed(rows * width)
    values = [[torch.randn(1, rows, width) for _ in range(size)]]  # by rank
    weight = torch.randn(width)
    matrices = [torch.randn(width, width) / width for _ in range(size)]
    packed = [ours.pack(each) for each in matrices]
    kinds: list[tuple[int, int, int]] = []
    for place in range(1, data.draw(st.integers(1, 10)) + 1):
        kind = data.draw(st.sampled_from([NORM, PRODUCT, ADD, SUM, SUM]))
        a, b = (data.draw(st.integers(-1 if each == "b" else 0, place - 1)) for each in "ab")
        kinds.append((kind, a, b))
        one, other = values[a], values[b] if b >= 0 else [weight] * size
        if kind == NORM:
            made = [ours.rms_norm(x, weight, 1e-6) for x in one]
        elif kind == PRODUCT:
            made = [ours.product(x, w, None, width) for x, w in zip(one, packed, strict=True)]
        elif kind == ADD:
            made = [x + y for x, y in zip(one, other, strict=True)]
        else:
            made = [total_of(one)] * size
        values.append(made)

    def operation(kind: int, a: int, b: int, out: int, index: int) -> Operation:
        parts = (Part(out), Part(a))
        if kind == NORM:
            return Operation(NORM, *parts, weight=weight, n=width, heads=1, number=1e-6)
        if kind == PRODUCT:
            return Operation(PRODUCT, *parts, weight=packed[index], n=width, k=width)
        if kind == ADD and b >= 0:
            return Operation(ADD, *parts, Part(b), n=width)
        return Operation(kind, *parts, weight=weight if kind == ADD else None, n=width)

    def work(exchange: SharedExchange, index: int) -> list[torch.Tensor]:
        operations = [operation(*each, at + 1, index) for at, each in enumerate(kinds)]
        widths = [width] * len(values)
        program = OperationList(ours, operations, widths, 1, len(operations), exchange)
        ours.set_threads(threads)  # of this thread
        return [program([values[0][index]], [], 0) for _ in range(3)]

    for index, found in enumerate(on_ranks(size, work, PATIENCE_S)):
        assert not isinstance(found, Exception)
        for result in found:
            assert torch.equal(result, values[-1][index]) or not result.isfinite().all()


def _with_sums(ours: Kernels, exchange: SharedExchange, num_sums: int) -> OperationList:
    """Products of [WIDTH, WIDTH] and of [WIDTH, 4096] with sums between."""
    torch.manual_seed(1)
    wide, narrow = ours.pack(torch.randn(4096, WIDTH)), ours.pack(torch.randn(WIDTH, 4096) / 4096)
    operations = []
    for at in range(0, 3 * num_sums, 3):
        operations += [
            Operation(PRODUCT, Part(at + 1), Part(at), weight=wide, n=4096, k=WIDTH),
            Operation(PRODUCT, Part(at + 2), Part(at + 1), weight=narrow, n=WIDTH, k=4096),
            Operation(SUM, Part(at + 3), Part(at + 2), n=WIDTH),
        ]
    widths = [WIDTH, *[4096, WIDTH, WIDTH] * num_sums]
    return OperationList(ours, operations, widths, 1, len(operations), exchange)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_rank_that_ends_amid_the_list_ends_it(ours: Kernels, threads: int) -> None:
    x = torch.randn(1, 7, WIDTH)

    def work(exchange: SharedExchange, index: int) -> torch.Tensor:
        ours.set_threads(threads)
        return _with_sums(ours, exchange, 2 if index else 5)(  # the third meets no other
            [x], [], 0
        )

    late, other = on_ranks(2, work, 0)
    assert isinstance(late, ExchangeTimeoutError)
    assert str(late) == LATE
    assert isinstance(other, torch.Tensor)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_list_that_failed_leaves_the_team_free(ours: Kernels, threads: int) -> None:
    x = torch.randn(1, 7, WIDTH)
    ours.set_threads(threads)
    with exchange_memory() as fd:
        alone = _with_sums(ours, SharedExchange(fd, Rank(0, 2), 0, SLOT_BYTES), 3)
        for _ in range(2):
            with pytest.raises(ExchangeTimeoutError, match=LATE):
                alone([x], [], 0)
    with exchange_memory() as fd:
        single = _with_sums(ours, SharedExchange(fd, Rank(0, 1), 0, SLOT_BYTES), 3)
        first = single([x], [], 0)
        assert all(torch.equal(single([x], [], 0), first) for _ in range(20))


@pytest.mark.parametrize(
    "name",
    [
        "Llama",
        "Qwen3",
        "Llama with biases",
        pytest.param("Llama, tied embeddings", marks=pytest.mark.long),
        pytest.param("Qwen2, sliding window", marks=pytest.mark.long),
        pytest.param("Ministral, sliding window", marks=pytest.mark.long),
        pytest.param("SmolLM3", marks=pytest.mark.long),
        pytest.param("Seed-OSS", marks=pytest.mark.long),
    ],
)
def test_a_rank_decodes_by_one_call_what_its_recording_computes(
    name: str, two_ranks: LockstepRanks, tmp_path: Path
) -> None:
    architecture = TINY[name.removesuffix(" with biases")]
    if name.endswith("biases"):
        biases = {"attention_bias": True, "mlp_bias": True}
        architecture = tiny_models.Architecture(
            name, architecture.config_class, architecture.options | biases
        )
    tiny_models.save(architecture, tmp_path)
    layers = architecture.options["num_hidden_layers"]
    for rank in two_ranks.decode_lists(tmp_path):
        assert "error" not in rank
        assert rank["sums"] == 2 * layers, "those between layers, without that of the embedding"
        assert rank["attends"] == layers
        assert rank["different"] == []
        assert rank["by_gloo"] is False, "only sums in shared memory are made in a list"


def save_llama(folder: Path) -> None:
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=99,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    ).save_pretrained(folder)


def test_what_other_ranks_cannot_use_is_not_used(
    ours: Kernels, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_llama(tmp_path)
    caplog.set_level("INFO")
    heard = []
    for refused in range(6):
        model = load_model(str(tmp_path), device="cpu", dtype="float32")
        asked: list[bool] = []

        def agree(said: bool, asked: list[bool] = asked, refused: int = refused) -> bool:
            asked.append(said)
            return said and len(asked) != refused + 1

        caplog.clear()
        traced = trace.trace(model.module, ours, model.vocab_size, agree)
        assert all(asked)
        heard.append((len(asked), traced is not None, "another rank cannot" in caplog.text))
    assert heard == [
        (1, False, True),  # record it
        (2, False, True),  # get the same from the recording
        (3, True, True),  # lower it to one list
        (4, True, True),  # make it a forward
        (5, True, True),  # get the same from the list
        (5, True, False),
    ]


@pytest.mark.long
@pytest.mark.parametrize("error", [MemoryError, ExchangeFailed, ExchangeTimeoutError])
@pytest.mark.parametrize("before", [0, 4])
def test_a_rank_that_is_out_of_step_does_not_go_on(
    ours: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Any, before: int
) -> None:
    """In the trials of the recording, and in those of the list."""
    save_llama(tmp_path)
    model = load_model(str(tmp_path), device="cpu", dtype="float32")
    tried: list[int] = []
    really = trace._try

    def try_one(*given: Any) -> None:
        tried.append(1)
        if len(tried) > before:
            raise error("amid a sum")
        really(*given)

    monkeypatch.setattr(trace, "_try", try_one)
    with pytest.raises(error):
        trace.trace(model.module, ours, model.vocab_size)
    assert len(tried) == before + 1
