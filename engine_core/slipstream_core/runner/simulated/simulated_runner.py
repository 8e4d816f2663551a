"""A simulated device and model: time passes and tokens come, but nothing is computed.

The device has a clock that runs steps in launch order and a paged cache that holds real numbers.
`SimulatedText` decides which token follows which history.

- A step ends at max(launch, end of the previous step) + step_ms + prefill tokens * prefill_us.
  There is no thread and no busy loop: collect() sleeps until then.
- Idle time lies between a step's end and the next launch.
- The cache keeps for each token a running hash of the history up to it; a chunk reads the hash
  before it through its block table. A wrong block, slot, position or input id changes the text.
- A step that no device could run (a slot outside the cache, an id outside the vocabulary, a write
  to the null block) fails on its own, like one that raised in a model.
- A plan that awaits masks is computed when they come; its time counts from its launch.
- There are no logits, so what would change them is ignored: temperatures above 0, truncation and
  a plan's `constraints` (penalties, biases, allowed ids, bad words). Ids masked by min_tokens are
  honoured, as they decide where a stream ends.
- With `synthetic_acceptance_length` a step gives its sampled rows several tokens, as a model with
  right drafts would: those that single steps would have given. A row whose next ids are masked, by
  min_tokens or a grammar, gets one, and so does each row of a step with wide log-probabilities.
- Its name always begins with `simulated:`, so that its speed is not mistaken for a model's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np

from slipstream_core.config import CoreConfig
from slipstream_core.runner.simulated.simulated_text import SimulatedText, drawn_lengths
from slipstream_core.step.plan import (
    Candidates,
    Logprobs,
    ModelInfo,
    StepFailed,
    StepPlan,
    StepResult,
)
from slipstream_ipc.arrays import Bools, Float32s, Int32s, Int64s, UInt32s, UInt64s
from slipstream_ipc.history.wide_logprobs import MAX_NARROW
from slipstream_ipc.telemetry.trace import SpanKind, Tracer, open_tracer
from slipstream_ipc.validation.simulated_model import parse_simulated

_DEFAULT_MAX_MODEL_LEN = 4096
_ENTRY_BYTES = 8  # one hash per token
_NONE: Int64s = np.empty(0, np.int64)


class SimulatedRunner:
    """Runs plans against `text`; the module docstring says what is simulated."""

    def __init__(
        self,
        text: SimulatedText,
        info: ModelInfo,
        *,
        num_blocks: int,
        max_num_seqs: int,
        step_ms: float,
        prefill_us: float,
        synthetic_acceptance_length: float = 1.0,
        tracer: Tracer | None = None,
    ) -> None:
        """synthetic_acceptance_length: the mean number of tokens that a step gives to a row."""
        self.text = text
        self.info = info
        self.num_blocks = num_blocks  # the null block included
        self.idle_s = 0.0  # between steps
        self.busy_s = 0.0  # in steps
        self._tracer = tracer
        self._step_s = step_ms / 1e3
        self._prefill_s = prefill_us / 1e6  # per token
        # how many tokens each sampled row gets, by the hashes of their histories; None: one each
        self.draw_lengths: Callable[[UInt64s], Int64s] | None = None
        if synthetic_acceptance_length > 1:
            self.draw_lengths = partial(drawn_lengths, mean=synthetic_acceptance_length)
        self._cache: UInt64s = np.zeros(num_blocks * info.block_size, np.uint64)
        # the ids beside the hashes, for answers that are chosen by what a prompt says
        self._cached_ids: Int64s | None = None
        if text.answers is not None and text.answers.asks_for_prompts:
            self._cached_ids = np.zeros(num_blocks * info.block_size, np.int64)
        self._last_token: Int64s = np.zeros(max_num_seqs, np.int64)
        max_blocks = -(-info.max_model_len // info.block_size)
        self._tables: Int32s = np.zeros((max_num_seqs, max_blocks), np.int32)
        self._end: float | None = None  # end of the step launched last
        # end and outcome, oldest first; None: the plan awaits its masks
        self._results: deque[tuple[float, StepResult | StepFailed | None]] = deque()

    def launch(self, plan: StepPlan) -> None:
        """Enqueue a step. Its result is computed here; its time passes until collect()."""
        now = time.monotonic()
        begin = now if self._end is None else max(now, self._end)
        if self._end is not None:
            self.idle_s += begin - self._end
        prefill_tokens = plan.num_tokens - plan.num_decodes
        duration = self._step_s + prefill_tokens * self._prefill_s
        self.busy_s += duration
        self._end = begin + duration
        if self._tracer is not None:
            self._tracer.add(SpanKind.DEVICE, int(begin * 1e9), int(self._end * 1e9), plan.step)
        result = None if plan.awaits_masks else self._outcome(plan, None)
        self._results.append((self._end, result))

    def sample(self, plan: StepPlan, masks: Int32s) -> None:
        """Provide the masks that the plan launched last awaits."""
        end, pending = self._results.pop()
        assert pending is None, "no plan awaits masks"
        self._results.append((end, self._outcome(plan, masks)))

    def collect(self) -> StepResult:
        """Sleep until the oldest step ends and return its result. Raises StepFailed."""
        end, result = self._results[0]
        wait = end - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        self._results.popleft()
        assert result is not None, "collected before it was given its masks"
        if isinstance(result, StepFailed):
            raise result
        return result

    def done(self) -> bool:
        """True if collect() would return without waiting."""
        return bool(self._results) and self._results[0][0] <= time.monotonic()

    def fileno(self) -> int | None:
        """Return None: this device is waited for by the clock."""
        return None

    def done_at(self) -> float | None:
        """time.monotonic() at which the oldest step ends, or None if none is launched."""
        return self._results[0][0] if self._results else None

    def close(self) -> None:
        """Drop the steps not yet collected."""
        self._results.clear()
        if self._tracer is not None:
            self._tracer.close()

    def _outcome(self, plan: StepPlan, masks: Int32s | None) -> StepResult | StepFailed:
        try:
            return self._execute(plan, masks)
        except (ValueError, IndexError) as error:
            return StepFailed(plan.step, error)

    def _execute(self, plan: StepPlan, masks: Int32s | None) -> StepResult:
        """Write the hashes of all tokens into the cache, then sample."""
        self._tables[plan.table_slots, plan.table_numbers] = plan.table_blocks
        self._check(plan)
        ids = np.where(plan.gather_slots >= 0, self._last_token[plan.gather_slots], plan.token_ids)
        if ids.min(initial=0) < 0 or ids.max(initial=0) >= self.info.vocab_size:
            raise ValueError(f"token ids outside of the vocabulary of {self.info.vocab_size}")
        sums = np.cumsum(self.text.mix(ids, plan.positions))
        ends = np.cumsum(plan.query_lens, dtype=np.int64)
        starts = ends - plan.query_lens
        first = plan.positions[starts]
        before = np.zeros(plan.num_requests, np.uint64)
        continues = first > 0
        before[continues] = self._read(plan, continues, first[continues] - 1)
        was_read = before.copy()
        before[1:] -= sums[ends[:-1] - 1]  # modulo 2**64: subtract the sum of the rows in front
        self._cache[plan.kv_slots] = sums + np.repeat(before, plan.query_lens)
        if self._cached_ids is not None:
            self._cached_ids[plan.kv_slots] = ids
        if plan.num_requests - plan.num_decodes > 1:
            self._reread(plan, starts, ends, was_read)
        return self._sample(plan, masks)

    def _reread(self, plan: StepPlan, starts: Int64s, ends: Int64s, was_read: UInt64s) -> None:
        """Correct chunks that continue from a slot written by another chunk of this step.

        A row shares blocks only with rows in front of it, so one pass in order is enough.
        `was_read` is the hash that each row found before anything was written, [R].
        """
        rows = np.arange(plan.num_decodes, plan.num_requests)
        rows = rows[plan.positions[starts[rows]] > 0]
        size = self.info.block_size
        numbers, offsets = np.divmod(plan.positions[starts[rows]] - 1, size)
        read_slots = self._tables[plan.slots[rows], numbers].astype(np.int64) * size + offsets
        follows = np.isin(read_slots, plan.kv_slots[plan.num_decodes :])
        for row, slot in zip(rows[follows].tolist(), read_slots[follows].tolist(), strict=True):
            # arrays, as numpy warns about overflow modulo 2**64 for scalars
            difference = self._cache[[slot]] - was_read[[row]]
            self._cache[plan.kv_slots[starts[row] : ends[row]]] += difference

    def _sample(self, plan: StepPlan, masks: Int32s | None) -> StepResult:
        rows = plan.samples
        kv_lens = plan.kv_lens[rows].astype(np.int64)
        prompt_lens = plan.prompt_lens[rows].astype(np.int64)
        here = self._read(plan, rows, kv_lens - 1)
        prompts = self._read(plan, rows, prompt_lens - 1)
        self._learn_prompts(plan, rows, prompts)
        start, probed = self.text.start(
            seeds=np.where(plan.temperatures > 0, plan.seeds, 0),
            outputs=kv_lens - prompt_lens,
            here=here,
            prompt=prompts,
            probe=self._read(plan, rows, self.text.probe_position(here, kv_lens)),
        )
        token_ids = self.text.pick(start, plan.masked_rows, plan.masked_ids)
        if masks is not None:
            at = plan.grammar_rows
            token_ids[at] = self.text.pick_allowed(start[at], masks)
        counts = None
        if self.draw_lengths is not None and not plan.any_wide:
            counts = self.draw_lengths(here).copy()
            counts[plan.masked_rows] = 1
            counts[plan.grammar_rows] = 1
            token_ids, probed = self._continue(plan, counts, token_ids, here, prompts, probed)
        ends = np.arange(1, 1 + len(here)) if counts is None else np.cumsum(counts)
        self._last_token[plan.slots[rows]] = token_ids[ends - 1]
        logprobs = None
        if plan.max_logprobs >= 0:
            values, ids = self.text.logprobs(probed, token_ids, plan.max_logprobs)
            if plan.listed is not None:
                for row, listed in zip(plan.listed.rows.tolist(), plan.listed.ids, strict=True):
                    begin = 0 if row == 0 else int(ends[row - 1])
                    for token in range(begin, int(ends[row])):
                        self._put_listed(values[token], ids[token], listed)
            logprobs = Logprobs(values, ids, np.ones(len(ids), np.uint32))
        wide: list[tuple[int, Candidates]] = []
        for row, num in enumerate(plan.num_logprobs.tolist() if plan.any_wide else ()):
            if num >= MAX_NARROW:
                own = slice(row, row + 1)
                listed = None if plan.listed is None else plan.listed.of(row)
                those = self._candidates(probed[own], token_ids[own], num)
                if listed is not None:
                    self._put_listed(those.values[0], those.ids[0], listed)
                wide.append((row, those))
        prompt: list[Candidates] = []
        if plan.prompt is not None:
            hashes = self._cache[plan.kv_slots[plan.prompt.tokens]]
            last = np.cumsum(plan.prompt.counts)
            for end, count, num in zip(
                last, plan.prompt.counts, plan.prompt.num_logprobs, strict=True
            ):
                own = slice(end - count, end)
                prompt.append(self._candidates(hashes[own], plan.prompt.targets[own], int(num)))
        return StepResult(plan.step, token_ids, logprobs, tuple(wide), tuple(prompt), counts)

    def _continue(
        self,
        plan: StepPlan,
        counts: Int64s,
        token_ids: Int64s,
        here: UInt64s,
        prompts: UInt64s,
        probed: UInt64s,
    ) -> tuple[Int64s, UInt64s]:
        """The ids of `counts` tokens of each sampled row, row by row, and the hashes that chose
        them, both [sum(counts)]. Those behind a row's first one, `token_ids` [S], are not computed
        in the cache: the next step does that.
        """
        kv_lens = plan.kv_lens[plan.samples].astype(np.int64)
        outputs = kv_lens - plan.prompt_lens[plan.samples]
        seeds = np.where(plan.temperatures > 0, plan.seeds, 0)
        most = int(counts.max(initial=1))
        ids = np.repeat(token_ids[:, None], most, axis=1)  # [S, most]
        chosen = np.repeat(probed[:, None], most, axis=1)
        hashes = np.repeat(here[:, None], most, axis=1)  # of the history in front of each token
        rows = np.flatnonzero(counts > 1)
        for at in range(1, most):
            rows = rows[counts[rows] > at]
            length = kv_lens[rows] + at
            before = hashes[rows, at - 1] + self.text.mix(ids[rows, at - 1], length - 1)
            hashes[rows, at] = before
            position = self.text.probe_position(before, length)
            is_new = position >= kv_lens[rows]  # and so not in the cache
            of_plan = np.flatnonzero(plan.samples)[rows]
            probe = self._read(plan, of_plan, np.where(is_new, 0, position))
            behind = np.where(is_new, position - kv_lens[rows] + 1, 0)
            start, chosen[rows, at] = self.text.start(
                seeds=seeds[rows],
                outputs=outputs[rows] + at,
                here=before,
                prompt=prompts[rows],
                probe=np.where(is_new, hashes[rows, behind], probe),
            )
            ids[rows, at] = self.text.pick(start, _NONE, _NONE)
        is_given = np.arange(most) < counts[:, None]
        return ids[is_given], chosen[is_given]

    def _learn_prompts(self, plan: StepPlan, rows: Bools, prompts: UInt64s) -> None:
        """Give the played answers the prompts that they have not seen."""
        answers = self.text.answers
        if answers is None:
            return
        sampled = np.flatnonzero(rows)
        for i in answers.missing(prompts):
            ids: Int64s = np.empty(0, np.int64)
            if self._cached_ids is not None:
                positions = np.arange(plan.prompt_lens[sampled[i]])
                numbers, offsets = np.divmod(positions, self.info.block_size)
                blocks = self._tables[plan.slots[sampled[i]], numbers].astype(np.int64)
                ids = self._cached_ids[blocks * self.info.block_size + offsets]
            answers.learn(int(prompts[i]), ids)

    def _candidates(self, hashes: UInt64s, token_ids: Int64s, num: int) -> Candidates:
        values, ids = self.text.logprobs(hashes, token_ids, num)
        ids[:, 0] = token_ids  # a prompt may contain special ids
        return Candidates(values, ids, np.ones(len(ids), np.uint32))

    def _put_listed(self, values: Float32s, ids: UInt32s, listed: Int64s) -> None:
        """Replace one token's most likely ids by the listed ones, as many as fit."""
        some = listed[: len(ids) - 1]
        values[1 : 1 + len(some)] = self.text.listed_logprobs(float(values[0]), int(ids[0]), some)
        ids[1 : 1 + len(some)] = some

    def _read(self, plan: StepPlan, rows: Bools | Int64s, positions: Int64s) -> UInt64s:
        """The hash at one position of each of the plan's `rows`, through its block table."""
        size = self.info.block_size
        blocks = self._tables[plan.slots[rows], positions // size]
        if not blocks.all():
            raise ValueError("a block table ends before the position that is read")
        hashes: UInt64s = self._cache[blocks.astype(np.int64) * size + positions % size]
        return hashes

    def _check(self, plan: StepPlan) -> None:
        """Raise ValueError for what would be an illegal access on a device."""
        if plan.kv_slots.min() < self.info.block_size or plan.kv_slots.max() >= len(self._cache):
            raise ValueError(
                f"kv_slots from {plan.kv_slots.min()} to {plan.kv_slots.max()}; the cache goes "
                f"from {self.info.block_size}, behind the null block, to {len(self._cache) - 1}"
            )
        if plan.positions.min() < 0 or plan.positions.max() >= self.info.max_model_len:
            raise ValueError(f"positions outside of max_model_len {self.info.max_model_len}")


def load_simulated(config: CoreConfig) -> SimulatedRunner:
    """Build the runner described by `config.model`, a string `simulated:…`.

    The cache has `config.num_blocks` blocks; by default enough for every slot at full length,
    within `config.kv_cache_gib`. Raises ValueError for options that are unknown or out of range.
    """
    options = parse_simulated(config.model)
    max_model_len = config.max_model_len or options.max_model_len or _DEFAULT_MAX_MODEL_LEN
    if options.max_model_len is not None and max_model_len > options.max_model_len:
        raise ValueError(
            f"max_model_len is {max_model_len}, but {config.model} allows {options.max_model_len}"
        )
    text = SimulatedText(options)
    block_bytes = config.block_size * _ENTRY_BYTES
    num_blocks = config.num_blocks
    if num_blocks is None:
        wanted = config.max_num_seqs * -(-max_model_len // config.block_size) + 1
        num_blocks = min(wanted, int(config.kv_cache_gib * 2**30) // block_bytes)
    info = ModelInfo(
        name=config.model,
        vocab_size=text.vocab_size,
        max_model_len=max_model_len,
        # without answers special ids are never sampled, so there is no end-of-text token
        eos_token_ids=() if text.answers is None else text.answers.eos_token_ids,
        block_bytes=block_bytes,
        block_size=config.block_size,
    )
    return SimulatedRunner(
        text,
        info,
        num_blocks=num_blocks,
        max_num_seqs=config.max_num_seqs,
        step_ms=options.step_ms,
        prefill_us=options.prefill_us,
        synthetic_acceptance_length=options.synthetic_acceptance_length,
        tracer=open_tracer(config.trace, "device"),
    )
