"""Requests that are made of undisturbed answers: some go on behind others', some predict their own.
Pure: the same seed and answers give the same requests.

- A later turn's prompt is that of an earlier request, its answer, and more ids, so it finds cached
  what the answer left. It comes behind the first half of the requests, which begin at once.
- A prediction is an edit of the answer. The answer is the same with it, so what it was undisturbed
  is what is expected, and how much of the prediction came follows from both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from msgspec import structs

from slipstream_ipc.history.prediction import FollowedPrediction
from slipstream_verify.chaos.compare import ChaosAnswer
from slipstream_verify.chaos.workload.chaos_workload import ChaosRequest, pick

_FIRST_ID = 100  # above the special tokens
_LATER_SHARE = 0.5  # of the second half
_MOST_NEW = 30  # ids behind the answer
_PREDICTED_SHARE = 0.4
_PUT = "Quux"  # a word of no answer


def later_turns(
    seed: int, requests: Sequence[ChaosRequest], answers: Sequence[ChaosAnswer], max_model_len: int
) -> list[ChaosRequest]:
    """Requests to take the place of those of the same index."""
    found = []
    middle = (len(requests) + 1) // 2
    for request in requests[middle:]:
        random = np.random.default_rng((seed, 4, request.index))
        first = answers[int(random.integers(middle))]
        new = random.integers(_FIRST_ID, 999, int(random.integers(1, _MOST_NEW))).tolist()
        stream_id = random.bytes(16).hex()
        if random.random() >= _LATER_SHARE:
            continue
        ids = (*(first.prompt_ids or ()), *(first.token_ids or ()), *new)
        if len(ids) + (request.params.max_tokens or 0) > max_model_len:
            continue
        found.append(
            structs.replace(request, stream_id=stream_id, text=None, messages=(), token_ids=ids)
        )
    return found


def predicted(
    seed: int,
    requests: Sequence[ChaosRequest],
    answers: Sequence[ChaosAnswer],
    encode: Callable[[str], Sequence[int]],
) -> tuple[list[ChaosRequest], list[ChaosAnswer]]:
    """The requests, some with predictions, and the answers, with the usage of those over HTTP.

    encode: tokenises text, without special tokens.
    """
    found, expected = list(requests), list(answers)
    for request, answer in zip(requests, answers, strict=True):
        random = np.random.default_rng((seed, 5, request.index))
        is_chat = bool(request.messages)
        if not answer.text or (request.via == "http" and not is_chat):
            continue  # completions have no such field
        if random.random() >= _PREDICTED_SHARE:
            continue
        text = _edited(random, answer.text)
        found[request.index] = structs.replace(request, prediction=text)
        if request.via == "http":
            usage = _usage(answer, list(encode(text))[: request.params.max_tokens])
            expected[request.index] = structs.replace(answer, usage=usage)
    return found, expected


def _edited(random: np.random.Generator, text: str) -> str:
    """The text with words cut, put in and replaced, or as it is."""
    words = text.split(" ")
    for change in random.choice(("put", "cut", "replace"), int(random.integers(4))):
        at = int(random.integers(len(words) + 1))
        words[at : at + (change != "put")] = [] if change == "cut" else [_PUT]
    if random.random() < 0.3:  # it breaks off, or begins later
        at = int(random.integers(len(words) + 1))
        words = pick(random, (words[:at], words[at:]))
    return " ".join(words) or _PUT


def _usage(answer: ChaosAnswer, prediction_ids: Sequence[int]) -> tuple[int, ...]:
    followed = FollowedPrediction(np.array(prediction_ids, np.uint32))
    followed.follow(np.array(answer.token_ids or (), np.uint32))
    counted = (followed.num_accepted, followed.num_rejected)
    return (len(answer.prompt_ids or ()), len(answer.token_ids or ()), 0, *counted)
