"""The plan of one step, which a runner executes, and the result that the runner returns.

A plan consists of plain numpy columns and flags: the scheduler decides every branch that a runner
takes, so that a plan can become one packed buffer for other ranks.

- Rows [0, num_decodes) compute one token each; the rows behind them are prefill chunks, or have
  drafts (`drafts`).
- A row's tokens are adjacent in the token columns, with rows in order.
- `gather_slots` names the slot whose last sampled token is the input id; it is -1 where `token_ids`
  holds the id. A runner executes steps in launch order, so it may read what the step before left in
  its `last_token[slot]`.
- A plan's arrays are never written again. One that the next plan has as well is the same array,
  which its readers need not look at again.
- A runner keeps a block table for each slot, and a plan has only the entries that are new: those of
  blocks that the step begins, and, in a row's first step since it got its slot, those of the cached
  prefix that it shares. So an entry comes with the first token that is computed in its block: as
  long as a table is behind, so is the cache, and a step that fails has its rows compute those
  tokens again. What a table names behind a row's tokens is left from a row before.
- Only rows with `samples` set are sampled; a prefill chunk that ends before its request's last
  known token is not.
- What rows with a grammar may sample depends on the ids of the step before, which the host does not
  have yet when a plan is launched. Their masks are passed later (`Runner.sample`), while the
  forward pass runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from slipstream_core.step.columns import Column, Over, PlanColumn, columns_of
from slipstream_core.step.constraint_plan import ConstraintPlan
from slipstream_ipc.arrays import Bools, Float32s, Int32s, Int64s, UInt32s
from slipstream_ipc.history.logprob_log import Logprobs as Logprobs
from slipstream_ipc.history.wide_logprobs import MAX_NARROW
from slipstream_ipc.history.wide_logprobs import Candidates as Candidates
from slipstream_ipc.messages import AdapterRef, MediaCard, SamplingDefaults


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPlan:
    """The prompt positions that a step scores: N positions of P of its rows."""

    rows: Int64s  # [P] indices among the plan's R rows
    starts: Int64s  # [P] first position of each
    counts: Int64s  # [P] number of positions from there on, at least one
    num_logprobs: Int64s  # [P] number of the most likely ids, besides the token itself
    tokens: Int64s  # [N] indices of the positions among the plan's T tokens
    targets: Int64s  # [N] the tokens behind them, whose log-probabilities are wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedLogprobs:
    """The ids that C of the S sampled rows list, instead of the most likely ones."""

    rows: Int64s  # [C] indices among the plan's S sampled rows, ascending
    ids: Int64s  # [C, longest list] padded with 0 behind the row's `num_logprobs`
    max_unlisted: int  # as `max_logprobs`, of the other rows

    def of(self, row: int) -> Int64s | None:
        """The ids of one sampled row, padded; None if it lists none."""
        at = int(np.searchsorted(self.rows, row))
        return self.ids[at] if at < len(self.rows) and self.rows[at] == row else None


@dataclass(frozen=True, slots=True)
class Alternation:
    """Rows that read their recurrent states from another place than they leave them in. A place is
    a slot, or `max_num_seqs` and a snapshot's number.
    """

    rows: Int64s  # [A] indices among the plan's R rows, ascending
    reads: Int64s  # [A] places
    writes: Int64s  # [A] places


_NOTHING: Int64s = np.empty(0, np.int64)

# slots [n] of rows whose states are saved in front of a step, and the snapshots [n]
FrontSaves = tuple[Int64s, Int64s]


class SnapshotPlan(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """The snapshots of recurrent states that a step loads and saves. Before its forward it loads
    first, and then saves those in front of tokens.
    """

    load_slots: Int64s = _NOTHING  # [L] of rows that begin behind a shared prefix
    loads: Int64s = _NOTHING  # [L] snapshots
    save_rows: Int64s = _NOTHING  # [M] indices among the plan's R rows, ascending
    # [M] behind so many of the row's tokens in this step, ascending in a row; of one with drafts
    # behind each token but the last
    save_lens: Int64s = _NOTHING
    # [M] snapshots, all different, also from `front_saves`; those in front of drafts have numbers
    # behind the prefix cache's
    saves: Int64s = _NOTHING
    # [F] of rows whose states are saved as they are before the forward
    front_places: Int64s = _NOTHING
    front_saves: Int64s = _NOTHING  # [F] snapshots
    alternation: Alternation | None = None  # all other rows keep their states in their slots


class ItemFeatures(Protocol):
    """An image as a model's language part sees it: rows, each in the place of a placeholder."""

    def __len__(self) -> int:
        """The number of rows."""

    def __hash__(self) -> int:
        """By identity."""


class MediaPlan(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """The images in a step: N of its T tokens are placeholders, in I pieces of images."""

    tokens: Int64s  # [N] indices among the T tokens
    features: tuple[ItemFeatures, ...]  # [I] the image of each piece, in the order of its tokens
    starts: Int64s  # [I] its first row in the step
    counts: Int64s  # [I] its rows there
    # [3, T] positions of all tokens for rotary embeddings, where a model has three to a token
    rope: Int64s | None = None


@dataclass(frozen=True, slots=True)
class ProposalPlan:
    """The tokens that a draft model foresees, one behind the other, of the S sampled rows."""

    lens: Int64s  # [S] of each row, at least one
    kv_slots: Int64s  # [sum(lens - 1)] places in the cache of all but each row's last, row by row


class StepPlan(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """One step over T tokens of R requests, of which S are sampled."""

    step: int
    num_decodes: int

    # token columns, all [T]
    token_ids: Annotated[Int64s, Column("T", "vocab", sent="always")]
    # -1: token_ids has the id
    gather_slots: Annotated[Int64s, Column("T", "rows", least=-1, fill=-1, sent="always")]
    positions: Annotated[Int64s, Column("T", "length", sent="always")]
    # the token's place in the cache: block * block_size + offset
    kv_slots: Annotated[Int64s, Column("T", "cache_slots", sent="always")]

    # request columns, all [R]
    slots: Annotated[Int64s, Column("R", "rows", sent="always")]
    query_lens: Annotated[Int32s, Column("R", fill=1, sent="always")]
    # tokens in the cache after this step
    kv_lens: Annotated[Int32s, Column("R", "length", reaches=True, fill=1, sent="always")]
    prompt_lens: Annotated[Int32s, Column("R", source="prompt_len", fill=1)]
    samples: Annotated[Bools, Column("R", fill=True, sent="always")]
    # the place of the row's adapter; -1: none
    adapters: Annotated[Int32s, Column("R", least=-1, source="adapter", fill=-1)]
    # how far the positions of the row's tokens are from their numbers, behind its images
    rope_deltas: Annotated[Int32s, Column("R", source="rope_delta")]

    # entries of block tables that are new in this step, [E]: all different
    table_slots: Annotated[Int64s, Column("E", "rows", sent="always")]
    table_numbers: Annotated[Int64s, Column("E", "table", sent="always")]  # of a block in its table
    table_blocks: Annotated[Int32s, Column("E", "blocks", sent="always")]

    # sampling columns of the S sampled rows, in row order
    seeds: Annotated[Int64s, Column("S", source="seed", sent="drawn")]
    # 0: greedy
    temperatures: Annotated[Float32s, Column("S", source="temperature", costly=1, sent="drawn")]
    top_ks: Annotated[Int32s, Column("S", source="top_k", costly=50, truncates=True)]  # 0 is off
    # 1 is off
    top_ps: Annotated[Float32s, Column("S", source="top_p", fill=1, costly=0.9, truncates=True)]
    min_ps: Annotated[Float32s, Column("S", source="min_p", truncates=True)]  # 0 is off
    # -1 none; k >= 0: the sampled token and the k most likely, or listed. Rows with
    # k >= MAX_NARROW are wide: returned in the result's `wide`, not in its columns
    num_logprobs: Annotated[Int32s, Column("S", source="num_logprobs", fill=-1, costly=20)]

    # masked ids (stop ids while a request is under its min_tokens), as coordinates into [S, vocab];
    # of a step with drafts, into the places that are sampled
    masked_rows: Annotated[Int64s, Column("M")]
    masked_ids: Annotated[Int64s, Column("M")]

    # which of the S sampled rows have a grammar, [G]: their masks are passed to `Runner.sample`
    grammar_rows: Annotated[Int64s, Column("G")]

    # flags, so that a runner need not inspect columns to choose a branch
    all_greedy: bool
    any_truncation: bool  # some sampled row is truncated
    max_logprobs: int  # of rows that are not wide; -1 none

    constraints: ConstraintPlan | None = None  # token constraints, if some sampled row has any
    any_wide: bool = False  # some sampled row is wide
    prompt: PromptPlan | None = None  # if some row wants prompt log-probabilities
    listed: ListedLogprobs | None = None  # if some sampled row lists ids
    snapshots: SnapshotPlan | None = None  # if the step loads or saves any
    # [R] how many of a row's last tokens are drafts, if any are: then all are sampled behind, with
    # the row's last known token in front of them (`drafts`)
    draft_lens: Int64s | None = None
    media: MediaPlan | None = None  # if some row computes tokens in front of its last image's end
    # ranks sample from their slices of the logits (`slice_sampling`); the first one says so
    sliced: bool = False
    # of a step of the draft model, which computes nothing else: the tokens that it foresees
    proposals: ProposalPlan | None = None

    @property
    def num_tokens(self) -> int:
        """T, the tokens this step computes."""
        return len(self.token_ids)

    @property
    def num_requests(self) -> int:
        """R, the rows of this step."""
        return len(self.slots)

    @property
    def awaits_masks(self) -> bool:
        """True if `Runner.sample` has to be called before the plan can be sampled."""
        return len(self.grammar_rows) > 0

    @property
    def is_proposal(self) -> bool:
        """True for a step of the draft model, which gives no tokens to its rows."""
        return self.proposals is not None

    @property
    def needs_whole_rows(self) -> bool:
        """True if some row's logits are edited or its log-probabilities wanted."""
        return (
            self.max_logprobs >= 0
            or self.any_wide
            or self.prompt is not None
            or self.constraints is not None
            or len(self.masked_rows) > 0
            or self.awaits_masks
        )


COLUMNS = columns_of(StepPlan)
"""The columns of a plan by name, in the order in which ranks are sent them."""


def columns_over(over: Over) -> dict[str, PlanColumn]:
    """The columns over tokens, rows, …, by name."""
    return {name: each for name, each in COLUMNS.items() if each.declared.over == over}


BY_TOKEN = tuple(columns_over("T"))
"""The columns by token; recorded forwards read them, with others by row."""

TRUNCATING = tuple(name for name, each in COLUMNS.items() if each.declared.truncates)
"""The columns that truncate sampled rows, each of them off at its fill."""


def sampling_flags(columns: Mapping[str, npt.NDArray[Any]]) -> dict[str, Any]:
    """The flags of a plan that follow from its sampling columns."""
    num_logprobs = columns["num_logprobs"]
    is_wide = num_logprobs >= MAX_NARROW
    truncates = any((columns[name] != COLUMNS[name].declared.fill).any() for name in TRUNCATING)
    return {
        "all_greedy": not columns["temperatures"].any(),
        "any_truncation": truncates,
        "max_logprobs": int(num_logprobs[~is_wide].max(initial=-1)),
        "any_wide": bool(is_wide.any()),
    }


def blank_plan(*, step: int = 1, num_decodes: int | None = None, **given: Any) -> StepPlan:
    """A plan of the columns and flags that are given; the others say what asks for nothing.

    There are as many tokens as `token_ids` and rows as `slots`, each of which computes one token
    unless `query_lens` says more. For trials and tests: a scheduler says all of it.
    """
    lens = given.get("query_lens", COLUMNS["query_lens"].blank(len(given["slots"])))
    samples = given.get("samples", COLUMNS["samples"].blank(len(lens)))
    nums = {"T": int(lens.sum()), "R": len(lens), "S": int(np.count_nonzero(samples))}
    columns = {
        name: given.get(name, each.blank(nums.get(each.declared.over, 0)))
        for name, each in COLUMNS.items()
    }
    if num_decodes is None:
        num_decodes = int(np.count_nonzero(np.logical_and.accumulate(lens == 1)))
    return StepPlan(
        step=step,
        num_decodes=num_decodes,
        **sampling_flags(columns) | columns | given,
    )


@dataclass(frozen=True, slots=True)
class StepResult:
    """The tokens that a step sampled, in the order of the plan's sampled rows."""

    step: int
    token_ids: Int64s  # [S], or [sum(counts)] row by row
    logprobs: Logprobs | None  # of rows that are not wide, an entry to each of `token_ids`
    wide: tuple[tuple[int, Candidates], ...] = ()  # of wide rows, by index among `token_ids`
    prompt: tuple[Candidates, ...] = ()  # of the P rows of the plan's `prompt`
    counts: Int64s | None = None  # [S] tokens of each row, at least one; None: one each
    draft_lens: Int64s | None = None  # [S] drafts that were computed for each row; None: none
    # indices [U] among the S sampled rows: their logits were NaN or infinite, so that their tokens
    # are made up; None: there are none
    undefined: Int64s | None = None


class LoadedAdapter(Protocol):
    """An adapter that has been read."""

    @property
    def digest(self) -> bytes:
        """The hash of its files, 16 bytes."""

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""

    @property
    def warning(self) -> str:
        """A note of files in its folder that are not used; empty: there are none."""


class AdapterStore(Protocol):
    """The adapters that a runner has in memory, each at a place that plans name."""

    def prepare_thread(self) -> None:
        """Make ready a thread that calls `read`."""

    def read(self, path: str, roots: Sequence[str] | None = None) -> LoadedAdapter:
        """The adapter in a folder, below one of `roots` unless they are None. Can be called from
        any thread. Raises AdapterError.
        """

    def put(self, place: int, adapter: Any) -> None:
        """Let a place have what `read` returned; no step may use it meanwhile."""

    def clear(self, place: int) -> None:
        """Free a place; no step may use it meanwhile."""

    def num_bytes(self, place: int) -> int:
        """Memory of what is at a place."""


class ImageEncoder(Protocol):
    """Makes features of images' files."""

    def prepare_thread(self) -> None:
        """Make ready the thread that calls `encode`."""

    def encode(self, data: bytes, max_pixels: int) -> ItemFeatures:
        """The features of an image. Raises ImageError, and whatever the model raises."""

    def with_rope(self, prompt: UInt32s, places: Any) -> Any:
        """A prompt's MediaPlaces with positions, where the model has three to a token."""

    def close(self) -> None:
        """End the process that decodes images. For any thread."""


NOT_DRAFTED = (
    "drafts are verified where a row's numbers do not depend on the rows beside it: float32 models "
    "on a CPU, in one process, whose decode steps are one call of kernels here; of hybrid models "
    "where kv_cache_gib has room for the states in front of drafts"
)
"""The reason why nothing is drafted of a model that does not take drafts."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The properties of a loaded model that the rest of the core uses."""

    name: str
    vocab_size: int
    max_model_len: int  # tokens, prompt and output together
    eos_token_ids: tuple[int, ...]
    block_bytes: int  # bytes of one block of `block_size` tokens, all layers
    block_size: int
    default_sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    max_num_seqs: int | None = None  # rows that its runner has room for; None: as configured
    has_states: bool = False  # recurrent ones, which cannot be taken back by a token
    num_snapshots: int = 0  # of such states, for the prefix cache; 0 turns that off
    num_draft_states: int = 0  # drafts that a step may have of a model with such states
    caches_answers: bool = True  # False: it computes them otherwise than prompts
    max_logprobs: int | None = None  # per token, that a request may ask for; None: as configured
    engine: str = ""  # another project's, with its version
    takes_drafts: bool = False  # computes plans with drafts, and a row's bits alone or with others
    decode_s: tuple[tuple[int, float], ...] = ()  # seconds by rows of a step, where measured
    draft_model_len: int = 0  # tokens that its draft model takes; 0: it has none
    draft_s: tuple[tuple[int, float], ...] = ()  # as `decode_s`, of the draft model
    draft_share: float = 1.0  # its parameters, in parts of the model's
    adapters: tuple[AdapterRef, ...] = ()  # that requests may name, by their places
    retired_adapters: tuple[AdapterRef, ...] = ()  # behind them, that older streams may have
    adapter_store: AdapterStore | None = None  # where there can be adapters
    media: MediaCard | None = None  # of images; None: it is made for text alone
    encoder: ImageEncoder | None = None  # where it takes images


class StepFailed(Exception):  # noqa: N818  (an outcome of a step, named like the field's results)
    """A step raised in the model; the runner itself continues with the next step."""

    def __init__(self, step: int, cause: BaseException) -> None:
        super().__init__(f"step {step} failed in the model: {type(cause).__name__}: {cause}")
        self.step = step


class PromptStarts(Protocol):
    """The prompts that a step scores a part of."""

    @property
    def starts(self) -> Int64s:
        """The first position of each part, [P]."""


class Turn(Protocol):
    """One step as the loop handles it, whatever the device is given to compute it.

    A `StepPlan` is one: it says all before the step runs. Where the device's own engine schedules,
    some of it is known only when the step is collected.
    """

    @property
    def step(self) -> int:
        """The step's number; those of a core ascend by one."""

    @property
    def num_tokens(self) -> int:
        """The tokens that the step computes; known once it is collected."""

    @property
    def num_requests(self) -> int:
        """Its requests; known once it is collected."""

    @property
    def awaits_masks(self) -> bool:
        """True if `TurnRunner.sample` has to be called before the step can sample."""

    @property
    def is_proposal(self) -> bool:
        """True if it gives no tokens, but foresees some for the step behind it; that one has the
        next number, and it the one of the step before.
        """

    @property
    def prompt(self) -> PromptStarts | None:
        """The prompts it scores, if any; known once it is collected."""


TurnT = TypeVar("TurnT", bound=Turn)
_TurnT_contra = TypeVar("_TurnT_contra", bound=Turn, contravariant=True)


class TurnRunner(Protocol[_TurnT_contra]):
    """Executes steps in launch order, on one device."""

    info: ModelInfo
    num_blocks: int  # of its cache, including the null block

    def launch(self, plan: _TurnT_contra) -> None:
        """Enqueue a step. Does not block."""

    def sample(self, plan: _TurnT_contra, masks: Int32s) -> None:
        """Pass the masks of a launched plan that awaits them. Does not block.

        `masks` [G, ceil(vocab / 32)] has a bit for each token id, the lowest first; 1 is allowed.
        Call it once for each such plan, in launch order, after all steps before it are collected.
        """

    def collect(self) -> StepResult:
        """Wait for the oldest launched step and return its result. Raises StepFailed."""

    def done(self) -> bool:
        """True if collect() would return without waiting."""

    def fileno(self) -> int | None:
        """A descriptor that is readable while a finished step waits to be collected, if any."""

    def done_at(self) -> float | None:
        """time.monotonic() at which the oldest step will be done, or None if unknown."""

    def close(self) -> None:
        """Stop the device's thread, free the cache. Idempotent."""


class Runner(TurnRunner[StepPlan], Protocol):
    """Executes the plans of this project's scheduler."""
