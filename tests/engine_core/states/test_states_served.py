"""Recurrent states over a scheduler that runs ahead: token for token what generate says, whatever
happens to slots and steps. The mutants show that these tests would see a state that is wrong.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tests.helpers.new_requests import new_request
from tests.helpers.told_drafts import ToldDrafts
from tests.helpers.watched_rows import WatchedReasoning
from transformers import AutoModelForCausalLM

from slipstream_core.kernels.cpu.kernels import kernels
from slipstream_core.model.loader import LoadedModel, load_model
from slipstream_core.runner import torch_runner
from slipstream_core.runner.torch_runner import KernelConfig, TorchRunner
from slipstream_core.scheduler import state_marks
from slipstream_core.scheduler.request_blocks import RequestBlocks
from slipstream_core.scheduler.scheduler import CacheConfig, Scheduler
from slipstream_core.states.flat_step import FlatStep
from slipstream_core.states.state_pool import StatePool, StateStep
from slipstream_core.step.plan import StepFailed, StepPlan
from slipstream_ipc.history.token_log import TokenLog
from slipstream_lab.models import tiny_models

BLOCK = 4
NUM_OUTPUTS = 20
# one token, exactly a block, one more, and longer than a step's budget
PROMPT_LENS = (1, BLOCK, BLOCK + 1, 9, 31, 14)
ROWS_AT_ONCE = 3
MOST_SNAPSHOTS, MOST_DRAFTS = 12, 20
NAMES = ("LFM2", "Qwen3.5")
_NO_TOKEN = tiny_models.VOCAB_SIZE


def random_ids(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, tiny_models.VOCAB_SIZE) for _ in range(length)]


def apart() -> list[list[int]]:
    """Prompts that have nothing in common."""
    rng = random.Random(5)
    return [random_ids(rng, length) for length in PROMPT_LENS]


def alike() -> list[list[int]]:
    """Prompts that begin as others do, end where others go on, and are others."""
    rng = random.Random(6)
    common, other = random_ids(rng, 18), random_ids(rng, 7)
    first = [*common, *random_ids(rng, 6)]
    return [
        first,
        [*common, *random_ids(rng, 3)],
        [*first, *random_ids(rng, 9)],
        common,
        other,
        [*common[:10], *random_ids(rng, 5)],
        first,
        [*common[:10], *random_ids(rng, 4)],
        [*other, *common],
        [*first, *random_ids(rng, 9)],
    ]


class Expected(NamedTuple):
    prompts: list[list[int]]
    outputs: list[list[int]]  # what generate says, and a token more


def outputs_of(folder: Path, prompts: list[list[int]]) -> Expected:
    reference = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    outputs = [
        reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NUM_OUTPUTS + 1,
            min_new_tokens=NUM_OUTPUTS + 1,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    assert len({token for output in outputs for token in output}) >= 8
    return Expected(prompts, outputs)


@pytest.fixture(scope="module", params=NAMES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("hybrid")
    [tiny] = (each for each in tiny_models.HYBRIDS if each.name == request.param)
    tiny_models.save(tiny, folder)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> Expected:
    return outputs_of(folder, apart())


@pytest.fixture(scope="module")
def expected_of_alike(folder: Path) -> Expected:
    return outputs_of(folder, alike())


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load_model(str(folder), device="cpu", dtype="float32")


@pytest.fixture(params=[False, True], ids=["as they are", "recorded"])
def runner(model: LoadedModel, request: pytest.FixtureRequest) -> Iterator[TorchRunner]:
    if request.param and kernels() is None:
        pytest.skip("no C compiler")
    runner = runner_of(model, packs=request.param)
    assert runner._is_recorded == request.param
    yield runner
    runner.close()


def runner_of(model: LoadedModel, *, packs: bool) -> TorchRunner:
    return TorchRunner(
        model,
        num_blocks=120,
        block_size=BLOCK,
        max_num_seqs=ROWS_AT_ONCE,
        kernel_config=KernelConfig(threads=1, packs=packs),
        num_snapshots=MOST_SNAPSHOTS,
        num_draft_states=MOST_DRAFTS,
    )


class Loop:
    """Requests over one scheduler and runner, one step ahead.

    doubles: steps in which the first row gets a token more than it was sampled. is_watched: each
    row's reasoning is, which this output ends, if any (`end_at`); what follows has masks.
    most_drafts: of a row in a step, right a random number of times.
    """

    def __init__(
        self,
        runner: TorchRunner,
        expected: Expected,
        *,
        num_blocks: int = 120,
        doubles: tuple[int, ...] = (),
        has_states: bool = True,
        num_snapshots: int = 0,
        max_model_len: int = 60,
        is_watched: bool = False,
        end_at: int | None = None,
        most_drafts: int = 0,
        caches_answers: bool = True,
    ) -> None:
        self._runner, self._expected, self._doubles = runner, expected, doubles
        self._tokens = TokenLog()
        self.num_failed = self.num_doubled = self.num_drafts = self.num_right = 0
        texts = [
            [*prompt, *output]
            for prompt, output in zip(expected.prompts, expected.outputs, strict=True)
        ]
        drafter = ToldDrafts(texts, tiny_models.VOCAB_SIZE, most_drafts) if most_drafts else None
        self.scheduler = Scheduler(
            tokens=self._tokens,
            cache=CacheConfig(
                num_blocks=num_blocks,
                block_size=BLOCK,
                enable_prefix_caching=True,
                has_states=has_states,
                num_snapshots=num_snapshots,
                num_draft_states=MOST_DRAFTS,
                caches_answers=caches_answers,
            ),
            max_num_seqs=ROWS_AT_ONCE,
            max_num_batched_tokens=16,
            max_model_len=max_model_len,
            drafter=drafter,
        )
        for row, prompt in enumerate(expected.prompts):
            end = _NO_TOKEN if end_at is None else expected.outputs[row][end_at]
            self._tokens.open(row)
            self._tokens.extend(row, np.array(prompt, np.uint32))
            self.scheduler.add(
                new_request(
                    row=row,
                    prompt_len=len(prompt),
                    max_tokens=NUM_OUTPUTS,
                    temperature=0.0,
                    top_k=0,
                    top_p=1.0,
                    min_p=0.0,
                    seed=0,
                    worker_ends=False,
                    reasoning=WatchedReasoning(end) if is_watched else None,
                )
            )

    def run(self) -> list[list[int]]:
        """All outputs."""
        acked = np.zeros(len(self._expected.prompts), np.int64)
        in_flight: deque[StepPlan] = deque()
        collected = 0
        while self.scheduler.has_work or in_flight:
            while len(in_flight) < 2 and (plan := self.scheduler.schedule(acked)) is not None:
                self._runner.launch(plan)
                in_flight.append(plan)
            plan = in_flight.popleft()
            if plan.awaits_masks:
                num = len(self.scheduler.grammar_rows_of(plan))
                self._runner.sample(plan, np.full((num, _NO_TOKEN // 32 + 1), -1, np.int32))
            try:
                result = self._runner.collect()
            except StepFailed:
                self.num_failed += 1
                at_fault = self.scheduler.fail(plan)
                assert not len(at_fault)
                continue
            collected += 1
            ids = result.token_ids
            if result.counts is not None and result.draft_lens is not None:
                self.num_drafts += int(result.draft_lens.sum())
                self.num_right += int((result.counts - 1).sum())
            if collected in self._doubles and len(ids) and in_flight:
                self._double(plan, ids)
            else:
                self.scheduler.complete(plan, ids, result.counts)
        return [
            self._tokens.read(row, len(prompt), self._tokens.length(row)).tolist()
            for row, prompt in enumerate(self._expected.prompts)
        ]

    def _double(self, plan: StepPlan, ids: Any) -> None:
        row = int(self.scheduler.rows_of(plan)[plan.samples][0])
        at = self._tokens.length(row) - len(self._expected.prompts[row])
        counts = np.ones(len(ids), np.int64)
        counts[0] = 2
        self.num_doubled += 1
        more = self._expected.outputs[row][at + 1]
        self.scheduler.complete(plan, np.insert(ids, 1, more), counts)


def right(outputs: list[list[int]], expected: Expected) -> list[bool]:
    return [
        ours == theirs[:NUM_OUTPUTS] for ours, theirs in zip(outputs, expected.outputs, strict=True)
    ]


@pytest.mark.quick
def test_slots_pass_from_row_to_row(expected: Expected, runner: TorchRunner) -> None:
    loop = Loop(runner, expected)
    assert all(right(loop.run(), expected))
    assert loop.scheduler.prefix_cache_queries == 0


def test_preempted_rows_begin_anew(expected: Expected, runner: TorchRunner) -> None:
    loop = Loop(runner, expected, num_blocks=20)
    assert all(right(loop.run(), expected))
    assert loop.scheduler.num_preemptions > 0


def fail_steps(runner: TorchRunner, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """The second, fifth and sixth step of several rows fail."""
    num_forwards = 0
    forward = runner._forward
    step, name = (FlatStep, "convolve") if runner._is_recorded else (StateStep, "mix")
    compute = getattr(step, name)

    def fails(plan: StepPlan, whole: StepPlan | None) -> Any:
        nonlocal num_forwards
        num_forwards += plan.num_requests > 1
        is_failing = plan.num_requests > 1 and num_forwards in (2, 5, 6)
        if is_failing and place == "before the forward":
            raise RuntimeError("fails")
        if is_failing and place == "within it":
            calls = 0

            def once(*given: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == 2:
                    raise RuntimeError("fails")
                return compute(*given)

            monkeypatch.setattr(step, name, once)
        try:
            logits = forward(plan, whole)
        finally:
            monkeypatch.setattr(step, name, compute)
        if is_failing:
            raise RuntimeError("fails")
        return logits

    monkeypatch.setattr(runner, "_forward", fails)


PLACES = ["before the forward", "within it", "behind it"]


@pytest.mark.parametrize("place", PLACES)
def test_rows_of_failed_steps_begin_anew(
    expected: Expected, runner: TorchRunner, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    fail_steps(runner, monkeypatch, place)
    loop = Loop(runner, expected)
    assert all(right(loop.run(), expected))
    assert loop.num_failed >= 2


def test_a_row_whose_launched_step_is_dropped_begins_anew(
    expected: Expected, runner: TorchRunner
) -> None:
    loop = Loop(runner, expected, doubles=(6, 12, 30))
    assert all(right(loop.run(), expected))
    assert loop.num_doubled >= 2
    assert loop.scheduler.num_preemptions == loop.num_doubled


def test_a_state_that_has_run_ahead_is_seen(expected: Expected, runner: TorchRunner) -> None:
    loop = Loop(runner, expected, doubles=(6, 12, 30), has_states=False)
    assert not all(right(loop.run(), expected))


Step = StateStep | FlatStep


def change_steps(
    monkeypatch: pytest.MonkeyPatch, given: Callable[[Any], Any], change: Callable[[Step], None]
) -> None:
    """Rows are `given` to each step in another way, or it is `change`d."""
    for kind in (StateStep, FlatStep):

        def changed(step: Any, *parts: Any, init: Any = kind.__init__, **rows: Any) -> None:
            init(step, *parts, **given(rows))
            change(step)

        monkeypatch.setattr(kind, "__init__", changed)


def stale(step: Step) -> None:
    """Rows that begin read what their slot holds."""
    if isinstance(step, FlatStep):
        step._columns.begins[:] = 0
        return
    step._begun = None
    step._groups = [group._replace(begins=False) for group in step._groups]


def misplaced(step: Step) -> None:
    """A row that decodes gets the state of another."""
    if isinstance(step, FlatStep):
        columns = step._columns
        decode = np.diff(columns.tokens[columns.segments]) == 1
        others = np.roll(columns.slots[decode], 1)
        columns.slots[decode] = columns.reads[decode] = others
        return
    step._groups = [
        group._replace(slots=group.slots.roll(1), reads=group.reads.roll(1))
        if group.num_rows > 1
        else group
        for group in step._groups
    ]


def forgetful(step: Step) -> None:
    """A chunk that continues a row begins anew."""
    if isinstance(step, FlatStep):
        columns = step._columns
        columns.begins[np.diff(columns.tokens[columns.segments]) > 1] = 1
        return
    step._groups = [
        group._replace(begins=True) if group.length > 1 else group for group in step._groups
    ]


@pytest.mark.parametrize("mutant", [stale, misplaced, forgetful], ids=lambda it: it.__name__)
def test_a_wrong_state_is_seen(
    expected: Expected,
    runner: TorchRunner,
    monkeypatch: pytest.MonkeyPatch,
    mutant: Callable[[Step], None],
) -> None:
    change_steps(monkeypatch, lambda rows: rows, mutant)
    assert not all(right(Loop(runner, expected).run(), expected))


# --- the prefix cache -----------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def close_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """States are saved at more places of prompts as short as these."""
    monkeypatch.setattr(state_marks, "_BACK", 2 * BLOCK)
    monkeypatch.setattr(state_marks, "_INTERVAL", 3 * BLOCK)


def test_prompts_that_begin_alike_continue_behind_saved_states(
    expected_of_alike: Expected, runner: TorchRunner
) -> None:
    loop = Loop(runner, expected_of_alike, num_snapshots=MOST_SNAPSHOTS)
    assert all(right(loop.run(), expected_of_alike))
    assert loop.scheduler.prefix_cache_hits >= 80  # of 205
    assert loop.scheduler.num_preemptions == 0


@pytest.mark.skipif(kernels() is None, reason="there is no C compiler")
def test_mixers_of_a_model_that_is_not_recorded_run_by_kernels(
    model: LoadedModel, expected_of_alike: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_runner, "trace", lambda *_, **__: None)
    runner = runner_of(model, packs=True)
    try:
        assert runner._mixes_by_kernels
        loop = Loop(runner, expected_of_alike, num_snapshots=MOST_SNAPSHOTS)
        assert all(right(loop.run(), expected_of_alike))
        assert loop.scheduler.prefix_cache_hits >= 80  # of 205
    finally:
        runner.close()


def test_few_states_and_blocks_are_saved_and_given_up_again(
    expected_of_alike: Expected, runner: TorchRunner
) -> None:
    loop = Loop(runner, expected_of_alike, num_blocks=24, num_snapshots=2)
    assert all(right(loop.run(), expected_of_alike))
    assert loop.scheduler.num_preemptions > 0
    assert loop.scheduler.prefix_cache_hits > 0


@pytest.mark.parametrize("place", PLACES)
def test_states_that_a_failed_step_was_to_save_are_not_loaded(
    expected_of_alike: Expected,
    runner: TorchRunner,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
) -> None:
    fail_steps(runner, monkeypatch, place)
    loop = Loop(runner, expected_of_alike, num_snapshots=MOST_SNAPSHOTS)
    assert all(right(loop.run(), expected_of_alike))
    assert loop.num_failed >= 2
    assert loop.scheduler.prefix_cache_hits > 0


def test_a_row_whose_launched_step_is_dropped_continues_behind_a_saved_state(
    expected: Expected, runner: TorchRunner
) -> None:
    loop = Loop(runner, expected, doubles=(6, 12, 30), num_snapshots=MOST_SNAPSHOTS)
    assert all(right(loop.run(), expected))
    assert loop.num_doubled >= 2
    assert loop.scheduler.num_preemptions == loop.num_doubled
    assert loop.scheduler.prefix_cache_hits > 0


WATCHED: dict[str, Any] = {
    "doubles": (6, 12, 30),
    "num_snapshots": MOST_SNAPSHOTS,
    "is_watched": True,
}


def test_a_row_that_alternates_goes_on_in_front_of_a_dropped_step(
    expected: Expected, runner: TorchRunner
) -> None:
    loop = Loop(runner, expected, **WATCHED)
    assert all(right(loop.run(), expected))
    assert loop.num_doubled >= 2
    assert loop.scheduler.num_preemptions == 0


@pytest.mark.parametrize("place", PLACES)
def test_rows_that_alternate_begin_anew_where_steps_fail(
    expected_of_alike: Expected,
    runner: TorchRunner,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
) -> None:
    fail_steps(runner, monkeypatch, place)
    loop = Loop(runner, expected_of_alike, **WATCHED)
    assert all(right(loop.run(), expected_of_alike))
    assert loop.num_failed >= 2
    assert loop.num_doubled >= 2
    assert loop.scheduler.prefix_cache_hits > 0


def test_an_answer_of_a_row_that_alternates_is_marked(
    expected_of_turns: Expected, runner: TorchRunner
) -> None:
    loop = Loop(runner, expected_of_turns, max_model_len=80, **WATCHED)
    assert all(right(loop.run(), expected_of_turns))
    assert loop.scheduler.prefix_cache_hits > 0


def test_a_state_of_the_wrong_place_is_seen(
    expected: Expected, runner: TorchRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_steps(monkeypatch, lambda rows: {**rows, "reads": rows["slots"]}, lambda _: None)
    loop = Loop(runner, expected, **WATCHED)
    assert not all(right(loop.run(), expected))


# --- drafts ---------------------------------------------------------------------------------------


@pytest.fixture
def drafting(model: LoadedModel) -> Iterator[TorchRunner]:
    if kernels() is None:
        pytest.skip("no C compiler")
    runner = runner_of(model, packs=True)
    assert runner.info.takes_drafts
    yield runner
    runner.close()


@pytest.mark.parametrize("end_at", [None, 7])
@pytest.mark.parametrize("most", [1, 4, 16])
def test_rows_that_are_watched_are_drafted(
    expected: Expected, drafting: TorchRunner, most: int, end_at: int | None
) -> None:
    """Where reasoning ends among drafts, the row goes on from the state in front of the next one,
    and has no place for another any more.
    """
    loop = Loop(
        drafting,
        expected,
        num_snapshots=MOST_SNAPSHOTS,
        is_watched=True,
        end_at=end_at,
        most_drafts=most,
    )
    assert all(right(loop.run(), expected))
    assert 0 < loop.num_right < loop.num_drafts
    assert loop.scheduler.num_preemptions == 0


@pytest.mark.parametrize("place", PLACES)
def test_steps_with_drafts_that_fail(
    expected: Expected, drafting: TorchRunner, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    fail_steps(drafting, monkeypatch, place)
    loop = Loop(drafting, expected, num_snapshots=MOST_SNAPSHOTS, most_drafts=4)
    assert all(right(loop.run(), expected))
    assert loop.num_failed >= 2
    assert loop.num_right > 0


def test_a_state_behind_a_wrong_draft_is_seen(
    expected: Expected, drafting: TorchRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_steps(monkeypatch, lambda rows: {**rows, "reads": rows["slots"]}, lambda _: None)
    loop = Loop(drafting, expected, num_snapshots=MOST_SNAPSHOTS, most_drafts=4)
    assert not all(right(loop.run(), expected))


def not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row behind a shared prefix gets what its slot held before."""
    monkeypatch.setattr(StatePool, "load", lambda *_: None)


def saved_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state is saved a token before the end of its block."""

    def early(rows: Any) -> Any:
        saves = {
            row: [(max(1, length - 1), snapshot) for length, snapshot in each]
            for row, each in rows["saves"].items()
        }
        return {**rows, "saves": saves}

    change_steps(monkeypatch, early, lambda _: None)


def of_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What rows load is mixed up."""
    load = StatePool.load
    monkeypatch.setattr(
        StatePool,
        "load",
        lambda pool, slots, snapshots: load(pool, slots, (snapshots + 1) % MOST_SNAPSHOTS),
    )


def kept_though_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What failed steps were to save is forgotten with blocks alone."""
    forget = RequestBlocks.forget
    monkeypatch.setattr(RequestBlocks, "forget", lambda self, blocks, _: forget(self, blocks))


@pytest.mark.parametrize(
    "mutant",
    [not_loaded, saved_early, of_other_rows, kept_though_failed],
    ids=lambda it: it.__name__,
)
def test_a_wrong_state_of_the_cache_is_seen(
    expected_of_alike: Expected,
    runner: TorchRunner,
    monkeypatch: pytest.MonkeyPatch,
    mutant: Callable[[pytest.MonkeyPatch], None],
) -> None:
    mutant(monkeypatch)
    if mutant is kept_though_failed:
        fail_steps(runner, monkeypatch, "before the forward")
    loop = Loop(runner, expected_of_alike, num_snapshots=MOST_SNAPSHOTS)
    assert not all(right(loop.run(), expected_of_alike))


@pytest.fixture(scope="module")
def expected_of_turns(folder: Path) -> Expected:
    return turns_of(folder)


def turns_of(folder: Path) -> Expected:
    """Conversations of two turns: the second one's prompt has the first one's answer."""
    first = outputs_of(folder, [prompt for prompt in apart() if len(prompt) > BLOCK])
    rng = random.Random(7)
    turns = [
        [*prompt, *output[:NUM_OUTPUTS], *random_ids(rng, 3)]
        for prompt, output in zip(first.prompts, first.outputs, strict=True)
    ]
    second = outputs_of(folder, turns)
    return Expected([*first.prompts, *second.prompts], [*first.outputs, *second.outputs])


def test_a_second_turn_continues_within_the_first_ones_answer(
    expected_of_turns: Expected, runner: TorchRunner
) -> None:
    loop = Loop(runner, expected_of_turns, num_snapshots=MOST_SNAPSHOTS, max_model_len=80)
    assert all(right(loop.run(), expected_of_turns))
    turns = expected_of_turns.prompts[len(expected_of_turns.prompts) // 2 :]
    within = [
        loop.scheduler.num_shared(row) > len(prompt) - 3 - NUM_OUTPUTS
        for row, prompt in enumerate(expected_of_turns.prompts)
        if row >= len(turns)
    ]
    assert all(within)


def test_a_row_whose_launched_step_is_dropped_continues_within_its_answer(
    expected: Expected, runner: TorchRunner
) -> None:
    loop = Loop(runner, expected, doubles=(6, 18, 30), num_snapshots=MOST_SNAPSHOTS)
    assert all(right(loop.run(), expected))
    assert loop.scheduler.num_preemptions == loop.num_doubled >= 2
    assert loop.scheduler.prefix_cache_hits > 0


def test_the_state_of_another_row_in_an_answers_mark_is_seen(
    expected_of_turns: Expected, runner: TorchRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = StatePool.save

    def misplaced_save(pool: StatePool, slots: torch.Tensor, snapshots: torch.Tensor) -> None:
        save(pool, (slots + 1) % ROWS_AT_ONCE, snapshots)

    monkeypatch.setattr(StatePool, "save", misplaced_save)
    loop = Loop(runner, expected_of_turns, num_snapshots=MOST_SNAPSHOTS, max_model_len=80)
    assert not all(right(loop.run(), expected_of_turns))


def test_time_steps_that_prompts_alone_limit(tmp_path: Path) -> None:
    """Answers that are computed again are computed as before, and not as the prompts that they are
    in next turns.
    """
    if kernels() is None:
        pytest.skip("no C compiler")
    torch.set_num_threads(1)
    [tiny] = (each for each in tiny_models.HYBRIDS if each.name == "Nemotron-H, limited")
    tiny_models.save(tiny, tmp_path)
    expected = turns_of(tmp_path)
    runner = runner_of(load_model(str(tmp_path), device="cpu", dtype="float32"), packs=True)
    try:
        assert runner._is_recorded
        assert not runner.info.caches_answers
        for num_blocks in (120, 24):
            for caches_answers in (False, True):
                loop = Loop(
                    runner,
                    expected,
                    num_blocks=num_blocks,
                    num_snapshots=MOST_SNAPSHOTS,
                    max_model_len=80,
                    caches_answers=caches_answers,
                )
                assert all(right(loop.run(), expected)) != caches_answers
                assert (loop.scheduler.num_preemptions > 0) == (num_blocks == 24)
                assert loop.scheduler.prefix_cache_hits > 0
    finally:
        runner.close()


@pytest.mark.parametrize("name", ["Jamba", "Mamba", "Falcon-Mamba"])
def test_what_forgets_its_state_in_chunks_is_cached_where_kernels_compute_it(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Transformers' Mamba-1, whose chunks that continue a row are single tokens elsewhere."""
    if kernels() is None:
        pytest.skip("no C compiler")
    torch.set_num_threads(1)
    [tiny] = (each for each in tiny_models.HYBRIDS if each.name == name)
    tiny_models.save(tiny, tmp_path)
    model = load_model(str(tmp_path), device="cpu", dtype="float32", max_model_len=80)
    turns = turns_of(tmp_path)
    with closing(runner_of(model, packs=False)) as runner:
        assert runner.info.num_snapshots == 0
        said = "forgets its state where a chunk continues a row, so chunks of a prompt"
        assert said in caplog.text
        assert "prefix caching is off" in caplog.text
    caplog.clear()
    with closing(runner_of(model, packs=True)) as runner:
        assert runner.info.num_snapshots == MOST_SNAPSHOTS
        for expected, num_blocks in (
            (turns, 120),
            (turns, 24),
            (outputs_of(tmp_path, alike()), 120),
        ):
            loop = Loop(
                runner,
                expected,
                num_blocks=num_blocks,
                num_snapshots=runner.info.num_snapshots,
                max_model_len=80,
            )
            assert all(right(loop.run(), expected))
            assert loop.scheduler.prefix_cache_hits >= 60
    assert not caplog.text
