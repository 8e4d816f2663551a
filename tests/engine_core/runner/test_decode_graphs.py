"""Recorded decode steps give the tokens of steps that are computed as they come.

The recorder is as strict as a card's (`recording`): what the host says while a step is recorded is
said once for all replays.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from tests.helpers.host_device import HostCopies, HostRecorder
from tests.helpers.op_recorder import OpRecorder
from tests.helpers.torch_driver import (
    BLOCK,
    NUM_TOKENS,
    PROMPTS,
    Driver,
    Request,
    assert_undefined_behind,
    generate,
    save_model,
    save_undefined,
    undefined_by,
)

from slipstream_core.model.loader import LoadedModel, load_model
from slipstream_core.runner import mixed_forwards
from slipstream_core.runner.decode_graphs import KINDS, DecodeGraphs
from slipstream_core.runner.graph_capture import (
    CaptureConfig,
    Recorder,
    Work,
    record_all,
)
from slipstream_core.runner.kv_cache_size import largest_plan
from slipstream_core.runner.mixed_forwards import MixedForwards
from slipstream_core.runner.torch_runner import KernelConfig, TorchRunner
from slipstream_core.sampling import top_k_top_p
from slipstream_core.step.plan import COLUMNS, StepPlan
from slipstream_core.step.staging import CopyEvent

MakeRunner = Callable[..., TorchRunner]


@pytest.fixture(scope="module", params=["llama", "mistral"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load_model(str(folder), device="cpu")


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    return generate(folder, PROMPTS, NUM_TOKENS)


@pytest.fixture
def make(model: LoadedModel) -> Iterator[MakeRunner]:
    made: list[TorchRunner] = []

    def make(
        sizes: Sequence[int] = (), recorder: Recorder | None = None, buckets: Sequence[int] = ()
    ) -> TorchRunner:
        runner = TorchRunner(
            model,
            num_blocks=400,
            block_size=BLOCK,
            max_num_seqs=16,
            kernel_config=KernelConfig(
                threads=1,
                native=False,
                capture=CaptureConfig(sizes=sizes, buckets=buckets, recorder=recorder),
                copies=HostCopies(),
            ),
        )
        made.append(runner)
        return runner

    yield make
    for runner in made:
        runner.close()


@pytest.mark.parametrize("sizes", [(1, 2, 4, 8), (3,), (16,)], ids=str)
def test_the_same_tokens_as_generate(
    make: MakeRunner, expected: list[list[int]], sizes: tuple[int, ...]
) -> None:
    recorder = OpRecorder()
    runner = make(sizes, recorder)
    for budget, depth in ((9, 1), (1000, 0), (1000, 1), (32, 2)):
        recorder.num_replays = 0
        # lengths that differ, so that rows leave one by one
        requests = [Request(p, NUM_TOKENS - 2 * n) for n, p in enumerate(PROMPTS)]
        driver = Driver(runner, budget=budget, depth=depth, seed=budget + depth)
        driver.run(requests)
        assert [r.output for r in requests] == [
            tokens[: NUM_TOKENS - 2 * n] for n, tokens in enumerate(expected)
        ]
        assert driver.num_mixed > 0
        assert recorder.num_replays > 0


def mixed_requests() -> list[Request]:
    """Greedy, drawn and truncated rows beside one another, with log-probabilities and without."""
    return [
        Request(
            prompt,
            10 + n,
            temperature=(0.0, 0.9, 1.3)[n % 3],
            top_k=(0, 0, 5, 30)[n % 4],
            top_p=(1.0, 1.0, 0.8, 1.0)[n % 4],
            seed=100 + n,
            num_logprobs=(-1, 3, 0)[n % 3],
        )
        for n, prompt in enumerate(PROMPTS)
    ]


@pytest.mark.parametrize("group", [slice(None), slice(0, None, 3), slice(1, None, 4), slice(2, 3)])
def test_the_same_samples_and_log_probabilities_as_without(make: MakeRunner, group: slice) -> None:
    recorder = OpRecorder()
    outputs, logprobs = [], []
    for runner in (make(), make((2, 8), recorder)):
        requests = mixed_requests()[group]
        Driver(runner, budget=1000, seed=5).run(requests)
        outputs.append([r.output for r in requests])
        logprobs.append([r.logprobs for r in requests])
    assert outputs[0] == outputs[1]
    for without, recorded in zip(*logprobs, strict=True):
        assert len(without) == len(recorded)
        for (values, ids, rank), (values_2, ids_2, rank_2) in zip(without, recorded, strict=True):
            assert values_2 == pytest.approx(values, abs=1e-4)
            assert (ids_2, rank_2) == (ids, rank)
    assert recorder.num_replays > 0


@pytest.mark.parametrize("temperature", [0.2, 3.0], ids=["covered", "further"])
def test_kept_sets_beyond_the_candidates(
    make: MakeRunner, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a high temperature top_p keeps more than eight tokens, at a low one it does not."""
    monkeypatch.setattr(top_k_top_p, "NUM_CANDIDATES", 8)
    is_covered = DecodeGraphs._is_covered
    found = []

    def spy(self: DecodeGraphs, *others: Any) -> bool:
        found.append(is_covered(self, *others))
        return found[-1]

    monkeypatch.setattr(DecodeGraphs, "_is_covered", spy)
    outputs = []
    for runner in (make(), make((2, 8), OpRecorder())):
        requests = [
            Request(prompt, 12, temperature=temperature, top_p=0.9, seed=n, num_logprobs=n % 2)
            for n, prompt in enumerate(PROMPTS)
        ]
        Driver(runner, budget=1000).run(requests)
        outputs.append([(r.output, [ids for _, ids, _ in r.logprobs]) for r in requests])
    assert outputs[0] == outputs[1]
    assert (temperature < 1) in found


@pytest.fixture
def mixed(monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """The plans whose forward with prefill tokens was recorded."""
    found: list[StepPlan] = []
    forward = MixedForwards.forward

    def noted(self: MixedForwards, plan: StepPlan) -> torch.Tensor:
        found.append(plan)
        return forward(self, plan)

    monkeypatch.setattr(MixedForwards, "forward", noted)
    return found


@pytest.mark.parametrize("buckets", [(16, 32), (32,), (8, 16, 64)], ids=str)
@pytest.mark.parametrize(("budget", "depth"), [(9, 1), (32, 0), (31, 2)])
def test_arrivals_are_recorded(
    make: MakeRunner,
    expected: list[list[int]],
    mixed: list[StepPlan],
    monkeypatch: pytest.MonkeyPatch,
    buckets: tuple[int, ...],
    budget: int,
    depth: int,
) -> None:
    runner = make((1, 4, 16), OpRecorder(), buckets)
    eager: list[StepPlan] = []
    forward = runner._forward
    monkeypatch.setattr(runner, "_forward", lambda plan, _: (eager.append(plan), forward(plan))[1])
    requests = [Request(prompt, NUM_TOKENS) for prompt in PROMPTS]
    driver = Driver(runner, budget=budget, depth=depth, seed=budget)
    driver.run(requests)
    assert [r.output for r in requests] == expected
    assert not eager
    assert driver.num_mixed > 0
    assert any(plan.num_decodes for plan in mixed)
    if budget < 10:
        assert any(not plan.samples.any() for plan in mixed), "a chunk that samples nothing"


def test_arrivals_with_samples_and_log_probabilities(
    make: MakeRunner, mixed: list[StepPlan]
) -> None:
    outputs, logprobs = [], []
    for runner in (make(), make((2, 8), OpRecorder(), (16, 64))):
        requests = mixed_requests()
        Driver(runner, budget=60, seed=5).run(requests)
        outputs.append([r.output for r in requests])
        logprobs.append([[ids for _, ids, _ in r.logprobs] for r in requests])
    assert outputs[0] == outputs[1]
    assert logprobs[0] == logprobs[1]
    assert any(plan.samples.any() and not plan.all_greedy for plan in mixed)


def test_arrays_that_plans_share_are_written_once_and_read_as_ever(
    make: MakeRunner, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each plan has every array of an earlier one that equals its own, as decode steps have."""

    def requests() -> list[Request]:
        return [
            Request(
                prompt,
                NUM_TOKENS - 2 * at,
                temperature=0.9 * (at % 3),
                top_k=5 * (at % 2),
                top_p=0.8 if at == 3 else 1.0,
                seed=at // 2,
            )
            for at, prompt in enumerate(PROMPTS)
        ]

    def outputs(runner: TorchRunner) -> list[list[int]]:
        some = requests()
        Driver(runner, budget=32, depth=1).run(some, arrivals_per_step=2)
        return [it.output for it in some]

    expected = outputs(make())
    launch, seen = TorchRunner.launch, dict[str, list[np.ndarray[Any, Any]]]()

    def launch_shared(self: TorchRunner, plan: StepPlan) -> None:
        arrays = {}
        for name in COLUMNS:
            own = getattr(plan, name)
            equal = (it for it in seen.get(name, []) if np.array_equal(it, own))
            arrays[name] = next(equal, own)
            seen.setdefault(name, []).append(arrays[name])
        launch(self, replace(plan, **arrays))

    monkeypatch.setattr(TorchRunner, "launch", launch_shared)
    assert outputs(make((2, 4, 16), OpRecorder(), (16, 32))) == expected


def test_a_decode_step_is_one_upload(make: MakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    uploads: list[int] = []
    taken: list[tuple[StepPlan, int]] = []
    upload, step = HostCopies.upload, TorchRunner._step

    def counted(self: HostCopies, source: torch.Tensor, target: torch.Tensor) -> CopyEvent:
        uploads.append(len(source))
        return upload(self, source, target)

    def noted(self: TorchRunner, plan: StepPlan) -> Any:
        before = len(uploads)
        outcome = step(self, plan)
        taken.append((plan, len(uploads) - before))
        return outcome

    monkeypatch.setattr(HostCopies, "upload", counted)
    monkeypatch.setattr(TorchRunner, "_step", noted)
    requests = [Request(prompt, NUM_TOKENS) for prompt in PROMPTS]
    Driver(make((4, 16), OpRecorder()), budget=1000).run(requests)
    decodes = [each for each in taken if each[0].num_decodes == each[0].num_requests]
    assert {num for _, num in decodes} == {1}
    assert any(len(plan.table_slots) for plan, _ in decodes)


def test_steps_beyond_what_is_recorded_run_eagerly(
    make: MakeRunner, expected: list[list[int]], mixed: list[StepPlan]
) -> None:
    """More tokens than the largest bucket, more rows than the largest batch, more prefills."""
    runner = make((4,), OpRecorder(), (16,))
    requests = [Request(prompt, NUM_TOKENS) for prompt in PROMPTS]
    Driver(runner, budget=1000).run(requests, arrivals_per_step=3)
    assert [r.output for r in requests] == expected
    assert all(plan.num_tokens <= 16 and plan.num_requests <= 4 for plan in mixed)
    graphs = runner._graphs
    assert graphs is not None

    def takes(rows: int, tokens: int) -> bool:
        plan = largest_plan(rows, tokens, max_model_len=64, vocab_size=199)
        return graphs.takes(plan)

    assert takes(1, 16)
    assert takes(4, 16)
    assert not takes(1, 17)
    assert not takes(5, 16)
    prefills = largest_plan(1, 12, max_model_len=4, vocab_size=199)
    assert prefills.num_requests - prefills.num_decodes == 3
    assert graphs.takes(prefills)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixed_forwards, "MAX_PREFILLS", 2)
        assert not graphs.takes(prefills)


def test_padding_writes_to_the_null_block_alone(make: MakeRunner, mixed: list[StepPlan]) -> None:
    runner = make((4,), OpRecorder(), (64,))
    known = 0.5
    for layer in runner._layers:
        for cache in (layer.keys, layer.values):
            cache.fill_(known)
    requests = [Request(prompt, 6) for prompt in PROMPTS[:4]]
    Driver(runner, budget=30).run(requests)
    assert len(mixed) > 2
    blocks = {0, *(block for request in requests for block in request.table)}
    slots = torch.tensor(sorted(blocks))[:, None] * BLOCK + torch.arange(BLOCK)
    for layer in runner._layers:
        for cache in (layer.keys, layer.values):
            others = torch.ones(len(cache), dtype=torch.bool)
            others[slots.flatten()] = False
            assert (cache[others] == known).all()


@pytest.mark.parametrize("folder", ["llama", "mistral", "minicpm3"], indirect=True)
@pytest.mark.parametrize("rubbish", [torch.nan, torch.inf])
@pytest.mark.parametrize("buckets", [(), (16, 32)], ids=str)
def test_what_others_left_in_the_cache_never_shows(
    make: MakeRunner, expected: list[list[int]], rubbish: float, buckets: tuple[int, ...]
) -> None:
    runner = make((1, 4, 16), OpRecorder(), buckets)
    for layer in runner._layers:
        for blocks in layer.blocks:
            blocks[1:] = rubbish  # all but the null block
    requests = [Request(prompt, NUM_TOKENS) for prompt in PROMPTS]
    Driver(runner, budget=32).run(requests)
    assert [r.output for r in requests] == expected


class Failing(HostRecorder):
    """Does not record some of what it is given."""

    def __init__(
        self, fails: Callable[[int], bool], error: type[RuntimeError] = RuntimeError
    ) -> None:
        self._fails = fails
        self._error = error
        self._count = itertools.count()
        self.num_checks = self.num_recorded = 0

    def record(self, work: Work) -> Work:
        if self._fails(next(self._count)):
            raise self._error("operation not permitted when stream is capturing")
        self.num_recorded += 1
        return super().record(work)

    def check(self) -> None:
        self.num_checks += 1


@pytest.mark.parametrize(
    ("fails", "error", "num_failures", "num_recorded"),
    [
        # the largest forward: the smaller ones are not tried
        (lambda n: True, RuntimeError, 1, 0),
        (lambda n: n > 0, RuntimeError, 2 + len(KINDS) - 1, 1),  # one forward
        # one kind, which is not tried again
        (lambda n: n == 2, RuntimeError, 1, 2 + 2 * len(KINDS) - 2),
        # for want of memory, of which smaller ones take less
        (lambda n: True, torch.OutOfMemoryError, 2, 0),
        (lambda n: n == 0, torch.OutOfMemoryError, 1, 1 + len(KINDS)),
        (lambda n: n == 2, torch.OutOfMemoryError, 1, 2 + 2 * len(KINDS) - 1),
    ],
)
def test_what_cannot_be_recorded_runs_eagerly(
    make: MakeRunner,
    expected: list[list[int]],
    caplog: pytest.LogCaptureFixture,
    fails: Callable[[int], bool],
    error: type[RuntimeError],
    num_failures: int,
    num_recorded: int,
) -> None:
    recorder = Failing(fails, error)
    with caplog.at_level(logging.WARNING):
        runner = make((2, 8), recorder)
    assert recorder.num_checks == num_failures
    assert caplog.text.count("could not be recorded and runs eagerly") == num_failures
    assert recorder.num_recorded == num_recorded
    requests = [Request(prompt, NUM_TOKENS) for prompt in PROMPTS]
    Driver(runner, budget=32).run(requests)
    assert [r.output for r in requests] == expected


def test_a_device_beyond_use_is_told(make: MakeRunner) -> None:
    class Dead(Failing):
        def check(self) -> None:
            raise ZeroDivisionError("an illegal memory access was encountered")

    with pytest.raises(ZeroDivisionError, match="illegal memory access"):
        make((2, 8), Dead(lambda n: n == 3))


def test_recording_stops_at_its_deadline(caplog: pytest.LogCaptureFixture) -> None:
    kept: list[Work] = []
    work = [(f"number {n}", lambda: None, kept.append) for n in range(3)]
    with caplog.at_level(logging.WARNING):
        record_all(HostRecorder(), work, 3, within_s=-1.0)
    assert kept == []
    assert "before number 0: 0 of 3 are recorded" in caplog.text
    record_all(HostRecorder(), work, 3)
    assert len(kept) == 3


def test_a_piece_that_another_rank_lacks_is_not_kept() -> None:
    kept: list[Work] = []
    whys: list[Exception] = []
    said: list[bool] = []

    def agree(mine: bool) -> bool:
        said.append(mine)
        return mine and len(said) != 4  # the second piece, once it is recorded

    work = [(f"number {n}", lambda: None, kept.append) for n in range(3)]
    record_all(HostRecorder(), work, 3, failed=whys.append, agree=agree)
    assert said == [True] * 6
    assert len(kept) == 2
    assert [str(why) for why in whys] == ["another rank could not record it"]


def test_a_rank_that_is_out_of_memory_keeps_no_other_one_waiting() -> None:
    def fill() -> None:
        raise torch.OutOfMemoryError("no more")

    work: list[tuple[str, Work, Callable[[Work], None]]] = [("it", fill, lambda _: None)]
    record_all(HostRecorder(), work, 1)
    with pytest.raises(torch.OutOfMemoryError):
        record_all(HostRecorder(), work, 1, agree=bool)


def test_without_time_all_steps_run_eagerly(
    make: MakeRunner, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream_core.runner.decode_graphs.CAPTURE_S", -1.0)
    runner = make((2, 8), OpRecorder())
    request = Request(PROMPTS[0], NUM_TOKENS)
    Driver(runner).run([request])
    assert request.output == expected[0]


def test_a_bare_replay_is_timed(make: MakeRunner) -> None:
    recorder = OpRecorder()
    runner = make((2, 8), recorder)
    recorder.num_replays = 0
    assert runner.bare_replay(5, 3, context=9) > 0
    assert recorder.num_replays == 2 * (1 + 3)  # once for the way, and as often as wanted
    assert (
        len(set(runner._sampling.last_token[:5].tolist())) > 1
    )  # rows of inputs that are not alike
    with pytest.raises(ValueError, match=r"no CUDA graph for 9 rows, only for \[2, 8\]"):
        runner.bare_replay(9, 1)
    with pytest.raises(ValueError, match="no CUDA graphs are recorded"):
        make().bare_replay(1, 1)


@pytest.mark.parametrize("sizes", [(), (2, 8)], ids=["eager", "recorded"])
def test_rows_whose_logits_are_not_numbers_are_told(
    folder: Path, tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    kinds = mixed_requests()
    save_undefined(folder, tmp_path, PROMPTS[1][-1])
    runner = TorchRunner(
        load_model(str(tmp_path), device="cpu"),
        num_blocks=400,
        block_size=BLOCK,
        max_num_seqs=16,
        kernel_config=KernelConfig(
            threads=1,
            native=False,
            capture=CaptureConfig(sizes=sizes, recorder=OpRecorder()),
            copies=HostCopies(),
        ),
    )
    with contextlib.closing(runner):
        told = undefined_by(runner, kinds)
    assert_undefined_behind(PROMPTS[1][-1], kinds, told)


def test_a_closed_runner_gives_its_cache_back(make: MakeRunner) -> None:
    runner = make((2, 8), OpRecorder())
    caches = [weakref.ref(layer.keys) for layer in runner._layers]
    Driver(runner).run([Request(PROMPTS[0], 3)])
    assert all(cache() is not None for cache in caches)
    runner.close()
    gc.collect()
    assert [cache() for cache in caches] == [None] * len(caches)


def test_a_step_with_many_entries_leaves_tables_where_recordings_look(model: LoadedModel) -> None:
    runner = TorchRunner(
        model,
        num_blocks=18,
        block_size=BLOCK,
        max_num_seqs=16,
        kernel_config=KernelConfig(
            threads=1,
            native=False,
            capture=CaptureConfig(sizes=(4,), recorder=OpRecorder()),
            copies=HostCopies(),
        ),
    )
    with contextlib.closing(runner):
        graphs, tables = runner._graphs, runner._tables
        assert graphs is not None
        before = graphs._staging.device_buffer.data_ptr(), tables.tensor.data_ptr()
        plan = largest_plan(4, 4, max_model_len=8, vocab_size=model.vocab_size)
        num_slots, width = tables.tensor.shape
        places = np.arange((num_slots - 1) * width)
        many = replace(
            plan,
            table_slots=places // width,
            table_numbers=places % width,
            table_blocks=(places % 17 + 1).astype(np.int32),
        )
        assert graphs.takes(many)
        runner.launch(many)
        runner.collect()
        assert (graphs._staging.device_buffer.data_ptr(), tables.tensor.data_ptr()) == before
        assert tables.array[:-1].reshape(-1).tolist() == many.table_blocks.tolist()
        assert not tables.array[-1].any(), "the padding rows' table"
