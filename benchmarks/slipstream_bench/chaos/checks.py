"""Decides whether each stream is right, for a simulated model and for a real one.

- A simulated model computes integers, so everything must be identical.
- Every token of a real model must be the reference model's, or within its tolerance. A stream that
  diverges from the undisturbed one at such a near tie is right if its text matches its tokens and
  its finish reason follows from them. Over HTTP there are no token ids, so the text must be the
  same.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec import structs
from tokenizers import Tokenizer

from slipstream_bench.chaos.chaos_workload import ChaosRequest
from slipstream_bench.chaos.compare import ChaosAnswer, Streamed, Verdict, compare
from slipstream_bench.chaos.reference_model import (
    TOLERANCE,
    ReferenceModel,
    ReferenceSummary,
    summarise,
)
from slipstream_ipc.messages import ModelCard

_LOGPROB_TOLERANCE = 1e-3


def exact_verdicts(
    requests: Sequence[ChaosRequest], expected: Sequence[ChaosAnswer], streams: Sequence[Streamed]
) -> list[Verdict]:
    """Verdicts for a simulated model."""
    return [
        compare(answer, streamed, is_http=request.via == "http")
        for request, answer, streamed in zip(requests, expected, streams, strict=True)
    ]


def real_verdicts(
    requests: Sequence[ChaosRequest],
    expected: Sequence[ChaosAnswer],
    streams: Sequence[Streamed],
    card: ModelCard,
) -> tuple[list[Verdict], ReferenceSummary]:
    """Verdicts for a real model, and the summary of its reference model."""
    teacher = ReferenceModel(card)
    tokenizer = Tokenizer.from_file(str(Path(card.path) / "tokenizer.json"))
    verdicts: list[Verdict] = []
    margins: list[float] = []
    for request, answer, streamed in zip(requests, expected, streams, strict=True):
        if request.via == "http":
            verdicts.append(compare(answer, streamed, is_http=True))
            continue
        verdict = compare(answer, streamed, tolerance=_LOGPROB_TOLERANCE)
        found = teacher.margins(request, streamed.prompt_ids or (), streamed.token_ids)
        margins += found
        wrong = [f"token {i} lies {m:.3g} below" for i, m in enumerate(found) if m > TOLERANCE]
        if wrong:
            verdict = structs.replace(verdict, differences=(*verdict.differences, *wrong[:3]))
        elif tuple(streamed.token_ids) != answer.token_ids:
            problems = _problems_of_another(request, streamed, tokenizer)
            # a shorter answer has not lost positions
            verdict = Verdict(request.index, tuple(problems), streamed.lost, streamed.doubled)
        verdicts.append(verdict)
    return verdicts, summarise(margins)


def _problems_of_another(
    request: ChaosRequest, streamed: Streamed, tokenizer: Tokenizer
) -> list[str]:
    """The faults of a stream whose tokens are right but differ from the undisturbed ones."""
    params = request.params
    problems = list(streamed.problems)
    if streamed.error is not None:
        return [*problems, f"failed: {streamed.error}"]
    whole = tokenizer.decode(streamed.token_ids, skip_special_tokens=params.skip_special_tokens)
    if params.detokenize and not whole.startswith(streamed.text.rstrip("\ufffd")):
        problems.append("its text is not that of its tokens")
    if streamed.finish_reason == "length":
        if len(streamed.token_ids) != params.max_tokens:
            problems.append(f"ended by length with {len(streamed.token_ids)} tokens")
    elif streamed.finish_reason != "stop":
        problems.append(f"ended by {streamed.finish_reason}")
    return problems
