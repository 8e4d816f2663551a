"""`slipstream bench speculation`: steps and speed with drafts from a request's own text, without
them in turn, and what drafting costs where nothing repeats.

The scheduler and the runner alone, one step ahead, on the CPU in float32. Random weights edit
nothing, so in the runs called `edit` what is sampled is replaced by a text: a module of Python's
library with a name changed, behind that module as it is. All else of a step is computed. Those
called `predicted` say the same, but their prompts have nothing of it: the module as it is is their
prediction, and `unpredicted` is what their own text gives without. In the runs called `fresh` the
model samples at temperature 1, and nothing repeats; in those called `again` it has given these
answers before. Those called `forced` are of the demo model, which has learnt to spell: JSON without
blanks by a schema of ten keys. Those called `model` have a draft model: a model of sixteen layers,
of which all but the first two say little, and one of these two, at temperature 0.8.

A round measures each kind with drafts and without, in turn; the speed is the median of the pairs'
ratios. Numbers of steps do not depend on the machine. A line a goal says what was to be reached.
"""

from __future__ import annotations

import argparse
import statistics
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from msgspec import structs
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from slipstream.cli.options.parser import Parser
from slipstream.demo_model import MODEL_PATH
from slipstream_bench.common.measures import Row
from slipstream_bench.common.options import Option, add, fill_in, integer
from slipstream_bench.common.report import add_common, check_common, print_rows
from slipstream_core.config import CoreConfig, SpeculativeConfig
from slipstream_core.drafting.answer_memory import AnswerMemory
from slipstream_core.drafting.drafter import Drafter
from slipstream_core.drafting.model_drafter import ModelDrafter
from slipstream_core.drafting.ngram_drafter import NgramDrafter
from slipstream_core.drafting.step_costs import StepCosts
from slipstream_core.engine.build import drafter_of, model_drafter_of
from slipstream_core.grammar.bitmasks import GrammarBitmasks
from slipstream_core.grammar.llguidance_backend import Vocabulary, ids_as_mask
from slipstream_core.grammar.matcher import GrammarMatcher, SharedGrammar
from slipstream_core.runner import sample_stage, torch_factory
from slipstream_core.runner.torch_runner import TorchRunner
from slipstream_core.step.plan import ModelInfo, StepPlan
from slipstream_ipc.history.token_log import TokenLog
from slipstream_ipc.messages import StructuredOutputs
from slipstream_ipc.row_set import RowSet
from slipstream_lab.common.bare_loop import Driven, LoopRequest, drive, random_prompts
from slipstream_lab.common.goals import Goal
from slipstream_lab.compare.small_model import SMALL_MODEL

_BUDGET = 2048
_MAX_MODEL_LEN = 4096
_DRAFTS = SpeculativeConfig(
    method="ngram", num_speculative_tokens=8, prompt_lookup_min=2, prompt_lookup_max=4
)
_CHANGED = ("text", "content")  # a name in the module, and what it becomes
_LEAST = {("edit", 1): 2.5, ("edit", 8): 1.5, ("fresh", 1): 0.98, ("fresh", 8): 0.98}
_LEAST[("fresh", 64)] = 0.98
_LEAST |= {("again", 1): 2.5, ("again", 8): 1.5}
_LEAST |= {("predicted", 1): 2.5, ("predicted", 8): 1.5}
_MEASURED = (*_LEAST, ("unpredicted", 1), ("unpredicted", 8))
_APART = ("predicted", "unpredicted")  # kinds whose prompts have nothing of the answer
_TOLD = ("edit", *_APART)  # kinds whose texts are given
_LEAST_FORCED, _MOST_FORCED_STEPS = 1.3, 0.67
_KEYS: tuple[str, ...] = ("name", "description", "version", "author", "license")
_KEYS += ("homepage", "repository", "keywords", "dependencies", "maintainers")
_SCHEMA = {
    "type": "object",
    "properties": {key: {"enum": ["yes", "no", "unknown"]} for key in _KEYS},
    "required": list(_KEYS),
    "additionalProperties": False,
}
_LEAST_BY_MODEL = 1.4
_LAYERS, _DRAFT_LAYERS, _LITTLE = 16, 2, 0.1  # of a pair; what the other layers' outputs are times
_MOST_US_A_TOKEN, _MOST_US_A_STEP = 0.5, 300.0
_HOST_ROWS = 1024
_MOST_FORCED = 400  # tokens of an answer by the schema

_OPTIONS = (
    Option("tokens", integer(8, 512), "tokens of each answer; default: 192, with --quick 24"),
    Option("prompt", integer(16, 1024), "tokens of a prompt that is edited", 256),
    Option("threads", integer(1), "threads that compute the model"),
)


DrafterOf = Callable[[GrammarBitmasks], Drafter | None]


class Sides(NamedTuple):
    """A pair of runs."""

    ratio: float  # tokens a second with drafts, in times of those without
    without: Driven
    drafted: Driven


def add_options(parser: Parser) -> None:
    """The benchmark's options."""
    add(parser.add_argument_group("what is measured"), _OPTIONS)
    add_common(parser, runs=5)
    parser.set_defaults(run=bench_speculation)


def bench_speculation(arguments: argparse.Namespace) -> int:
    """Measure and report."""
    check_common(arguments)
    values = fill_in(arguments, _OPTIONS)
    num_tokens = arguments.tokens or (24 if arguments.quick else 192)
    if values["threads"] is not None:
        torch.set_num_threads(values["threads"])
    config = CoreConfig(
        model=SMALL_MODEL,
        address="",
        device="cpu",
        dtype="float32",
        max_num_seqs=64,
        max_model_len=_MAX_MODEL_LEN,
        kv_cache_gib=1.0,
        threads=values["threads"],
        speculative_config=_DRAFTS,
    )
    runner = torch_factory.load_runner(config)
    try:
        rows = _in_pairs(runner, arguments.runs, num_tokens, values["prompt"])
    finally:
        runner.close()
    rows.append(_forced_row(config, arguments.runs))
    rows += _by_model_rows(config, arguments.runs, num_tokens)
    rows.append(host_row(num_tokens))
    columns = ("kind", "streams", "speedup", "steps", "drafted_steps", "drafts", "accepted")
    print_rows(rows, arguments, (*columns, "overlapped", "same", "us_a_token", "us_a_step"))
    print(*goals(rows), sep="\n")
    return 0


def goals(rows: Sequence[Row]) -> list[Goal]:
    """Return the goals, and whether they were met."""
    found = []
    for row in rows:
        kind, streams = row["kind"], row["streams"]
        if kind == "host":
            of = f"host, {streams} streams, us a"
            found.append(
                Goal(f"{of} token", _number(row["us_a_token"]), _MOST_US_A_TOKEN, is_most=True)
            )
            found.append(
                Goal(f"{of} step", _number(row["us_a_step"]), _MOST_US_A_STEP, is_most=True)
            )
        elif kind == "forced":
            of = "forced, 1 stream, times the"
            steps = _number(row["drafted_steps"]) / _number(row["steps"])
            found.append(Goal(f"{of} speed", _number(row["speedup"]), _LEAST_FORCED))
            found.append(Goal(f"{of} steps", steps, _MOST_FORCED_STEPS, is_most=True))
        elif (kind, streams) == ("model", 1):
            name = "a draft model, 1 stream, times the speed without drafts"
            found.append(Goal(name, _number(row["speedup"]), _LEAST_BY_MODEL))
        elif (str(kind), int(_number(streams))) in _LEAST:
            name = f"{kind}, {streams} streams, times the speed without drafts"
            found.append(
                Goal(name, _number(row["speedup"]), _LEAST[str(kind), int(_number(streams))])
            )
    return found


def _number(value: Any) -> float:
    return float(value)


def _in_pairs(runner: TorchRunner, rounds: int, num_tokens: int, prompt_len: int) -> list[Row]:
    found: dict[tuple[str, int], list[Sides]] = {key: [] for key in _MEASURED}
    edits = edited_texts(64, prompt_len, num_tokens)
    new = behind_others([text[prompt_len:] for text in edits], prompt_len, runner.info.vocab_size)
    old = [each[:num_tokens] for each in edited_texts(64, num_tokens, 0)]
    for at in range(rounds):
        for kind, streams in found:
            texts = new if kind in _APART else edits
            requests = _requests(kind, streams, num_tokens, texts, first=at * streams)
            if kind == "predicted":
                requests = [replace(each, prediction=tuple(old[each.seed])) for each in requests]
            drafter = _drafter_of(runner, requests if kind == "again" else ())
            with said(texts if kind in _TOLD else None):
                pair = _pair(runner, requests, drafter, is_reversed=at % 2 == 1)
            found[kind, streams].append(pair)
    return [_row(kind, streams, each) for (kind, streams), each in found.items()]


def _forced_row(config: CoreConfig, rounds: int) -> Row:
    """A stream at a time whose grammar forces most of what it says."""
    own = structs.replace(config, model=str(MODEL_PATH), max_model_len=1024)
    runner = torch_factory.load_runner(own)
    try:
        start = _grammar(runner.info)
        tokenizer = AutoTokenizer.from_pretrained(str(MODEL_PATH))
        pairs = []
        for at in range(rounds):
            ids = tokenizer(f"Package {at} is described by")["input_ids"]
            request = LoopRequest(np.array(ids, np.uint32), _MOST_FORCED, grammar=start)
            request = replace(request, temperature=0.7, seed=at)
            said = drive(runner, [request], budget=_BUDGET).outputs[0].token_ids
            num = min(said.index(each) for each in runner.info.eos_token_ids if each in said)
            requests = [replace(request, max_tokens=num + 1)]
            pairs.append(_pair(runner, requests, _drafter_of(runner), is_reversed=at % 2 == 1))
        return _row("forced", 1, pairs)
    finally:
        runner.close()


def _by_model_rows(config: CoreConfig, rounds: int, num_tokens: int) -> list[Row]:
    """A model with a draft model, whose prompts are random."""
    drafts = SpeculativeConfig(method="draft_model", model="", num_speculative_tokens=8)
    with TemporaryDirectory() as folder:
        target, small = save_pair(Path(folder))
        own = structs.replace(
            config,
            model=str(target),
            speculative_config=structs.replace(drafts, model=str(small)),
        )
        runner = torch_factory.load_runner(own)
        try:
            rows = []
            for streams in (1, 8):
                pairs = []
                for at in range(rounds):
                    prompts = random_prompts(streams, 32, runner.info.vocab_size, seed=at)
                    requests = [
                        LoopRequest(prompt, num_tokens, temperature=0.8, seed=row)
                        for row, prompt in enumerate(prompts)
                    ]
                    pairs.append(_pair_by_model(runner, own, requests, is_reversed=at % 2 == 1))
                rows.append(_row("model", streams, pairs))
            return rows
        finally:
            runner.close()


def _pair_by_model(
    runner: TorchRunner, config: CoreConfig, requests: Sequence[LoopRequest], *, is_reversed: bool
) -> Sides:
    by_model = model_drafter_of(config, runner.info)
    drafter = partial(drafter_of, config, runner.info, by_model=by_model)
    return _pair(runner, requests, drafter, by_model, is_reversed=is_reversed)


def save_pair(folder: Path, **sizes: int) -> tuple[Path, Path]:
    """Save a model and one of its first layers, of an eighth of them, which say much the same.
    sizes: of its configuration, in place of the usual.
    """
    shape: dict[str, Any] = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536}
    shape |= {"num_attention_heads": 8, "max_position_embeddings": _MAX_MODEL_LEN} | sizes
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=_LAYERS, **shape))
    draft = LlamaForCausalLM(LlamaConfig(num_hidden_layers=_DRAFT_LAYERS, **shape))
    with torch.no_grad():
        model.lm_head.weight.mul_(6.0)  # so that some tokens are likelier than others
        for layer in model.model.layers[_DRAFT_LAYERS:]:
            layer.self_attn.o_proj.weight.mul_(_LITTLE)
            layer.mlp.down_proj.weight.mul_(_LITTLE)
    state = model.state_dict()
    draft.load_state_dict({name: state[name] for name in draft.state_dict()})
    paths = folder / "model", folder / "draft"
    words = {f"<{at}>": at for at in range(shape["vocab_size"])}
    tokenizer = Tokenizer(WordLevel(words))
    for each, path in zip((model, draft), paths, strict=True):
        each.save_pretrained(path)
        tokenizer.save(str(path / "tokenizer.json"))
    return paths


def _grammar(info: ModelInfo) -> Callable[[], GrammarMatcher]:
    """Return what starts the schema's grammar."""
    ends = info.eos_token_ids
    vocabulary = Vocabulary(MODEL_PATH / "tokenizer.json", info.vocab_size, ends)
    outputs = StructuredOutputs(json=_SCHEMA, disable_any_whitespace=True)
    grammar = SharedGrammar(lambda: vocabulary.compile(outputs), spell=vocabulary.spell)
    mask = ids_as_mask(ends, info.vocab_size)
    return lambda: GrammarMatcher(grammar, frozenset(ends), mask, vocabulary.ends)


def _row(kind: str, streams: int, pairs: Sequence[Sides]) -> Row:
    drafted = [step for each in pairs for step in each.drafted.steps]
    plain = [step for each in pairs for step in each.without.steps]
    return {
        "kind": kind,
        "streams": streams,
        "speedup": statistics.median(each.ratio for each in pairs),
        "steps": len(plain),
        "drafted_steps": len(drafted),
        "drafts": sum(step.num_drafts for step in drafted),
        "accepted": sum(step.num_accepted for step in drafted),
        "overlapped": sum(step.is_overlapped for step in drafted) / len(drafted),
        "overlapped_without": sum(step.is_overlapped for step in plain) / len(plain),
        "same": all(_ids(each.drafted) == _ids(each.without) for each in pairs),
    }


def _ids(driven: Driven) -> list[list[int]]:
    return [each.token_ids for each in driven.outputs]


def _drafter_of(runner: TorchRunner, before: Sequence[LoopRequest] = ()) -> DrafterOf:
    """The drafter that is configured; with requests that were answered before, one that has their
    answers.
    """
    if not before:
        config = CoreConfig(model="", address="", speculative_config=_DRAFTS)
        return partial(drafter_of, config, runner.info)
    memory = AnswerMemory(1 << 30)
    for request, output in zip(before, drive(runner, before, budget=_BUDGET).outputs, strict=True):
        memory.add(b"", request.prompt, np.array(output.token_ids, np.uint32))
    drafts = structs.replace(_DRAFTS, method="suffix", num_speculative_tokens=16)
    config = CoreConfig(model="", address="", speculative_config=drafts)
    return partial(drafter_of, config, runner.info, memory=memory)


def _pair(
    runner: TorchRunner,
    requests: Sequence[LoopRequest],
    drafter_of: DrafterOf,
    by_model: ModelDrafter | None = None,
    *,
    is_reversed: bool,
) -> Sides:
    seconds, runs = {}, {}
    for is_drafted in (True, False) if is_reversed else (False, True):
        drafter = drafter_of if is_drafted else None
        model = by_model if is_drafted else None
        driven = drive(runner, requests, budget=_BUDGET, drafter=drafter, by_model=model)
        # from the first step on, which has the prompts
        seconds[is_drafted] = driven.steps[-1].at_s - driven.steps[0].at_s
        runs[is_drafted] = driven
    return Sides(seconds[False] / seconds[True], runs[False], runs[True])


def _requests(
    kind: str, streams: int, num_tokens: int, edits: Sequence[Sequence[int]], *, first: int
) -> list[LoopRequest]:
    """edits: texts of which a request has the beginning as its prompt."""
    rows = [(first + at) % len(edits) for at in range(streams)]
    prompts = [np.array(edits[row][: len(edits[row]) - num_tokens], np.uint32) for row in rows]
    temperature = 0.0 if kind in _TOLD else 1.0
    return [
        LoopRequest(prompt, num_tokens, temperature=temperature, seed=row)
        for row, prompt in zip(rows, prompts, strict=True)
    ]


def edited_texts(num: int, prompt_len: int, num_tokens: int) -> list[list[int]]:
    """Token ids: `prompt_len` of a module, then `num_tokens` of it with a name changed; each text
    from another place of it on.
    """
    tokenizer = AutoTokenizer.from_pretrained(str(MODEL_PATH))
    lines = Path(textwrap.__file__).read_text("utf-8").splitlines()
    texts = []
    for first in range(num):
        turned = lines[first:] + lines[:first]
        old = "\n".join(turned)
        new = old.replace(*_CHANGED)
        most = 8 * max(prompt_len, num_tokens)  # characters
        ids = [tokenizer(each[:most], add_special_tokens=False)["input_ids"] for each in (old, new)]
        texts.append([*ids[0][:prompt_len], *ids[1][:num_tokens]])
    return texts


def behind_others(
    answers: Sequence[Sequence[int]], prompt_len: int, vocab_size: int
) -> list[list[int]]:
    """Token ids: as many at random, each behind which comes one of the answers."""
    random = np.random.default_rng(0)
    return [[*random.integers(0, vocab_size, prompt_len).tolist(), *each] for each in answers]


@contextmanager
def said(texts: Sequence[Sequence[int]] | None) -> Iterator[None]:
    """Have runners sample these texts, which rows name by their seeds; None: what they sample."""
    runners: Any = sample_stage
    usual = runners.sample

    def told(logits: torch.Tensor, plan: StepPlan, *args: Any, **options: Any) -> Any:
        token_ids, logprobs = usual(logits, plan, *args, **options)
        assert texts is not None
        lens = plan.kv_lens[plan.samples].tolist()
        ids = [texts[seed][at] for seed, at in zip(plan.seeds.tolist(), lens, strict=True)]
        return token_ids.new_tensor(ids), logprobs

    if texts is not None:
        runners.sample = told
    try:
        yield
    finally:
        runners.sample = usual


def host_row(num_steps: int) -> Row:
    """Return the drafter's time in a step of many rows, none of which repeats anything."""
    rows, log = RowSet(np.arange(_HOST_ROWS)), TokenLog()
    drafter = NgramDrafter(
        num_speculative_tokens=_DRAFTS.num_speculative_tokens,
        prompt_lookup_min=_DRAFTS.prompt_lookup_min,
        prompt_lookup_max=_DRAFTS.prompt_lookup_max,
        costs=StepCosts(),
    )
    rng = np.random.default_rng(0)
    for row in range(_HOST_ROWS):
        log.open(row)
        log.extend(row, rng.integers(0, 32_000, 64).astype(np.uint32))
        drafter.open(row, b"", 0, np.empty(0, np.uint32))
    taken = []
    columns = rng.integers(0, 32_000, (64 + num_steps, _HOST_ROWS)).astype(np.uint32)
    for at, ids in enumerate(columns):
        log.append(rows, ids)
        taken.append(_observed_s(drafter, rows, ids, log) if at >= 64 else 0.0)
        if at < 64:  # prompts are taken in
            drafter.observe(rows, ids, None, log)
    seconds = statistics.median(taken[64:])
    return {
        "kind": "host",
        "streams": _HOST_ROWS,
        "us_a_token": 1e6 * seconds / _HOST_ROWS,
        "us_a_step": 1e6 * seconds,
    }


def _observed_s(
    drafter: NgramDrafter, rows: RowSet, ids: npt.NDArray[np.uint32], log: TokenLog
) -> float:
    begin = time.perf_counter()
    drafter.observe(rows, ids, None, log)
    return time.perf_counter() - begin
